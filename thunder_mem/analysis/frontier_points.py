"""Memory against time, as plain data that prints and draws."""

from __future__ import annotations

import pathlib
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from thunder_mem.memory.units import size
from thunder_mem.rendering.document import Section
from thunder_mem.rendering.endings import FRONTIER_ENDINGS
from thunder_mem.rendering.matplotlib import blank_figure, write_figure
from thunder_mem.rendering.text import aligned, rich_table

__all__ = ["Frontier", "Point"]

_COLUMNS = ("peak", "forward", "received", "recompute ms", "step ms", "slower", "enabled by")


@dataclass(frozen=True)
class Point:
    """One plan.

    Attributes:
        peak_bytes: the device's peak, as plans and budgets count it; the larger of the two halves' peaks.
        forward_peak_bytes, backward_peak_bytes: of each half.
        saved_bytes: the bytes that the backward receives from the forward.
        recompute_ms: time of the costly recomputation, by the roofline.
        bound_ms: no choice within this peak is known to recompute for less time.
        step_ms: time of forward and backward by the roofline, with all recomputation and exposed copies.
        offload: the option by which values wait on the host; "" if none do.
        host_bytes: their bytes on the host.
        exposed_ms: time of their copies that other work does not hide.
        free: `MemEfficient` without a budget makes this plan.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    recompute_ms: float
    bound_ms: float
    step_ms: float
    offload: str = ""
    host_bytes: int = 0
    exposed_ms: float = 0.0
    free: bool = False

    @property
    def cost_ms(self) -> float:
        """The total cost: recomputation and exposed copies."""
        return self.recompute_ms + self.exposed_ms

    @property
    def config(self) -> str:
        """The options of `MemEfficient` that enable it; "" if none are needed."""
        option = (
            "" if not self.offload else f", offload={self.offload if self.offload == 'True' else repr(self.offload)}"
        )
        return "" if self.free else f"budget={self.peak_bytes}{option}"


@dataclass(frozen=True)
class Frontier:
    """Plans of one program, each with a lower peak and a longer time than the one before.

    Attributes:
        nothing_recomputed: ordered and fused like the others, but all values for the backward are kept.
        points: from the free recomputation to the smallest peak.
        device: the device of the roofline.
    """

    nothing_recomputed: Point
    points: tuple[Point, ...]
    device: str

    def within(self, budget_bytes: int) -> Point | None:
        """The fastest of the plans that fit; None if none does."""
        return next((p for p in self.points if p.peak_bytes <= budget_bytes), None)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers."""
        return asdict(self)

    @property
    def table(self) -> Section:
        """The plans as a table."""
        rows = tuple(self._cells(p) for p in (self.nothing_recomputed, *self.points))
        return Section("Memory against time", _COLUMNS, rows, numeric=tuple(range(len(_COLUMNS) - 1)))

    @property
    def headline(self) -> str:
        """The range in a sentence."""
        first, last = self.points[0], self.points[-1]
        peaks = f"Peak from {size(first.peak_bytes)} down to {size(last.peak_bytes)}"
        return f"{peaks} for {last.step_ms - first.step_ms:.3g} ms more a step; times for {self.device}."

    def __str__(self) -> str:
        return "\n".join([self.headline, *aligned(self.table)])

    def __rich__(self) -> RenderableType:
        return Group(Text(self.headline, style="bold"), rich_table(self.table, figures_wrap=True))

    def save(self, path: str | pathlib.Path) -> None:
        """Draw the peak against the predicted time of a step, as .png, .svg or .pdf; or write a page, .html.

        Raises:
            ImportError: a picture, without matplotlib.
            ValueError: another kind of file.
        """
        path = pathlib.Path(path)
        if path.suffix not in FRONTIER_ENDINGS:
            raise ValueError(f"a frontier is drawn as .html, .png, .svg or .pdf, not {path.name!r}")
        if path.suffix == ".html":
            from thunder_mem.analysis.frontier_page import frontier_page

            path.write_text(frontier_page(self), encoding="utf-8")
            return
        figure = blank_figure(6.4, 3.8)
        axes = figure.subplots()
        unit, name = _unit(max(p.peak_bytes for p in (self.nothing_recomputed, *self.points)))
        axes.plot(
            [p.peak_bytes / unit for p in self.points], [p.step_ms for p in self.points], "o-", color="#0072b2", ms=4
        )
        start = self.nothing_recomputed
        axes.plot([start.peak_bytes / unit], [start.step_ms], "s", color="#d55e00", ms=6, label="nothing recomputed")
        axes.set_xlabel(f"peak, {name}")
        axes.set_ylabel(f"predicted forward and backward, ms ({self.device})")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        write_figure(figure, path)

    def _cells(self, p: Point) -> tuple[str, ...]:
        whole = p is self.nothing_recomputed
        slower = p.step_ms / self.points[0].step_ms - 1 if self.points[0].step_ms else 0.0
        return (
            size(p.peak_bytes),
            size(p.forward_peak_bytes),
            size(p.saved_bytes),
            "" if whole else f"{p.recompute_ms:.3g}",
            f"{p.step_ms:.4g}",
            f"{slower:+.1%}",
            "(nothing recomputed)" if whole else p.config or "(the default)",
        )


def _unit(nbytes: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
