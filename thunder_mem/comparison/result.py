"""A comparison as data, and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from thunder_mem.memory.units import size
from thunder_mem.rendering.document import Section

__all__ = ["EAGER", "OURS", "TORCH_COMPILE", "Comparison", "Row"]

EAGER, TORCH_COMPILE, OURS = "eager", "torch.compile", "MemEfficient"


@dataclass(frozen=True)
class Row:
    """One program under one compiler.

    Attributes:
        name: "eager", "Thunder", "torch.compile" or "MemEfficient".
        peak_bytes: the most bytes on the device during a step, including the caller's; None after a failure.
        step_s: median seconds of a step; None after a failure.
        result_difference, gradient_difference: the largest absolute difference of an element from eager's; None for
            eager itself, after a failure, and for gradients that do not exist.
        failure: why there are no figures, in one sentence; else "".
    """

    name: str
    peak_bytes: int | None = None
    step_s: float | None = None
    result_difference: float | None = None
    gradient_difference: float | None = None
    failure: str = ""


@dataclass(frozen=True, repr=False)
class Comparison:
    """A program under several compilers; its `str` has a line for each, and a verdict.

    Attributes:
        rows: eager first, MemEfficient last.
        device: where it ran.
        held_bytes: the bytes of each peak that the caller holds before a step: parameters, buffers, inputs and the
            optimizer's state.
        trains: whether a step has a backward.
        draws: whether the program draws random numbers, so that differences from eager are no errors.
        why: why MemEfficient's peak is not the lowest; "" if it is.
    """

    rows: tuple[Row, ...]
    device: str
    held_bytes: int
    trains: bool
    draws: bool
    why: str = ""

    def __getitem__(self, name: str) -> Row:
        """The row of a compiler.

        Raises:
            KeyError: it has none.
        """
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise KeyError(f"{name!r} is none of {', '.join(row.name for row in self.rows)}")
        return found

    @property
    def best(self) -> Row | None:
        """The row with the lowest peak: MemEfficient's if it is among several; None if nothing ran."""
        ran = [(row.peak_bytes, row.name != OURS, i) for i, row in enumerate(self.rows) if row.peak_bytes is not None]
        return self.rows[min(ran)[2]] if ran else None

    @property
    def verdict(self) -> str:
        """Which compiler needs the least memory, at what time, and why it is another than MemEfficient."""
        best, ours = self.best, self[OURS]
        if best is None or best.peak_bytes is None:
            return "Nothing ran: each line says why."
        others = [row for row in self.rows if row is not best and row.peak_bytes]
        below = [f"{1 - best.peak_bytes / row.peak_bytes:.1%} below {row.name}" for row in others if row.peak_bytes]
        text = ", ".join([f"{best.name} needs the least memory", *below])
        if best is not self[EAGER] and (ratio := self._ratio(best)):
            text += f", at {ratio:.2f} times eager's time"
        if ours.failure:
            text = text if below else f"Only {best.name} ran"
            return f"{text}. MemEfficient failed: its line says why."
        if self.why and best is ours:
            return f"MemEfficient needs as much as {' and '.join(self._equals(best))}: {self.why}."
        return f"{text}. Why not MemEfficient: {self.why}." if self.why else f"{text}."

    def _equals(self, best: Row) -> list[str]:
        return [row.name for row in self.rows if row is not best and row.peak_bytes == best.peak_bytes]

    def _ratio(self, row: Row) -> float | None:
        eager = self[EAGER].step_s
        return row.step_s / eager if row.step_s is not None and eager else None

    @property
    def headline(self) -> str:
        """What ran, where, and what each peak includes."""
        what = "A training step" if self.trains else "A forward"
        return (
            f"{what} on {self.device}; peaks include the caller's {size(self.held_bytes)}; differences are from eager"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the differences, in sentences."""
        if not self.draws:
            return ()
        return ("The program draws random numbers, and each compiler draws its own: differences are no errors.",)

    @property
    def table(self) -> Section:
        """The rows as a table."""
        columns = ("compiler", "peak", "step", "of eager's", "results within", "gradients within", "failure")
        rows = []
        for row in self.rows:
            peak, step, ratio = self._figures(row)
            apart = (_figure(row.result_difference), _figure(row.gradient_difference))
            rows.append((row.name, peak, step, ratio, *apart, row.failure))
        shown = [i for i in range(len(columns)) if i < 4 or any(r[i] for r in rows)]
        picked = tuple(tuple(r[i] for i in shown) for r in rows)
        numeric = tuple(at for at, i in enumerate(shown) if 1 <= i <= 5)
        return Section("Side by side", tuple(columns[i] for i in shown), picked, numeric)

    def _figures(self, row: Row) -> tuple[str, str, str]:
        ratio = None if row.name == EAGER else self._ratio(row)
        return (
            "" if row.peak_bytes is None else size(row.peak_bytes),
            "" if row.step_s is None else f"{row.step_s * 1e3:,.2f} ms",
            "" if ratio is None else f"{ratio:.2f} x",
        )

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            peak, step, ratio = self._figures(row)
            apart = [
                f"{what} within {_figure(d)}"
                for what, d in (("results", row.result_difference), ("gradients", row.gradient_difference))
                if d is not None
            ]
            words = row.failure or f"{peak:>11}  {step:>11}  {ratio:>7}  {', '.join(apart)}"
            lines.append(f"  {row.name:13} {words}".rstrip())
        return "\n".join([self.headline, *lines, self.verdict, *self.notes])

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        best = self.best
        return {**asdict(self), "best": None if best is None else best.name, "verdict": self.verdict}


def _figure(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.1g}"
