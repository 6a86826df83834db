"""One view where a trace has several equal ones.

Thunder's gradients view the same value again for every product. A second name for a region's result keeps the result
from being written over a value that dies.
"""

from __future__ import annotations

from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolRHS
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["without_equal_views"]


def without_equal_views(trace: TraceCtx) -> TraceCtx:
    """The trace with each view at its top level once; the same object if all differ.

    Args:
        trace: without writes in place.
    """
    swap: dict[Variable, Proxy] = {}
    first: dict[BoundSymbolRHS, BoundSymbol] = {}
    kept: list[BoundSymbol] = []
    for bsym in trace.bound_symbols:
        new = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
        views = new.flat_proxy_args and new.flat_proxy_outs and is_view(new)
        earlier = first.setdefault(new.rhs, new) if views else new
        if earlier is new:
            kept.append(new)
            continue
        pairs = zip(new.flat_proxy_outs, earlier.flat_proxy_outs, strict=True)
        swap.update((variableify(again), once) for again, once in pairs)
    return rebuilt(trace, kept, "Equal views once") if swap else trace
