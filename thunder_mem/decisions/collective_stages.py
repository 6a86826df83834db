"""Planning of communication: an order of all collectives before planning, and their overlap afterwards.

Programs without communication skip these stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx

from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.program import device_of
from thunder_mem.distributed.collective_order import Walk, made_of_shards, ordered_collectives
from thunder_mem.distributed.link_model import collectives_of, computing_seconds, exposed_s
from thunder_mem.distributed.overlap_scheduling import overlapped
from thunder_mem.fusion.arrangement import THUNDERS_OWN
from thunder_mem.memory.live_ranges import peaks_of
from thunder_mem.memory.plan import Decision, Plan, Refusal
from thunder_mem.rewrites.zero3 import asks_for_zero3, needed_by_checkpoints, with_parameters_gathered_again
from thunder_mem.semantics.collectives import awaited_futures, starts
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import in_order

__all__ = ["buckets_not_built", "communicating", "prepared", "with_overlap"]

# The default of `ddp`; 0 requests no buckets.
_UNASKED_MB = (0, 25.0)

# Shares of the way from the plan's peak to Thunder's: limits to try if the plan's peak hides less than Thunder's order.
_SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def communicating(trace: TraceCtx) -> bool:
    """Whether the trace starts a collective."""
    return any(map(starts, trace.bound_symbols))


def buckets_not_built() -> tuple[Refusal, ...]:
    """The buckets that the user requested for this program, with a warning.

    Thunder 0.2.6 has passes that build buckets, and calls none of them.
    """
    from thunder.distributed import FSDPBucketingStrategy

    module = getattr(get_compile_data(), "fn", None)
    strategy = getattr(module, "bucketing_strategy", FSDPBucketingStrategy.NONE)
    size_mb = getattr(module, "bucket_size_in_mb", 0)
    asked = []
    if strategy is not FSDPBucketingStrategy.NONE:
        asked.append(f"bucketing_strategy={strategy}")
    if size_mb not in _UNASKED_MB:
        asked.append(f"bucket_size_in_mb={size_mb}")
    if not asked:
        return ()
    reason = "Thunder 0.2.6 builds no buckets, nor does MemEfficient: each parameter has collectives of its own"
    warnings.warn(f"{' and '.join(asked)} changes nothing and can be left out: {reason}", stacklevel=2)
    return tuple(Refusal(what, reason) for what in asked)


def prepared(trace: TraceCtx) -> TraceCtx:
    """The unfused trace with parameters gathered again for ZeRO-3, and its collectives in the order to keep."""
    if not communicating(trace):
        return trace
    source = read_trace(trace)
    if asks_for_zero3() and (again := with_parameters_gathered_again(source, trace)) is not None:
        trace = again
    return ordered_collectives(trace, earlier=source, also_needs=needed_by_checkpoints)


def with_overlap(emitted: TraceCtx, plan: Plan, given: TraceCtx) -> tuple[TraceCtx, Plan]:
    """The planned trace with communication behind computation, and the plan with the peaks of that trace.

    Args:
        emitted: the fused trace in its final order, without `del`s.
        plan: the plan of that trace.
        given: Thunder's trace.
    """
    if not communicating(emitted):
        return emitted, plan
    source, own = read_trace(emitted), read_trace(given)
    device = device_model_of(device_of(source))
    collectives, seconds = collectives_of(source, device), computing_seconds(source, device)
    own_s = exposed_s(range(len(own.graph)), computing_seconds(own, device), collectives_of(own, device))
    start = _waits_on_demand(source)
    lowest = max(peaks_of(source.graph, start))
    highest = max(lowest, *(c.peak_bytes for c in plan.candidates if c.name == THUNDERS_OWN))
    if plan.budget is not None:
        highest = max(lowest, min(highest, plan.budget.budget_bytes))
    tried: list[tuple[float, list[int]]] = []
    for share in _SHARES if highest > lowest else (0.0,):
        limit_bytes = int(lowest + share * (highest - lowest))
        order = overlapped(source.graph, start, seconds, collectives, (limit_bytes, limit_bytes))
        tried.append((exposed_s(order, seconds, collectives), order))
        if tried[-1][0] <= own_s:
            break
    least = min(exposed for exposed, _ in tried)
    exposed, order = next(t for t in tried if t[0] <= max(own_s, 1.01 * least))
    new = in_order(emitted, source, order, "Collectives behind computation")
    total = sum(c.seconds for c in collectives)
    how = f"{len(collectives)} collectives, {_ms(exposed)} of {_ms(total)} not hidden ({_ms(own_s)} in Thunder's order)"
    peaks = peaks_of(source.graph, order)
    decision = Decision("communication", how, "peak", plan.candidate.peak_bytes, max(peaks))
    return new, plan.after(decision, peaks=peaks)


def _waits_on_demand(source: TraceGraph) -> Sequence[int]:
    """The order with waits for gathers, and views of the gathered values, just before their users."""
    graph = source.graph
    lazy = {
        op
        for op in made_of_shards(source)
        if not starts(source.bsyms[op])
        and (any(True for _ in awaited_futures(source.bsyms[op])) or not graph.ops[op].allocates)
    }
    walk = Walk(graph.predecessors)
    for backward in (False, True):
        half = [op.index for op in graph.ops if op.backward == backward]
        for op in half:
            if op not in lazy:
                walk.take(op)
        for op in half:
            walk.take(op)
    return walk.order


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
