"""Reorder a plain trace for a lower peak, without fusing or recomputing anything."""

from __future__ import annotations

from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.executors.passes import del_last_used

from thunder_mem.schedule.registry import SortFunction, sort_graph
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import in_order

__all__ = ["sort_bound_symbols"]


def sort_bound_symbols(trace: TraceCtx, sort: str | SortFunction = "auto") -> TraceCtx:
    """The same trace with its bound symbols in another order.

    Unpacking stays in front and the return at the end. Every dependency is kept, also those through
    memory, random state, communication and side effects. A trace that releases tensors (`del`) releases
    them at their new last use.

    Args:
        trace: a forward, backward or joint trace.
        sort: a name of `thunder_mem.SORTS`, or a function `(Graph) -> Sequence[int]`.

    Returns:
        A new trace, or `trace` itself if it has that order already.

    Raises:
        ValueError: an unknown name, or a trace without a return statement.
        TypeError: `trace` is no trace, or `sort` is neither a name nor callable.
        GraphError: the function's order breaks a dependency; the message names the first.

    Example:
        >>> import torch, thunder
        >>> f = thunder.jit(lambda x: (x.sin().sum() + x.cos().sum()), executors=[])
        >>> _ = f(torch.ones(4))
        >>> sort_bound_symbols(thunder.last_traces(f)[-1], "source") is thunder.last_traces(f)[-1]
        True
    """
    if not isinstance(trace, TraceCtx):
        hint = ", such as thunder.last_traces(jitted)[-1]"
        raise TypeError(f"sort_bound_symbols takes a Thunder trace{hint}, not {type(trace).__name__}")
    source = read_trace(trace)
    order = []
    for backward in (False, True):
        half = source.graph.half(backward)
        order += [half.ops[i].payload for i in sort_graph(half, sort).order]
    if order == list(range(len(order))) and not _moved_by_reading(source, trace):
        return trace
    new = in_order(trace, source, order)  # type: ignore[arg-type]
    released = {b.sym.name for b in trace.bound_symbols} & {"python_del", "clear_mutable_collection"}
    if released:
        new = del_last_used(new, clear_mutable_collections="clear_mutable_collection" in released)
    new.set_provenance(TraceProvenance(f"Sorted for a lower peak ({getattr(sort, '__name__', sort)})"))
    return new


def _moved_by_reading(source: TraceGraph, trace: TraceCtx) -> bool:
    """Whether reading moved ops: a joint trace is read forward first, which may differ from its own order."""
    place = {id(b): i for i, b in enumerate(trace.bound_symbols)}
    places = [place[id(b)] for b in source.bsyms]
    return places != sorted(places)
