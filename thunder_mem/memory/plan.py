"""What was decided, as plain data: the order, the regions, the copies, and what was compared on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Arrangement", "BudgetOutcome", "Decision", "Plan", "PlannedRegion", "Refusal"]


@dataclass(frozen=True)
class BudgetOutcome:
    """What a budget bought.

    Attributes:
        budget_bytes: the limit.
        peak_bytes: the exact peak of the plan.
        recompute_ms: what the repetitions cost by the cost model, beyond those that are free.
        bound_ms: no choice within the budget is known to cost less than this, repetitions and what is exposed of
            copies to the host together; 0 means that no bound is known.
        method: "free" (it fits without repeating anything costly), "ladder", "milp", or "smallest"
            where nothing fits.
        offloaded: names of the values that the backward fetches from the host, in the order in which they leave.
        host_bytes: what they take there, which is part of no peak.
        link_ms: how long their copies take, both ways.
        exposed_ms: how much of that is not hidden behind other work.
        without_offload_ms: what repetitions alone would cost; None if those do not fit, or nothing is offloaded.
    """

    budget_bytes: int
    peak_bytes: int
    recompute_ms: float
    bound_ms: float
    method: str
    offloaded: tuple[str, ...] = ()
    host_bytes: int = 0
    link_ms: float = 0.0
    exposed_ms: float = 0.0
    without_offload_ms: float | None = None

    @property
    def cost_ms(self) -> float:
        """What the budget costs in all."""
        return self.recompute_ms + self.exposed_ms

    @property
    def gap(self) -> float:
        """How far `cost_ms` may be above the least, relative to it."""
        return 0.0 if self.cost_ms <= self.bound_ms else 1.0 - self.bound_ms / self.cost_ms


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """One step of a plan: bound symbols of the source trace that run together.

    Attributes:
        ops: their indices in the source graph, in source order.
        copies: those among `ops` that are recomputed here, while another region (or none) hands their
            results to the rest of the trace.
        executor: name of the fusion executor that runs them as one; None to run them one by one.
        backward: it runs in the backward.
    """

    ops: tuple[int, ...]
    copies: tuple[int, ...] = ()
    executor: str | None = None
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One arrangement that was priced by the timeline.

    Attributes:
        name: what it is.
        forward_peak_bytes: the most bytes alive at once in the forward, what the caller holds included.
        backward_peak_bytes: the same in the backward; 0 without one.
        regions: how many steps it has.
    """

    name: str
    forward_peak_bytes: int
    backward_peak_bytes: int
    regions: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that was left as it was, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision and what it was worth.

    Attributes:
        what: "loss head", "saved for the backward", "regions", "order" or "budget".
        how: what was decided, in words.
        figure: what is counted: "peak" (all that is alive at once), "saved" or "logits".
        before_bytes, after_bytes: that figure without the decision, and with it.
        source: "file:line" that it is about, or "".
    """

    what: str
    how: str
    figure: str
    before_bytes: int
    after_bytes: int
    source: str = ""


@dataclass(frozen=True)
class Plan:
    """The decisions of one compilation.

    Attributes:
        regions: in the order in which they run, forward before backward.
        chosen: name of the candidate that `regions` is.
        candidates: all that were compared, the chosen one among them.
        sort: name of the algorithm that found the order.
        refused: what was left alone.
        decisions: what each decision was worth, in the order they were made; peaks build on each other.
        fingerprint: identifies the source graph, so that plans of equal programs can be compared.
        budget: what the budget bought; None without one.
        overwritten_peak_bytes: the peak if every region of `mem_pointwise` could write its results over what dies
            there, by which free plans are compared; see `rewrites/buffer_reuse.py` for what can.
    """

    regions: tuple[PlannedRegion, ...]
    chosen: str
    candidates: tuple[Arrangement, ...]
    sort: str
    refused: tuple[Refusal, ...] = ()
    fingerprint: str = field(default="")
    decisions: tuple[Decision, ...] = ()
    budget: BudgetOutcome | None = None
    overwritten_peak_bytes: int = 0

    @property
    def candidate(self) -> Arrangement:
        return next(c for c in self.candidates if c.name == self.chosen)

    def with_peaks(self, forward_peak_bytes: int, backward_peak_bytes: int) -> Plan:
        """The plan of a trace that has these peaks now."""
        new = replace(self.candidate, forward_peak_bytes=forward_peak_bytes, backward_peak_bytes=backward_peak_bytes)
        return replace(
            self,
            candidates=tuple(new if c.name == self.chosen else c for c in self.candidates),
            budget=self.budget and replace(self.budget, peak_bytes=new.peak_bytes),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers."""
        return asdict(self)
