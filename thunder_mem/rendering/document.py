"""Documents for renderers: a headline, tables and a timeline, as plain data independent of their source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Document", "Life", "Section", "TimelineView"]


@dataclass(frozen=True)
class Section:
    """A titled table.

    Attributes:
        title: of the section.
        columns: the header of each column.
        rows: one text per column; the cells of the columns in `numeric` are aligned to the right.
        numeric: positions of the columns with figures.
        note: a sentence below the table, or "".
        stack: in little room, all columns from this one on stand below each other; None: none do.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    note: str = ""
    stack: int | None = None


@dataclass(frozen=True)
class Life:
    """A storage that is alive at the peak, or several similar ones: one bar of a picture.

    Attributes:
        nbytes: of all of them together.
        name: of the first.
        count: their number.
        category: position among the view's categories.
        born, last: positions of the first and the last operation in which it is alive, both within the timeline.
        title: its tooltip.
    """

    nbytes: int
    name: str
    count: int
    category: int
    born: int
    last: int
    title: str


@dataclass(frozen=True)
class TimelineView:
    """A timeline for pictures.

    Attributes:
        first: the number of the first operation.
        device_bytes: the device's bytes, per operation.
        categories: names of the layers.
        layers: per category, the bytes at each operation; they sum to `device_bytes`.
        phases: name and number of operations of each phase, in execution order.
        peak: position of the highest operation.
        peak_phase: the phase of that operation.
        label: an operation by its position, as "linear #7".
        place: the source line of an operation.
        lives: the storages alive at the peak, the largest first.
        loops: the positions of the operations that run part by part, each with its parts in words.
    """

    first: int
    device_bytes: Sequence[int]
    categories: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]
    phases: tuple[tuple[str, int], ...]
    peak: int
    peak_phase: str
    label: Callable[[int], str]
    place: Callable[[int], str]
    lives: tuple[Life, ...]
    loops: tuple[tuple[int, str], ...] = ()

    @property
    def ops(self) -> int:
        return len(self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.device_bytes[self.peak]


@dataclass(frozen=True)
class Document:
    """A report in the form for renderers.

    Attributes:
        lines: the headline, and the lines below it.
        tables: in order.
        timeline: None if nothing runs.
        flow: a picture of the dataflow, as SVG; "" for none.
    """

    lines: tuple[str, ...]
    tables: tuple[Section, ...]
    timeline: TimelineView | None = None
    flow: str = ""
