"""What is laid out: a headline, tables and a timeline, as data that knows nothing of where it comes from."""

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
        numeric: positions of the columns that hold figures.
        note: a sentence below the table, or "".
        stack: where there is little room, all columns from this one on go below each other; None: none do.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    note: str = ""
    stack: int | None = None


@dataclass(frozen=True)
class Life:
    """A storage that is alive at the peak, or several alike: one bar of a picture.

    Attributes:
        nbytes: of all of them together.
        name: of the first.
        count: how many there are.
        category: position among the view's categories.
        born, last: positions of the first and the last operation that it is alive in, both within the timeline.
        title: what pointing at it says.
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
    """What pictures show of a timeline.

    Attributes:
        first: the number of the first operation.
        device_bytes: what the device holds, per operation.
        categories: names of the layers.
        layers: per category, the bytes at each operation; they sum to `device_bytes`.
        phases: name and number of operations of each phase, in the order they run.
        peak: position of the highest operation.
        peak_phase: the phase that it is in.
        label: an operation by its position, as "linear #7".
        place: the line of source that an operation comes from.
        lives: the storages alive at the peak, the largest first.
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

    @property
    def ops(self) -> int:
        return len(self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.device_bytes[self.peak]


@dataclass(frozen=True)
class Document:
    """A report as it is laid out.

    Attributes:
        lines: the headline, and what stands below it.
        tables: in order.
        timeline: None where nothing runs.
        flow: a picture of the dataflow, as SVG; "" for none.
    """

    lines: tuple[str, ...]
    tables: tuple[Section, ...]
    timeline: TimelineView | None = None
    flow: str = ""
