"""A trace with other bound symbols: what every pass over a trace returns in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, get_tracectx, tracectx

if TYPE_CHECKING:
    from thunder_mem.trace.reading import TraceGraph

__all__ = ["in_order", "rebuilt", "recorded", "with_body"]

BoundSymbols = Iterable[BoundSymbol] | Callable[[], Iterable[BoundSymbol]]


def rebuilt(trace: TraceCtx, bound_symbols: BoundSymbols, provenance: str = "") -> TraceCtx:
    """A new trace with the arguments and names of another.

    Args:
        trace: the other trace; it is not changed.
        bound_symbols: of the new trace. A function makes them while the new trace is the current one, so that new
            proxies get names that are free in it. What Thunder records meanwhile, as for a look at symbolic shapes, is
            no part of it.
        provenance: printed above the trace.
    """
    new = from_trace(trace)
    with tracectx(new):
        new.bound_symbols = list(bound_symbols() if callable(bound_symbols) else bound_symbols)
    if provenance:
        new.set_provenance(TraceProvenance(provenance))
    return new


def with_body(trace: TraceCtx, source: TraceGraph, body: BoundSymbols, provenance: str = "") -> TraceCtx:
    """The trace with another body between its unpacking and its return.

    Args:
        trace, body, provenance: as for `rebuilt`.
        source: the reading of `trace`.
    """
    return rebuilt(trace, lambda: (*source.prefix, *(body() if callable(body) else body), source.result), provenance)


def in_order(trace: TraceCtx, source: TraceGraph, order: Sequence[int], provenance: str = "") -> TraceCtx:
    """The trace with its operations in another order, as indices in `source.graph`.

    Args:
        trace, provenance: as for `rebuilt`.
        source: the reading of `trace`.
        order: all operations.
    """
    return with_body(trace, source, [source.bsyms[op] for op in order], provenance)


@contextmanager
def recorded(trace: TraceCtx | None = None) -> Iterator[list[BoundSymbol]]:
    """A context whose operations go into the given list instead of the trace.

    Args:
        trace: becomes the current one, for names of new proxies; by default the current one stays.
    """
    trace = trace or get_tracectx()
    assert trace is not None
    made: list[BoundSymbol] = []
    depth = len(trace.scopes)
    trace.push_scope(made)
    try:
        with tracectx(trace):
            yield made
    finally:
        del trace.scopes[depth:]  # an exception leaves the scopes of unfinished operations behind
