"""A plan as plain data: the order, the regions, the copies, the compared candidates, and how two plans differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from thunder_mem.memory.outside_input import shortened

__all__ = [
    "Arrangement",
    "BudgetOutcome",
    "Decision",
    "Plan",
    "PlannedRegion",
    "Refusal",
    "differing_part",
    "plan_json",
]


@dataclass(frozen=True)
class BudgetOutcome:
    """The plan that a budget led to.

    Attributes:
        budget_bytes: the limit.
        peak_bytes: the exact peak of the plan.
        recompute_ms: modelled time of the recomputation that is not free.
        bound_ms: no plan within the budget is known to cost less, recomputation and exposed copies together;
            0 means that no bound is known.
        method: "free" (it fits without costly recomputation), "curve", "milp", or "smallest" if nothing fits.
        offloaded: names of the values that the backward fetches from the host, in the order in which they leave.
        host_bytes: their bytes in the host's memory, which no peak includes.
        link_ms: time of their copies, both ways.
        exposed_ms: the part of that time that other work does not hide.
        without_offload_ms: time of a plan by recomputation alone; None if no such plan fits, or nothing is offloaded.
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
        """The total cost of the budget."""
        return self.recompute_ms + self.exposed_ms

    @property
    def gap(self) -> float:
        """The largest possible distance of `cost_ms` from the optimum, relative to the optimum."""
        return 0.0 if self.cost_ms <= self.bound_ms else 1.0 - self.bound_ms / self.cost_ms


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """One step of a plan: bound symbols of the source trace that run together.

    Attributes:
        ops: their indices in the source graph, in source order.
        copies: those among `ops` that are recomputed here, while another region (or none) returns their
            results to the rest of the trace.
        executor: name of the fusion executor that fuses them; None to run them one by one.
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
        name: of the candidate.
        forward_peak_bytes: the most bytes alive at once in the forward, including the caller's storages.
        backward_peak_bytes: the same in the backward; 0 without one.
        regions: its number of steps.
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
    """Something that was left unchanged, and the reason."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision and its gain.

    Attributes:
        what: "loss head", "tiles", "heads", "saved for the backward", "regions", "order" or "budget".
        how: the decision in words.
        figure: the counted quantity: "peak" (all bytes alive at once), "saved", "logits", "products" or "query, key,
            value".
        before_bytes, after_bytes: that quantity without the decision, and with it.
        source: the "file:line" that it concerns, or "".
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
        regions: in execution order, forward before backward.
        chosen: name of the chosen candidate, whose regions these are.
        candidates: all compared candidates, including the chosen one.
        sort: name of the algorithm that found the order.
        refused: parts of the program that were left unchanged.
        decisions: in the order they were made, each with its gain; peaks build on each other.
        fingerprint: identifies the source graph, so that plans of equal programs can be compared.
        budget: the outcome under a budget; None without one.
        overwritten_peak_bytes: the peak if every `mem_pointwise` region could write its results over values that
            die there. Free plans are compared by it; `rewrites/buffer_reuse.py` says which regions can.
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

    def after(self, *decisions: Decision, peaks: tuple[int, int] | None = None) -> Plan:
        """The plan after further decisions.

        Args:
            decisions: in the order they were made.
            peaks: bytes of its trace since, in the forward and in the backward. None if no decision changes them.
        """
        plan = replace(self, decisions=(*self.decisions, *decisions))
        if peaks is None:
            return plan
        new = replace(self.candidate, forward_peak_bytes=peaks[0], backward_peak_bytes=peaks[1])
        return replace(
            plan,
            candidates=tuple(new if c.name == self.chosen else c for c in self.candidates),
            budget=self.budget and replace(self.budget, peak_bytes=new.peak_bytes),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers."""
        return asdict(self)


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, without source lines."""
    found = plan.to_json()
    for decision in found["decisions"]:
        del decision["source"]
    found["refused"] = [refused["what"] for refused in found["refused"]]  # its reasons name source lines
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def differing_part(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first part in which two results of `plan_json` differ, and its value in each; None if equal.

    Example:
        >>> differing_part({"sort": "lpmf", "regions": [1, 2]}, {"sort": "lpmf", "regions": [1, 3]})
        ('number 1 of its regions', '2', '3')
    """
    for key in sorted({*mine, *theirs}):
        here, there = mine.get(key), theirs.get(key)
        if _text(here) == _text(there):  # `repr` distinguishes 1 from True
            continue
        if isinstance(here, list) and isinstance(there, list):
            pairs = enumerate(zip(here, there, strict=False))
            at = next((i for i, (a, b) in pairs if _text(a) != _text(b)), None)
            if at is None:
                return f"the number of its {key}", str(len(here)), str(len(there))
            return f"number {at} of its {key}", shortened(_text(here[at])), shortened(_text(there[at]))
        return f"its {shortened(key, 60)}", shortened(_text(here)), shortened(_text(there))
    return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
