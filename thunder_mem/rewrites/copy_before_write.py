"""Old contents that the backward still needs, copied before the forward overwrites them.

`frontend/functionalization.py` turns what it can into values of their own before autograd. What remains are writes to
the caller's tensors, and those seen through another view; before such a write the joint trace copies what the
backward still needs of the old content (eager does the same).
"""

from __future__ import annotations

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_mem.trace.aliases import Aliases
from thunder_mem.trace.effects import is_copy
from thunder_mem.trace.reading import TraceGraph

__all__ = ["protect_old_values"]


def protect_old_values(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace in which the backward reads copies of what the forward overwrites before that.

    A name stands for what its memory held when the forward first read it: a view that Thunder took before a
    write through another, and reads after it, is of the new content. Where something is written to that
    memory since, the backward gets a copy that is made just before the first such write.

    Args:
        source: `trace` as it was read.
        trace: a joint trace before fusion.
    """
    if not any(effects.writes for effects in source.effects):
        return trace
    memory = Aliases(source.bsyms)
    writers: dict[str, list[int]] = {}
    for writer, effects in enumerate(source.effects):
        for name in effects.writes:
            writers.setdefault(memory(name), []).append(writer)

    first_read: dict[str, int] = {}
    for op, bsym, effects in zip(source.graph.ops, source.bsyms, source.effects, strict=True):
        if not op.backward and (op.allocates or effects.writes):  # not a view, which reads nothing
            for p in bsym.flat_proxy_args:
                if p.name not in effects.writes:
                    first_read.setdefault(p.name, op.index)

    def first_write(p: Proxy, reader: int) -> int | None:
        since = first_read.get(p.name, source.producer_of.get(p.name, -1))
        return next((w for w in writers.get(memory(p.name), ()) if since < w < reader), None)

    copies: dict[str, tuple[int, TensorProxy]] = {}  # of a name: before which op
    readers: set[int] = set()
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        # A `get_grad` names a result of the forward, and reads nothing.
        for p in bsym.flat_proxy_args if op.backward and bsym.sym.id is not PrimIDs.GET_GRAD else ():
            if isinstance(p, TensorProxy) and (write := first_write(p, op.index)) is not None:
                copies[p.name] = (write, p)
                readers.add(op.index)
    if not copies:
        return trace

    new = from_trace(trace)
    with tracectx(new):
        due: dict[int, list[TensorProxy]] = {}
        for before, p in copies.values():
            due.setdefault(before, []).append(p)
        swap: dict = {}
        body: list[BoundSymbol] = []
        for index, bsym in enumerate(source.bsyms):
            if index in due:
                copied, bsym = _write_after_copies(bsym, due[index], swap)
                body += copied
            body.append(bsym.from_bsym_swap_proxies(swap, skip_output=True) if index in readers else bsym)
        new.bound_symbols = [*source.prefix, *body, source.result]
    new.set_provenance(TraceProvenance("Copy what the backward needs before it is overwritten"))
    return new


def _write_after_copies(
    write: BoundSymbol, olds: list[TensorProxy], swap: dict
) -> tuple[list[BoundSymbol], BoundSymbol]:
    """Copies of `olds`, and the write that needs them; `swap` learns which copy stands for which old value.

    Only the backward reads the copies, and Thunder puts into the forward only what the forward needs: so
    the write takes its input together with the copies from one `update_aliases`, which it must wait for.
    """
    copies = [prims.clone.bind(p, output=prims.clone.meta(p)) for p in olds]
    given = write.args[0] if is_copy(write) else next(p for p in write.flat_proxy_args if isinstance(p, TensorProxy))
    together = (given, *(copy.output for copy in copies))
    news = prims.update_aliases.meta(together)
    swap.update({variableify(p): new for p, new in zip(olds, news[1:], strict=True)})
    waits = prims.update_aliases.bind(together, output=news)
    return [*copies, waits], write.from_bsym_swap_proxies({variableify(given): news[0]}, skip_output=True)
