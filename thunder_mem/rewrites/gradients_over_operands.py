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

from thunder_mem.chunk_loop.symbols import overwritten, rows_with_gradients, writing_over_rows
from thunder_mem.memory.graph import Graph
from thunder_mem.runtime.head_groups import is_backward_in_groups, writes_over_operands, writing_over
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.region_readers import readers_in_regions

__all__ = ["is_written_over_operands", "write_over_operands"]


def write_over_operands(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace with such gradients over operands that in every order nobody reads later.

    Args:
        source: the reading of `trace`.
        trace: a joint trace whose backward recomputes what it should.

    Returns:
        the new trace; the same object if there are none.
    """
    operands = {op.index: _operands(source.bsyms[op.index]) for op in source.graph.ops if op.backward}
    found = {op: of_op for op, of_op in operands.items() if of_op}
    if not found:
        return trace
    shared = _shared(source)
    dead = {op: _dead(source, op, of_op, shared) for op, of_op in found.items()}
    new = {id(source.bsyms[op]): _writing_over(source.bsyms[op], over) for op, over in dead.items() if over}
    if not new:
        return trace
    bsyms = [new.get(id(b), b) for b in trace.bound_symbols]
    return rebuilt(trace, bsyms, "Gradients over operands")


def is_written_over_operands(bsym: BoundSymbol) -> bool:
    """Whether `write_over_operands` made it."""
    return writes_over_operands(bsym) or (bsym.sym.name == "chunk_loop_backward_over" and bool(overwritten(bsym)))


def _operands(bsym: BoundSymbol) -> Mapping[int, TensorProxy]:
    """The operands, by number, over which the operation could write their gradients."""
    return dict(enumerate(bsym.args[1:4])) if is_backward_in_groups(bsym) else rows_with_gradients(bsym)


def _writing_over(bsym: BoundSymbol, over: tuple[int, ...]) -> BoundSymbol:
    return (writing_over if is_backward_in_groups(bsym) else writing_over_rows)(bsym, over)


def _shared(source: TraceGraph) -> frozenset[int]:
    """Storages that are one for some strides of the arguments, as those of a tensor and its reshape."""
    aliases = Aliases(source.bsyms)
    of_class: dict[str, set[int]] = {}
    for name, s in source.storage_of.items():
        of_class.setdefault(aliases(name), set()).add(s)
    return frozenset(s for storages in of_class.values() if len(storages) > 1 for s in storages)


def _dead(
    source: TraceGraph, index: int, operands: Mapping[int, TensorProxy], shared: frozenset[int]
) -> tuple[int, ...]:
    """Which operands may be overwritten: made by the program, dense, and read here last.

    A storage that may be `shared` with another may be the user's own for other strides of the arguments.
    """
    graph, bsym = source.graph, source.bsyms[index]
    memory = [source.storage_of[p.name] for p in bsym.flat_proxy_args]
    before = _ancestors(graph, index)
    asks = not is_backward_in_groups(bsym)  # when it runs, whether autograd keeps the operand
    found = []
    for i, proxy in operands.items():
        s = source.storage_of[proxy.name]
        maker = graph.allocator[s]
        if (
            maker is None
            or not (asks or graph.ops[maker].backward)
            or s in graph.outputs | shared
            or memory.count(s) > 1
        ):
            continue
        plain = source.layout.is_plain(proxy.name) if asks else source.layout.is_dense(proxy.name)
        if plain and readers_in_regions(source, s) - {index} <= before:
            found.append(i)
    return tuple(found)


def _ancestors(graph: Graph, index: int) -> set[int]:
    """The operations that run before operation `index` in every order."""
    found, waiting = set[int](), [index]
    while waiting:
        new = set(graph.predecessors[waiting.pop()]) - found
        found |= new
        waiting += new
    return found
