"""One view where a trace has several equal ones.

Thunder's gradients view the same value again for every product. Each view is a call from Python, and a second name for
a region's result keeps the result from being written over a value that dies.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolRHS
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.reading import BACKWARD
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["is_view_of_backward", "without_equal_views", "without_equal_views_in_backward"]

_MAY_COPY = frozenset({"contiguous", "repeat"})


def is_view_of_backward(bsym: BoundSymbol) -> bool:
    """Whether it is in the backward of a joint trace, and views its input; a reshape may also copy it.

    A view that the backward reads from the forward would be a value to save. A copy that several operations share may
    live longer than their own copies, so an operation that is meant to copy does not count.
    """
    if BACKWARD not in bsym.tags or bsym.sym.name in _MAY_COPY or not is_view(bsym):
        return False
    dtypes = {p.dtype for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy)}
    return len(dtypes) == 1


def without_equal_views(trace: TraceCtx, among: Callable[[BoundSymbol], bool] = is_view) -> TraceCtx:
    """The trace with each view at its top level once; the same object if all differ.

    Args:
        trace: without writes in place, or one where each write has a result of its own.
        among: which operations may become one.
    """
    swap: dict[Variable, Proxy] = {}
    first: dict[BoundSymbolRHS, BoundSymbol] = {}
    kept: list[BoundSymbol] = []
    for bsym in trace.bound_symbols:
        new = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
        views = new.flat_proxy_args and new.flat_proxy_outs and among(new)
        earlier = first.setdefault(new.rhs, new) if views else new
        if earlier is new:
            kept.append(new)
            continue
        pairs = zip(new.flat_proxy_outs, earlier.flat_proxy_outs, strict=True)
        swap.update((variableify(again), once) for again, once in pairs)
    return rebuilt(trace, kept, "Equal views once") if swap else trace


def without_equal_views_in_backward(trace: TraceCtx) -> TraceCtx:
    """The joint trace with each view of its backward once, except results.

    Autograd would clone a gradient that it gets twice.
    """
    results = {p.name for p in trace.bound_symbols[-1].flat_proxy_args}
    return without_equal_views(
        trace, lambda b: is_view_of_backward(b) and results.isdisjoint(p.name for p in b.flat_proxy_outs)
    )
