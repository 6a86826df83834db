"""Casts to a wider dtype and back, which change nothing: their results are their arguments."""

from __future__ import annotations

from thunder.core.dtypes import bfloat16, dtype, float16, float32, float64, to_strong_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

__all__ = ["without_round_trips"]

_HOLDS = {bfloat16: (float32, float64), float16: (float32, float64), float32: (float64,)}
"""Per dtype those that hold each of its numbers."""


def without_round_trips(trace: TraceCtx) -> TraceCtx:
    """The trace in which what was cast to a wider dtype and back is what it was; the same object where nothing was.

    Where a gradient leaves a product and a bias, Thunder hands the one a copy of what it adds up for the other.
    Only casts count that stand in the trace by themselves; the first of the two stays, for `dce`.
    """
    cast_from: dict[str, Proxy] = {}
    swap: dict[Variable, Proxy] = {}
    bsyms: list[BoundSymbol] = []
    for bsym in trace.bound_symbols:
        if swap:
            bsym = bsym.from_bsym_swap_proxies(swap, skip_output=True)
        if bsym.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE and isinstance(bsym.output, TensorProxy):
            source = bsym.args[0]
            first = cast_from.get(source.name)
            if isinstance(first, TensorProxy) and _restores(first, source, bsym.output):
                swap[variableify(bsym.output)] = first
                continue
            cast_from[bsym.output.name] = source
        bsyms.append(bsym)
    if not swap:
        return trace
    new = from_trace(trace)
    new.bound_symbols = bsyms
    return new


def _restores(first: TensorProxy, wide: TensorProxy, last: TensorProxy) -> bool:
    dtypes: list[dtype] = [to_strong_dtype(p.dtype) for p in (first, wide, last)]
    return dtypes[0] == dtypes[2] and dtypes[1] in _HOLDS.get(dtypes[0], ())
