"""Open composites of which only some results are read, where no executor takes them whole.

Thunder opens such a composite only after planning. The operation that makes its dead result is then left in the trace.
Thunder's split moves this operation into the backward, and the forward saves its inputs for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import get_always_executors

from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["without_dead_halves"]


def without_dead_halves(trace: TraceCtx) -> TraceCtx:
    """The trace with such composites replaced by the operations in them that are read; the same object without any."""
    read = {p.name for bsym in trace.bound_symbols for p in bsym.flat_proxy_args}
    parts = [part for bsym in trace.bound_symbols for part in _parts(bsym, read)]
    if parts == trace.bound_symbols:
        return trace
    return dce(rebuilt(trace, parts))


def _parts(bsym: BoundSymbol, read: set[str]) -> Sequence[BoundSymbol]:
    names = {p.name for p in bsym.flat_proxy_outs}
    if names <= read or names.isdisjoint(read) or not bsym.subsymbols or bsym.sym.executor is not None:
        return (bsym,)
    if any(executor.can_execute(bsym) for executor in get_always_executors()):
        return (bsym,)
    return bsym.subsymbols
