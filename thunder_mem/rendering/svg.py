"""The pictures of the page, as SVG text: a few hundred shapes for programs of any length."""

from __future__ import annotations

from html import escape

from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.units import size
from thunder_mem.rendering.curve import columns, labelled, ticks
from thunder_mem.rendering.document import Life, TimelineView

__all__ = ["lives_svg", "timeline_svg"]

_WIDTH, _LEFT, _RIGHT = 1000, 130, 10
_HEIGHT, _TOP, _BOTTOM = 300, 46, 22
_ROW = 20
_COLUMNS = 500
_LABEL_WIDTH = 0.015  # of a label that stands upright, as a share of the picture's width


class _Scale:
    """From operations and bytes to the picture's units."""

    def __init__(self, view: TimelineView, top_bytes: int | None = None) -> None:
        self.ops, self.first = view.ops, view.first
        self.top_bytes = max(1, view.peak_bytes if top_bytes is None else top_bytes)

    def x(self, position: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * position / self.ops

    def y(self, nbytes: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * nbytes / self.top_bytes


def timeline_svg(view: TimelineView, top_bytes: int | None = None) -> str:
    """The device's bytes over the operations, one area per category, with the peak marked.

    The tooltip of a column names its highest operation. The axis ends at `top_bytes`, by default the peak.
    """
    scale = _Scale(view, top_bytes)
    shown = columns(view.device_bytes, _COLUMNS)
    edges = [scale.x(scale.ops * i / len(shown)) for i in range(len(shown) + 1)]
    parts = [_open(_HEIGHT, f"Live bytes over {scale.ops} operations, peak {size(view.peak_bytes)}")]
    for tick in ticks(scale.top_bytes):
        y = scale.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{size(tick)}</text>')
    floor = [0] * len(shown)
    for c, layer in enumerate(view.layers):
        if not any(layer):
            continue
        roof = [below + layer[p] for below, p in zip(floor, shown, strict=True)]
        over = [f"{x:.1f} {scale.y(h):.1f}" for i, h in enumerate(roof) for x in (edges[i], edges[i + 1])]
        under = [f"{x:.1f} {scale.y(h):.1f}" for i, h in enumerate(floor) for x in (edges[i], edges[i + 1])]
        parts.append(f'<path class="c{c}" d="M{"L".join([*over, *reversed(under)])}Z"/>')
        floor = roof
    parts += _loops(view, scale)
    start = 0
    for phase, count in view.phases:
        x = scale.x(start)
        if start:
            parts.append(f'<path class="phase" d="M{x:.1f} 20V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="16">{escape(phase)}</text>')
        start += count
    parts.append(_axis(scale, _HEIGHT - 6))
    i = next(i for i, p in enumerate(shown) if p >= view.peak)
    x, y = (edges[i] + edges[i + 1]) / 2, scale.y(view.peak_bytes)
    anchor, dx = ("start", 8) if x < _WIDTH / 2 else ("end", -8)
    parts.append(f'<path class="mark" d="M{x:.1f} {y:.1f}l-5 -9h10z"/>')
    text = escape(shortened(f"{size(view.peak_bytes)} at {view.label(view.peak)}", 70))
    parts.append(f'<text class="strong" x="{x + dx:.1f}" y="{y - 4:.1f}" text-anchor="{anchor}">{text}</text>')
    running = dict(view.loops)
    for i, p in enumerate(shown):
        title = f"{view.label(p)}: {size(view.device_bytes[p])}\n{view.place(p)}"
        title += f"\n{running[p]}" if p in running else ""
        parts.append(
            f'<rect class="hover" x="{edges[i]:.1f}" y="{_TOP}" width="{edges[i + 1] - edges[i]:.2f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{escape(title)}</title></rect>'
        )
    return "\n".join([*parts, "</svg>"])


def _loops(view: TimelineView, scale: _Scale) -> list[str]:
    """A shade on each operation that runs part by part, with its parts where there is room."""
    low, drawn = _HEIGHT - _BOTTOM, []
    for position, _ in view.loops:
        left, right, top = scale.x(position), scale.x(position + 1), scale.y(view.device_bytes[position])
        width = max(1.0, right - left)
        drawn.append(f'<rect class="loop" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{low - top:.1f}"/>')
    for position, parts in labelled(view.loops, _LABEL_WIDTH * view.ops):
        x, y = scale.x(position + 0.5) + 4, low - 4
        drawn.append(f'<text class="strong" transform="translate({x:.1f} {y})rotate(-90)">{escape(parts)}</text>')
    return drawn


def lives_svg(view: TimelineView, most: int = 30) -> str:
    """A bar per storage alive at the peak, from its birth to its last use, the largest first."""
    scale = _Scale(view)
    lives = view.lives[:most]
    height = _ROW * len(lives) + 26
    parts = [_open(height, "When the storages that are alive at the peak live")]
    for row, life in enumerate(lives):
        left, right = scale.x(life.born), scale.x(life.last + 1)
        y = row * _ROW + 3
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(_name(life))}</text>')
        parts.append(
            f'<rect class="c{life.category}" x="{left:.1f}" y="{y}" '
            f'width="{max(1.0, right - left):.1f}" height="{_ROW - 6}"><title>{escape(life.title)}</title></rect>'
        )
    x = scale.x(view.peak + 0.5)
    parts.append(f'<path class="mark-line" d="M{x:.1f} 0V{_ROW * len(lives)}"/>')
    return "\n".join([*parts, _axis(scale, height - 8), "</svg>"])


def _open(height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'


def _axis(scale: _Scale, y: int) -> str:
    """The numbers of the first, the middle and the last operation."""
    marks = dict.fromkeys((0, scale.ops // 2, scale.ops - 1))
    anchors = ["start", "middle", "end"] if len(marks) == 3 else ["start", "end"]
    return "".join(
        f'<text x="{scale.x(p + (anchor == "end")):.1f}" y="{y}" text-anchor="{anchor}">#{scale.first + p}</text>'
        for p, anchor in zip(marks, anchors, strict=False)
    )


def _name(life: Life) -> str:
    """The end of a long name, which is more informative than its beginning."""
    count = "" if life.count == 1 else f"{life.count} × "
    room = 17 - len(count)
    return count + (life.name if len(life.name) <= room else f"…{life.name[1 - room :]}")
