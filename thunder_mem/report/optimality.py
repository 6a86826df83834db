"""The distance of each half of a program from the least peak of any order of its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.memory.graph import Graph, Op, Storage
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.prediction.predict import Prediction
from thunder_mem.schedule.lower_bounds import certify, lower_bound
from thunder_mem.trace.reading import read_trace

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
            has a lower peak; None without a bound, and `reason` says why.
        gap: (peak - bound) / bound; None without a bound.
        proven: the two are equal.
        method: which method of `thunder_mem.schedule.lower_bounds` gave the bound.
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

    The graph is bounded only if its timeline equals the prediction's at every operation (apart from the caller's
    other tensors). So the bound refers to the bytes in the report.
    """
    phase, peak_bytes = prediction.timeline[0].phase, prediction.peak_bytes
    if len(prediction.timeline) > _MOST_OPS:
        reason = f"{len(prediction.timeline):,} operations are more than the {_MOST_OPS:,} that are bounded here"
        return Optimality(phase, peak_bytes, reason=reason)
    try:
        graph = read_trace(trace).graph
    except ValueError as error:
        return Optimality(phase, peak_bytes, reason=f"the trace cannot be read as a graph: {error}")
    if len(graph) != len(prediction.timeline):
        reason = f"{len(prediction.timeline):,} operations run in it, of which the trace has {len(graph):,}"
        return Optimality(phase, peak_bytes, reason=reason)
    graph = _as_predicted(graph, prediction)
    timeline = price_order(graph)
    beside_bytes = peak_bytes - timeline.peak_bytes
    events = zip(graph.ops, timeline.live_bytes, prediction.device_bytes, prediction.timeline, strict=True)
    for op, live_bytes, device_bytes, event in events:
        if live_bytes + beside_bytes != device_bytes:
            reason = (
                f"the planner's model and the prediction differ at {op.name} #{event.index}: "
                f"{live_bytes + beside_bytes:,} and {device_bytes:,} bytes"
            )
            return Optimality(phase, peak_bytes, reason=reason)
    bound = lower_bound(graph, timeline.order)
    bound = replace(bound, bound_bytes=bound.bound_bytes + beside_bytes)
    certificate = certify(peak_bytes, bound)
    return Optimality(phase, peak_bytes, bound.bound_bytes, certificate.gap, certificate.proven, bound.method)


def _as_predicted(graph: Graph, prediction: Prediction) -> Graph:
    """The graph over the storages and the scratch of the prediction.

    One trace alone does not show which of its inputs share memory, nor which results of other libraries are
    views; the prediction does.
    """
    known: dict[str, int] = {}
    for i, predicted in enumerate(prediction.storages):
        for name in (predicted.name, *predicted.aliases):
            known.setdefault(name, i)
    end = prediction.timeline[-1].index
    storages: list[Storage] = []
    at: dict[tuple[bool, int], int] = {}
    moved: list[int] = []
    for s in graph.storages:
        i = known.get(s.name, -1)
        key = (True, i) if i >= 0 else (False, s.index)
        if key not in at:
            at[key] = len(storages)
            held = prediction.storages[i] if i >= 0 else None
            stays = s.held or (held is not None and held.born < 0 and held.last >= end)
            nbytes = block_bytes(held.nbytes, prediction.device_type) if held else s.nbytes
            storages.append(Storage(at[key], nbytes, s.name, s.device, stays))
        moved.append(at[key])
    ops: list[Op] = []
    made: set[int] = set()
    for op, event in zip(graph.ops, prediction.timeline, strict=True):
        new = {moved[s] for s in op.allocates} - made
        made |= new
        ops.append(
            replace(
                op,
                reads=tuple(dict.fromkeys(m for s in (*op.reads, *op.allocates) if (m := moved[s]) not in new)),
                writes=tuple(dict.fromkeys(moved[s] for s in op.writes)),
                allocates=tuple(sorted(new)),
                scratch_bytes=block_bytes(event.scratch_bytes, prediction.device_type),
            )
        )
    return Graph(tuple(ops), tuple(storages), graph.predecessors, frozenset(moved[s] for s in graph.outputs))
