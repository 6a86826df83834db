"""Remove casts to a wider dtype and back, whose results equal their arguments."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.dtypes import bfloat16, dtype, float16, float32, float64, to_strong_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import effects_of
from thunder_mem.trace.reading import joint_results, proxies_in
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.renaming import renamed

__all__ = ["without_round_trips"]

_HOLDS = {bfloat16: (float32, float64), float16: (float32, float64), float32: (float64,)}
"""Per dtype those that hold each of its numbers."""


def without_round_trips(trace: TraceCtx) -> TraceCtx:
    """The trace without casts to a wider dtype and back; the same object if there are none.

    If a product and a bias share a gradient, Thunder gives one of them a copy of the other's sum. Only casts at the
    top level of the trace count; the first of the two stays, for `dce`. Casts to a result of the forward stay, because
    the caller may write to it, and so do casts of memory that the program overwrites.
    """
    handed_out = {p.name for p in proxies_in((joint_results(trace.bound_symbols[-1]) or {}).get("fw_flat_out"))}
    is_overwritten = _overwritten(trace)
    cast_from: dict[str, Proxy] = {}
    swap: dict[str, Proxy] = {}
    bsyms: list[BoundSymbol] = []
    for bsym in trace.bound_symbols:
        bsym = renamed(bsym, swap, outputs=False) if swap else bsym
        if bsym.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE and isinstance(bsym.output, TensorProxy):
            source = bsym.args[0]
            first = cast_from.get(source.name)
            if (
                isinstance(first, TensorProxy)
                and _restores(first, source, bsym.output)
                and bsym.output.name not in handed_out
                and not (is_overwritten(first.name) or is_overwritten(bsym.output.name))
            ):
                swap[bsym.output.name] = first
                continue
            cast_from[bsym.output.name] = source
        bsyms.append(bsym)
    if not swap:
        return trace
    return rebuilt(trace, bsyms)


def _overwritten(trace: TraceCtx) -> Callable[[str], bool]:
    """Whether some operation of the trace writes to the memory of a name."""
    writes = {name for bsym in trace.bound_symbols for name in effects_of(bsym).writes}
    if not writes:
        return lambda name: False
    aliases = Aliases(trace.bound_symbols)
    written = {aliases(name) for name in writes}
    return lambda name: aliases(name) in written


def _restores(first: TensorProxy, wide: TensorProxy, last: TensorProxy) -> bool:
    dtypes: list[dtype] = [to_strong_dtype(p.dtype) for p in (first, wide, last)]
    return dtypes[0] == dtypes[2] and dtypes[1] in _HOLDS.get(dtypes[0], ())
