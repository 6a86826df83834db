"""Copy old contents that the backward still needs before the forward overwrites them.

`functionalization/functionalize.py` turns most writes into new values before autograd. Writes to the caller's tensors
remain, and writes seen through another view. Before such a write the joint trace copies the old content that the
backward still needs, as eager does.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import with_body

__all__ = ["protect_old_values"]


def protect_old_values(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace whose backward reads copies of values that the forward overwrites earlier.

    A name stands for the content of its memory when the forward first read it. So a view that Thunder took before
    a write through another view, and reads after it, shows the new content. If that memory is written later, the
    backward gets a copy made just before the first such write.

    Args:
        source: the reading of `trace`.
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

    def body() -> Iterator[BoundSymbol]:
        due: dict[int, list[TensorProxy]] = {}
        for before, p in copies.values():
            due.setdefault(before, []).append(p)
        swap: dict = {}
        for index, bsym in enumerate(source.bsyms):
            if index in due:
                copied, bsym = _write_after_copies(bsym, due[index], swap)
                yield from copied
            yield bsym.from_bsym_swap_proxies(swap, skip_output=True) if index in readers else bsym

    return with_body(trace, source, body, "Copy what the backward needs before it is overwritten")


def _write_after_copies(
    write: BoundSymbol, olds: list[TensorProxy], swap: dict
) -> tuple[list[BoundSymbol], BoundSymbol]:
    """Copies of `olds`, and the write that follows them; `swap` records the copy of each old value.

    Only the backward reads the copies, but Thunder puts only ops into the forward that the forward needs. So the
    write takes its input together with the copies from one `update_aliases`, for which it must wait.
    """
    copies = [prims.clone.bind(p, output=prims.clone.meta(p)) for p in olds]
    given = write.args[0] if is_copy(write) else next(p for p in write.flat_proxy_args if isinstance(p, TensorProxy))
    together = (given, *(copy.output for copy in copies))
    news = prims.update_aliases.meta(together)
    swap.update({variableify(p): new for p, new in zip(olds, news[1:], strict=True)})
    waits = prims.update_aliases.bind(together, output=news)
    return [*copies, waits], write.from_bsym_swap_proxies({variableify(given): news[0]}, skip_output=True)
