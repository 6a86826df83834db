"""How far each half of a program is from the least peak that any order of its operations has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thunder_mem.bounds import certify, lower_bound
from thunder_mem.graph import Graph
from thunder_mem.predict import Prediction
from thunder_mem.timeline import simulate
from thunder_mem.trace_graph import read_trace

__all__ = ["Optimality", "optimality"]

# A bound on more operations than this takes minutes.
_MOST_OPS = 3_000


@dataclass(frozen=True)
class Optimality:
    """The peak of one phase against a lower bound over all orders of the same operations.

    Attributes:
        phase: "forward" or "backward".
        peak_bytes: of this phase, as predicted.
        bound_bytes: no order of these operations, with the same regions and the same saved values,
            has a lower peak; None where there is no bound, and `reason` says why.
        gap: (peak - bound) / bound; None without a bound.
        proven: the two are equal.
        method: which method of `thunder_mem.bounds` gave the bound.
        reason: why there is no bound, or "".
    """

    phase: str
    peak_bytes: int
    bound_bytes: int | None = None
    gap: float | None = None
    proven: bool = False
    method: str = ""
    reason: str = ""


def optimality(trace: Any, prediction: Prediction) -> Optimality:
    """Bound the peak of one phase of a prediction, which was made from `trace`.

    The trace's graph is bounded only if its timeline is the prediction's at every operation (but for
    what the caller holds beside it), so that the bound speaks of the bytes that the report shows.
    """
    phase, peak_bytes = prediction.timeline[0].phase, prediction.peak_bytes
    if len(prediction.timeline) > _MOST_OPS:
        reason = f"{len(prediction.timeline):,} operations are more than the {_MOST_OPS:,} that are bounded here"
        return Optimality(phase, peak_bytes, reason=reason)
    try:
        graph = _as_predicted(read_trace(trace).graph, prediction)
    except ValueError as error:
        return Optimality(phase, peak_bytes, reason=f"the trace cannot be read as a graph: {error}")
    timeline = simulate(graph)
    if len(graph) != len(prediction.timeline):
        reason = f"the trace has {len(graph)} operations, of which {len(prediction.timeline)} were predicted"
        return Optimality(phase, peak_bytes, reason=reason)
    beside_bytes = peak_bytes - timeline.peak_bytes
    for op, live_bytes, event in zip(graph.ops, timeline.live_bytes, prediction.timeline, strict=True):
        if live_bytes + beside_bytes != event.live_bytes:
            reason = (
                f"the planner's model and the prediction differ at {op.name} #{event.index}: "
                f"{live_bytes + beside_bytes:,} and {event.live_bytes:,} bytes"
            )
            return Optimality(phase, peak_bytes, reason=reason)
    bound = lower_bound(graph, timeline.order)
    bound = replace(bound, bound_bytes=bound.bound_bytes + beside_bytes)
    certificate = certify(peak_bytes, bound)
    return Optimality(phase, peak_bytes, bound.bound_bytes, certificate.gap, certificate.proven, bound.method)


def _as_predicted(graph: Graph, prediction: Prediction) -> Graph:
    """The graph with scratch left aside, as in `peak_bytes`, and held by the caller what the prediction says."""
    end = prediction.timeline[-1].index
    held = {name for s in prediction.storages if s.born < 0 and s.last >= end for name in (s.name, *s.aliases)}
    return replace(
        graph,
        ops=tuple(replace(op, scratch_bytes=0) for op in graph.ops),
        storages=tuple(replace(s, held=s.held or s.name in held) for s in graph.storages),
    )
