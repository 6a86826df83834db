"""A small program as a picture: its operations in execution order, and the tensors between them.

Boxes stand below each other, coloured by the live bytes of the device. To their left every computed tensor has a lane,
from the operation that makes it to the last at which it is alive. A lane's width shows the size, and a dot marks each
read. So a horizontal cut shows the live tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from thunder_mem.fake_execution.replay import Event
from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.units import size
from thunder_mem.prediction.predict import Held
from thunder_mem.report.facts import Facts
from thunder_mem.report.lines import shorten

if TYPE_CHECKING:
    from thunder_mem.report.report import Report

__all__ = ["dataflow_svg"]

_ROW, _BOX, _TOP, _LANE, _PHASE = 30, 22, 58, 14, 22
_BOX_WIDTH, _BAR, _RIGHT = 420, 120, 430
_LEAST_WIDTH = 1220  # the key has to fit
_CHARACTER = 6.9  # a safe width of one, in the units of the picture
# From pale to dark, distinguishable in grey and without red or green; the last ones take white text.
_RAMP = ("#f1eef6", "#d7d7ea", "#bdc0de", "#9dafd2", "#74a0c6", "#478fb9", "#2379a5", "#0a618d", "#044b70", "#023552")
_WHITE_FROM = 5
_STYLE = """.flow { font: 12px system-ui, sans-serif; background: #fff } .flow text { fill: #1b1f24 }
.flow .dim { fill: #57606a } .flow .white { fill: #fff } .flow .strong { font-weight: 600 }
.flow .lane { stroke: #8c959f; stroke-linecap: butt } .flow .saved { stroke: #0072b2 } .flow .grad { stroke: #009e73 }
.flow .dot { fill: #1b1f24 } .flow .reach { stroke: #1b1f24; stroke-width: .6; stroke-dasharray: 1 2 }
.flow .box { stroke: #57606a; stroke-width: .7 } .flow .peak { stroke: #c2410c; stroke-width: 2.5 }
.flow .bar { fill: #d0d7de } .flow .phase { stroke: #1b1f24; stroke-dasharray: 2 3 }"""


@dataclass(frozen=True)
class _Lane:
    storage: Held
    column: int
    first: int
    last: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """The layout: `shown` positions of the timeline, the boxes' left edge, and the headings that shift them down."""

    shown: range
    left: int
    phases: tuple[int, ...]  # positions at which a phase begins

    def y(self, position: int) -> int:
        """The top of a position's box."""
        before = sum(begin <= position for begin in self.phases)
        return _TOP + _ROW * (position - self.shown.start) + _PHASE * before

    @property
    def width(self) -> int:
        return max(_LEAST_WIDTH, self.left + _BOX_WIDTH + _BAR + _RIGHT)

    @property
    def height(self) -> int:
        return self.y(self.shown.stop - 1) + _ROW + 10


def dataflow_svg(report: Report, most: int = 200) -> str:
    """See `Report.dataflow_svg`."""
    if most < 1:
        raise ValueError(f"a picture shows at least 1 operation, not {most!r}")
    facts, timeline = report._facts, report.prediction.timeline
    if report.peak is None:
        return _document(400, 60, ['<text x="12" y="30">Nothing runs in this program.</text>'])
    peak = facts.position[report.peak.index]
    first = max(0, min(peak - most // 2, len(timeline) - most))
    shown = range(first, min(len(timeline), first + most))
    lanes = _lanes(facts, shown)
    begins = tuple(p for p in shown if p == first or timeline[p].phase != timeline[p - 1].phase)
    layout = _Layout(shown, 20 + _LANE * (1 + max((lane.column for lane in lanes), default=0)), begins)
    parts = _title(report, shown)
    for begin in begins:
        y = layout.y(begin)
        parts.append(f'<path class="phase" d="M8 {y - 4}H{layout.width - 8}"/>')
        parts.append(f'<text class="strong" x="{layout.left}" y="{y - 9}">{escape(timeline[begin].phase)}</text>')
    parts += [_lane(lane, facts, layout) for lane in lanes]
    held = report.prediction.device_bytes
    least_bytes = min(held[p] for p in shown)
    for position in shown:
        share = (held[position] - least_bytes) / max(1, report.peak_bytes - least_bytes)
        colour = min(len(_RAMP) - 1, int(share * len(_RAMP)))
        parts += _box(report, position, colour, position == peak, layout)
    return _document(layout.width, layout.height, parts)


def _title(report: Report, shown: range) -> list[str]:
    assert report.peak is not None
    total = len(report.prediction.timeline)
    note = f"{total} operations" if len(shown) == total else f"operations {shown.start} to {shown.stop - 1} of {total}"
    text = f"Peak {size(report.peak_bytes)} at {report.peak.op} #{report.peak.index} · {note}, in the order they run"
    held = f"{size(report.prediction.held_bytes)} held by the caller throughout, without a lane"
    parts = [f'<text class="strong" x="12" y="20">{escape(text)}</text>']
    x = 12.0
    for kind, name in (("", "working memory"), (" saved", "saved for the backward"), (" grad", "gradients")):
        parts.append(f'<path class="lane{kind}" stroke-width="5" d="M{x:.0f} 37h18"/>')
        parts.append(f'<text class="dim" x="{x + 23:.0f}" y="41">{name}</text>')
        x += 40 + _CHARACTER * len(name)
    parts.append(f'<text class="dim" x="{x:.0f}" y="41">{escape(held)}</text>')
    x += 30 + _CHARACTER * len(held)
    for colour in _RAMP:
        parts.append(f'<rect x="{x:.0f}" y="30" width="12" height="13" fill="{colour}"/>')
        x += 12
    parts.append(f'<text class="dim" x="{x + 6:.0f}" y="41">fewest to most bytes held</text>')
    return parts


def _lanes(facts: Facts, shown: range) -> list[_Lane]:
    """The lanes of computed tensors; those alive at once stand side by side, the nearest free lane first."""
    spans = []
    for i, storage in enumerate(facts.prediction.storages):
        first, last = facts.span(storage)
        if storage.nbytes and storage.born >= 0 and first <= last and first < shown.stop and last >= shown.start:
            spans.append((first, -last, i))
    free_from: list[int] = []  # per column, the first position at which it is free again
    lanes = []
    for first, minus_last, i in sorted(spans):
        column = next((c for c, free in enumerate(free_from) if free <= first), len(free_from))
        if column == len(free_from):
            free_from.append(0)
        free_from[column] = 1 - minus_last
        reads = tuple(r for r in facts.readers[i] if first < r <= -minus_last and r in shown)
        lanes.append(_Lane(facts.prediction.storages[i], column, first, -minus_last, reads))
    return lanes


def _lane(lane: _Lane, facts: Facts, layout: _Layout) -> str:
    x, left = layout.left - 8 - _LANE * (lane.column + 0.5), layout.left
    largest = max((s.nbytes for s in facts.prediction.storages if s.born >= 0), default=1)
    width = 1.5 + 8 * (lane.storage.nbytes / largest) ** 0.5

    def y(position: int) -> float:
        return layout.y(position) + _BOX / 2

    top = y(lane.first) if lane.first in layout.shown else layout.y(layout.shown.start) - 4
    bottom = y(lane.last) if lane.last in layout.shown else layout.height
    storage = lane.storage
    kind = {"saved for the backward": " saved", "gradients": " grad"}.get(facts.category(storage), "")
    tensor = f"{str(storage.dtype).removeprefix('torch.')} {'×'.join(map(str, storage.shape)) or 'scalar'}"
    title = f"{', '.join((storage.name, *storage.aliases[:6]))}: {tensor}, {size(storage.nbytes)}"
    title += f"\nalive from #{storage.born} to #{storage.last}"
    line = f'd="M{x:.1f} {top:.1f}V{max(bottom, top + 4):.1f}"'
    parts = [f'<g><title>{escape(title)}</title><path class="lane{kind}" stroke-width="{width:.1f}" {line}/>']
    if lane.first in layout.shown:
        parts.append(f'<path class="reach" d="M{x:.1f} {top:.1f}H{left}"/>')
    for read in lane.reads:
        parts.append(f'<path class="reach" d="M{x:.1f} {y(read):.1f}H{left}"/>')
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y(read):.1f}" r="2.5"/>')
    return "".join([*parts, "</g>"])


def _box(report: Report, position: int, colour: int, is_peak: bool, layout: _Layout) -> list[str]:
    facts, event, y = report._facts, report.prediction.timeline[position], layout.y(position)
    members = _members(event)
    label = f"#{event.index} {event.name}" + (f": {', '.join(members)}" if members else "")
    outputs = shortened(", ".join(event.outputs), 16)
    nbytes = report.prediction.device_bytes[position]
    title = f"{event.phase} {label}\nmakes {', '.join(event.outputs) or 'nothing'}; {size(nbytes)} held"
    held = [n for n, storage in facts.reads[position].items() if facts.prediction.storages[storage].born < 0]
    title += f"\nreads of the caller's: {', '.join(held)}" if held else ""
    white = ' class="white"' if colour >= _WHITE_FROM else ""
    left, bar, place = layout.left, layout.left + _BOX_WIDTH + 8, facts.places[position]
    room = int((_BOX_WIDTH - 24) / _CHARACTER) - len(outputs)
    line = ("gradient of " if place.undoes else "") + shorten(place.used_at or place.source)
    where = shortened(f"{line}: {place.code}" if place.code else line, int(_RIGHT / _CHARACTER))
    filled = (_BAR - 20) * nbytes / max(1, report.peak_bytes)
    return [
        f'<g><title>{escape(title)}</title><rect class="box{" peak" if is_peak else ""}" x="{left}" y="{y}" '
        f'width="{_BOX_WIDTH}" height="{_BOX}" rx="3" fill="{_RAMP[colour]}"/>'
        f'<text{white} x="{left + 8}" y="{y + 15}">{escape(shortened(label, room))}</text>'
        f'<text{white} x="{left + _BOX_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(outputs)}</text></g>',
        f'<rect class="bar" x="{bar}" y="{y + 3}" width="{filled:.1f}" height="{_BOX - 6}"/>'
        f'<text x="{bar + 4}" y="{y + 15}">{size(nbytes)}</text>',
        f'<text class="dim" x="{bar + _BAR - 8}" y="{y + 15}">{escape(where)}</text>',
    ]


def _members(event: Event) -> list[str]:
    """The operations of a fusion region, equal neighbours counted."""
    if event.bsym is None or not event.bsym.sym.is_fusion:
        return []
    counted = [(name, len(list(equal))) for name, equal in groupby(b.sym.name for b in event.bsym.subsymbols)]
    return [f"{name} ×{count}" if count > 1 else name for name, count in counted]


def _document(width: int, height: int, parts: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="flow" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )
