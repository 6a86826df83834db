"""The operations that may read a storage, also once fused regions repeat cheap operations.

A region may repeat an operation whose result it reads. Then it reads what that operation reads, perhaps later.
"""

from __future__ import annotations

from thunder_mem.trace.reading import TraceGraph

__all__ = ["readers_in_regions"]


def readers_in_regions(source: TraceGraph, storage: int) -> frozenset[int]:
    """The operations of the backward that read a storage, or would in a region; its allocator is not among them.

    No executor repeats an operation that another one has claimed. A view is no reader, but its own readers are.
    """
    graph = source.graph
    seen, waiting = set[int](), [user for user in graph.users[storage] if user != graph.allocator[storage]]
    while waiting:
        op = graph.ops[waiting.pop()]
        if op.index not in seen and (op.allocates or op.writes):
            seen.add(op.index)
            if source.bsyms[op.index].sym.executor is None:
                waiting += [user for made in op.allocates for user in graph.users[made]]
    return frozenset(op for op in seen if graph.ops[op].backward)
