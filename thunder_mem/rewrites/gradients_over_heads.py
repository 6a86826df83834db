"""Write gradients of attention in groups over the query, key and value that the backward has repeated.

A group's gradients replace the group's own operands, which no other group reads. Values that autograd keeps from the
forward stay, because a second backward reads them again.
"""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from thunder_mem.runtime.head_groups import is_backward_in_groups, writing_over
from thunder_mem.trace.aliases import Aliases
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["write_over_heads"]


def write_over_heads(source: TraceGraph, trace: TraceCtx) -> TraceCtx:
    """The joint trace with such gradients over operands that in every order nobody reads later.

    Args:
        source: the reading of `trace`.
        trace: a joint trace whose backward recomputes what it should.

    Returns:
        the new trace; the same object if there are none.
    """
    found = [op.index for op in source.graph.ops if op.backward and is_backward_in_groups(source.bsyms[op.index])]
    if not found:
        return trace
    shared = _shared(source)
    over = {id(source.bsyms[op]): _dead(source, op, shared) for op in found}
    if not any(over.values()):
        return trace
    bsyms = [writing_over(b, over[id(b)]) if over.get(id(b)) else b for b in trace.bound_symbols]
    return rebuilt(trace, bsyms, "Gradients of attention over its operands")


def _shared(source: TraceGraph) -> frozenset[int]:
    """Storages that are one for some strides of the arguments, as those of a tensor and its reshape."""
    aliases = Aliases(source.bsyms)
    of_class: dict[str, set[int]] = {}
    for name, s in source.storage_of.items():
        of_class.setdefault(aliases(name), set()).add(s)
    return frozenset(s for storages in of_class.values() if len(storages) > 1 for s in storages)


def _dead(source: TraceGraph, index: int, shared: frozenset[int]) -> tuple[int, ...]:
    """Which of query, key and value may be overwritten: repeated in the backward, dense, and read here last.

    A storage that may be `shared` with another may be the user's own for other strides of the arguments. All other
    readers make something that this operation reads, so they run before it.
    """
    graph, bsym = source.graph, source.bsyms[index]
    memory = [source.storage_of[p.name] for p in bsym.flat_proxy_args]
    reads = set(graph.ops[index].reads)
    found = []
    for i, proxy in enumerate(bsym.args[1:4]):
        s = source.storage_of[proxy.name]
        maker = graph.allocator[s]
        if maker is None or not graph.ops[maker].backward or s in graph.outputs | shared or memory.count(s) > 1:
            continue
        others = [graph.ops[user] for user in graph.users[s] if user not in (maker, index)]
        others = [op for op in others if op.allocates or op.writes]  # a view's own readers are among them
        if source.layout.is_dense(proxy.name) and not any(reads.isdisjoint(op.allocates) for op in others):
            found.append(i)
    return tuple(found)
