"""Move each update of a parameter to where its gradient is complete and nobody reads the parameter any more.

The order of the trace is where sorts begin, and prices of partitions use it as it is. With all updates at its end, all
gradients would wait for them there.
"""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from thunder_mem.optimizer.update import is_update
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import in_order
from thunder_mem.trace.region_readers import readers_in_regions

__all__ = ["early_updates"]


def early_updates(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace with updates as early as their edges permit; the same object if none moves.

    Args:
        source: the reading of `trace`.
        trace: a joint trace whose backward recomputes what it should.
    """
    graph = source.graph
    first = next((op.index for op in graph.ops if op.backward), 0)
    place = list(range(len(graph)))  # an update stands behind the operation of that index
    for op, bsym in zip(graph.ops, source.bsyms, strict=True):
        if is_update(bsym):
            readers = frozenset[int]().union(*(readers_in_regions(source, s) for s in op.writes)) - {op.index}
            place[op.index] = max(first, *(place[p] for p in (*graph.predecessors[op.index], *readers)))
    order = sorted(range(len(graph)), key=place.__getitem__)
    return trace if order == sorted(order) else in_order(trace, source, order, "Updates where gradients are complete")
