"""A frontier as one self-contained page: memory against time as inline SVG, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from thunder_mem.memory.units import size
from thunder_mem.rendering.curve import ticks
from thunder_mem.rendering.html import fragment, page, picture

if TYPE_CHECKING:
    from thunder_mem.analysis.frontier_points import Frontier, Point

__all__ = ["frontier_page", "frontier_svg"]

_WIDTH, _HEIGHT = 1000, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 30, 26, 46
_MARGIN = 0.06  # of each range, so that no point lies on the frame


def frontier_page(frontier: Frontier, lines: Sequence[str] = ()) -> str:
    """The frontier as a whole HTML document; `lines` stand below its headline."""
    title = "<h2>Time of forward and backward against the peak</h2>"
    body = fragment([frontier.headline, *lines], [title, picture(frontier_svg(frontier))], [frontier.table])
    return page(frontier.headline, f"{body}\n")


def frontier_svg(frontier: Frontier) -> str:
    """The predicted time of forward and backward over the peak, a point for each plan, with its name as a tooltip."""
    start, plans = frontier.nothing_recomputed, frontier.points
    left, right = _range([p.peak_bytes for p in (start, *plans)])
    low, high = _range([p.step_ms for p in (start, *plans)])

    def x(nbytes: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (nbytes - left) / (right - left)

    def y(ms: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (ms - low) / (high - low)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Time against memory">']
    step_bytes = ([*ticks(round(right - left)), 1])[1]
    for nbytes in range(math.ceil(left / step_bytes) * step_bytes, int(right) + 1, step_bytes):
        parts.append(f'<path class="grid" d="M{x(nbytes):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text x="{x(nbytes):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{size(nbytes)}</text>'
        )
    step_ms = _step(high - low)
    for count in range(math.ceil(low / step_ms), int(high / step_ms) + 1):
        ms = count * step_ms
        parts.append(f'<path class="grid" d="M{_LEFT} {y(ms):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:.4g} ms</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">peak</text>')
    line = "L".join(f"{x(p.peak_bytes):.1f} {y(p.step_ms):.1f}" for p in plans)
    parts.append(f'<path class="mark-line" fill="none" d="M{line}"/>')
    parts += [_point(p, x(p.peak_bytes), y(p.step_ms), p.config or "(the default)") for p in plans]
    parts.append(_point(start, x(start.peak_bytes), y(start.step_ms), "nothing recomputed", square=True))
    # Below the point: the line comes from above.
    anchor, dx = ("end", -9) if x(start.peak_bytes) > _WIDTH / 2 else ("start", 9)
    parts.append(
        f'<text class="strong" x="{x(start.peak_bytes) + dx:.1f}" y="{y(start.step_ms) + 13:.1f}" '
        f'text-anchor="{anchor}">nothing recomputed</text>'
    )
    return "\n".join([*parts, "</svg>"])


def _point(p: Point, x: float, y: float, name: str, *, square: bool = False) -> str:
    title = f"<title>{escape(f'{name}: {size(p.peak_bytes)}, {p.step_ms:.4g} ms')}</title>"
    if square:
        return f'<rect class="c1" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10">{title}</rect>'
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>'


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that a handful of steps make up `span`."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= span / 4)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From a little below the least to a little above the largest; never empty."""
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low) or _MARGIN * high or 1.0
    return low - margin, high + margin
