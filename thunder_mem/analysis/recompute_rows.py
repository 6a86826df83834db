"""The table of values that could be recomputed, as plain data that prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from thunder_mem.memory.units import size
from thunder_mem.rendering.document import Section
from thunder_mem.rendering.html import fragment
from thunder_mem.rendering.text import aligned, rich_table

__all__ = ["Kept", "RecomputeTable", "Row"]


@dataclass(frozen=True)
class Row:
    """One pattern of a program under one strategy.

    Attributes:
        pattern: the operations to recompute, joined by "+".
        strategy: "recompute" or "compromised".
        now: "received" by the backward, or "rebuilt": for free, by a checkpoint or by an entry.
        shapes: of the values, with the names of dims; each once.
        symbolic_bytes: bytes of each of the shapes, such as "8192*B*T".
        count: the number of occurrences.
        each_bytes: bytes of the values of one occurrence, the largest one.
        values_bytes: bytes of the values of all occurrences.
        saved_bytes: bytes that the backward no longer receives if all are recomputed.
        peak_bytes: the peak of the resulting plan; None if it was not requested.
        peak_change_bytes: against the plan without it; negative is lower.
        ms: time of all recomputation, by the roofline of the device.
        modules: modules of the operations, with numbers as # beside words; "" if unknown.
        layers: numbers of the layers that have it.
        sources: lines of the user's calls.
        config: the entry for `MemEfficient(recompute=...)`.
    """

    pattern: str
    strategy: str
    now: str
    shapes: tuple[str, ...]
    symbolic_bytes: tuple[str, ...]
    count: int
    each_bytes: int
    values_bytes: int
    saved_bytes: int
    peak_bytes: int | None
    peak_change_bytes: int | None
    ms: float
    modules: tuple[str, ...]
    layers: tuple[int, ...]
    sources: tuple[str, ...]
    config: str

    @property
    def ms_per_gib(self) -> float | None:
        """Milliseconds for each saved GiB; None if nothing is saved."""
        return self.ms / (self.saved_bytes / 2**30) if self.saved_bytes > 0 else None


@dataclass(frozen=True)
class Kept:
    """Values that the backward must receive: their pattern, number, bytes, and the reason."""

    pattern: str
    count: int
    nbytes: int
    reason: str


_COLUMNS = ("pattern", "now", "shapes", "count", "each", "saved", "peak", "ms", "ms/GiB", "where", "config")
_NUMERIC = (3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class RecomputeTable:
    """Every candidate for recomputation of one program, the largest saving first.

    Attributes:
        rows: one per pattern and strategy.
        kept: values that cannot be recomputed.
        received_bytes: the bytes that the backward receives without any row.
        peak_bytes: the peak without any row, including arguments.
        device: the device of the roofline.
    """

    rows: tuple[Row, ...]
    kept: tuple[Kept, ...]
    received_bytes: int
    peak_bytes: int
    device: str

    def __getitem__(self, pattern: str) -> Row:
        """The row of a pattern; "recompute" comes before "compromised"."""
        return next(row for row in self.rows if row.pattern.rstrip("+") == pattern.rstrip("+"))

    def config(self, *patterns: str) -> str:
        """The configuration that recomputes these patterns, or all patterns that the backward receives now.

        Raises:
            KeyError: there is no such pattern.
        """
        known = {row.pattern.rstrip("+"): row for row in reversed(self.rows) if row.strategy == "recompute"}
        wanted = [known[p.rstrip("+")] for p in patterns]
        wanted = wanted or [row for row in known.values() if row.now == "received" and row.saved_bytes > 0]
        return ",".join(row.config for row in wanted)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers."""
        found = asdict(self)
        for row, data in zip(self.rows, found["rows"], strict=True):
            data["ms_per_gib"] = row.ms_per_gib
        return found

    def __str__(self) -> str:
        return "\n".join([self._headline, *aligned(self.table), *map(_why, self.kept)])

    def __rich__(self) -> RenderableType:
        kept = (Text(_why(k), style="dim") for k in self.kept)
        return Group(Text(self._headline, style="bold"), rich_table(self.table, figures_wrap=True), *kept)

    def _repr_html_(self) -> str:
        return fragment([self._headline, *map(_why, self.kept)], [], [self.table])

    @property
    def table(self) -> Section:
        """The rows as a table."""
        return Section("Candidates for recomputation", _COLUMNS, tuple(map(_cells, self.rows)), _NUMERIC)

    @property
    def _headline(self) -> str:
        received = f"the backward receives {size(self.received_bytes)}"
        return f"Peak {size(self.peak_bytes)}, {received}; times for {self.device}."


def _cells(row: Row) -> tuple[str, ...]:
    change = row.peak_change_bytes
    where = ", ".join(row.modules) or ", ".join(source.rpartition("/")[2] for source in row.sources)
    if row.layers:
        where += f" ({len(row.layers)} layers)"
    per_gib = row.ms_per_gib
    return (
        row.pattern,
        row.now,
        " ".join(row.shapes),
        str(row.count),
        size(row.each_bytes),
        size(row.saved_bytes) if row.now == "received" else "",
        "" if change is None else f"{'+' if change > 0 else ''}{size(change)}",
        f"{row.ms:.3g}" if row.now == "received" else "",
        "" if per_gib is None else f"{per_gib:.3g}",
        where,
        row.config,
    )


def _why(kept: Kept) -> str:
    return f"not {kept.pattern} ({kept.count}, {size(kept.nbytes)}): {kept.reason}"
