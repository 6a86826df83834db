"""Write gradients over the operands of the operations that compute them, part by part.

Attention in groups writes a group's gradients over the group's own query, key and value, and a stretch in tiles writes
a tile's gradient over the tile's own rows. No other part reads them. Autograd keeps values from the forward for a
second backward: attention's stay, and a stretch asks when it runs whether anybody still holds its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.attention.head_groups import is_backward_in_groups, writes_over_operands, writing_over
from thunder_mem.chunk_loop.symbols import overwritten, rows_with_gradients, writing_over_rows
from thunder_mem.partition.overwriting_on_graph import Overwritable
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.region_readers import readers_in_regions

__all__ = ["is_written_over_operands", "overwritable_operands", "write_over_operands"]


def write_over_operands(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace with such gradients over operands that in every order nobody reads later.

    Args:
        source: the reading of `trace`.
        trace: a joint trace whose backward recomputes what it should.

    Returns:
        the new trace; the same object if there are none.
    """
    dead = {op: _dead(source, op, operands) for op, operands in _overwritable(source).items()}
    new = {id(source.bsyms[op]): _writing_over(source.bsyms[op], over) for op, over in dead.items() if over}
    if not new:
        return trace
    bsyms = [new.get(id(b), b) for b in trace.bound_symbols]
    return rebuilt(trace, bsyms, "Gradients over operands")


def overwritable_operands(source: TraceGraph) -> dict[int, Overwritable]:
    """Per operation of the backward, the operands over which it may write their gradients, if they die there."""
    found = {}
    for op, operands in _overwritable(source).items():
        bsym = source.bsyms[op]
        over = traits_of(new := _writing_over(bsym, tuple(operands))).shares(new)
        gradients = {source.storage_of[p.name]: source.storage_of[name] for name, p in over.items()}
        found[op] = Overwritable(gradients, _asks(bsym))
    return found


def is_written_over_operands(bsym: BoundSymbol) -> bool:
    """Whether `write_over_operands` made it."""
    return writes_over_operands(bsym) or (bsym.sym.name == "chunk_loop_backward_over" and bool(overwritten(bsym)))


def _operands(bsym: BoundSymbol) -> Mapping[int, TensorProxy]:
    """The operands, by number, over which the operation could write their gradients."""
    return dict(enumerate(bsym.args[1:4])) if is_backward_in_groups(bsym) else rows_with_gradients(bsym)


def _writing_over(bsym: BoundSymbol, over: tuple[int, ...]) -> BoundSymbol:
    return (writing_over if is_backward_in_groups(bsym) else writing_over_rows)(bsym, over)


def _asks(bsym: BoundSymbol) -> bool:
    """Whether it asks, when it runs, whether autograd keeps an operand; else operands from the forward stay."""
    return not is_backward_in_groups(bsym)


def _overwritable(source: TraceGraph) -> dict[int, dict[int, TensorProxy]]:
    """Per operation of the backward, the operands that are made by the program, dense, and given only once.

    A storage that may be another one's, too, may be the user's own for other strides of the arguments.
    """
    operands = {op.index: _operands(source.bsyms[op.index]) for op in source.graph.ops if op.backward}
    if not any(operands.values()):
        return {}
    graph, layout, shared = source.graph, source.layout, _shared(source)

    def may(bsym: BoundSymbol, proxy: TensorProxy) -> bool:
        s = source.storage_of[proxy.name]
        if graph.allocator[s] is None or s in graph.outputs | shared:
            return False
        plain = layout.is_plain(proxy.name) if _asks(bsym) else layout.is_dense(proxy.name)
        return plain and [source.storage_of[p.name] for p in bsym.flat_proxy_args].count(s) == 1

    found = {op: {i: p for i, p in of_op.items() if may(source.bsyms[op], p)} for op, of_op in operands.items()}
    return {op: of_op for op, of_op in found.items() if of_op}


def _shared(source: TraceGraph) -> frozenset[int]:
    """Storages that are one for some strides of the arguments, as those of a tensor and its reshape."""
    aliases = Aliases(source.bsyms)
    of_class: dict[str, set[int]] = {}
    for name, s in source.storage_of.items():
        of_class.setdefault(aliases(name), set()).add(s)
    return frozenset(s for storages in of_class.values() if len(storages) > 1 for s in storages)


def _dead(source: TraceGraph, index: int, operands: Mapping[int, TensorProxy]) -> tuple[int, ...]:
    """The operands that are read here last in every order."""
    graph = source.graph
    before = graph.ancestors(index)
    from_forward = _asks(source.bsyms[index])

    def is_dead(s: int) -> bool:
        maker = graph.allocator[s]
        made = maker is not None and (from_forward or graph.ops[maker].backward)
        return made and readers_in_regions(source, s) - {index} <= before

    return tuple(i for i, proxy in operands.items() if is_dead(source.storage_of[proxy.name]))
