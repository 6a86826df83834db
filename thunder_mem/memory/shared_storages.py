"""Graphs in another order, and graphs whose ops write results over storages that die, instead of allocating them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from thunder_mem.memory.graph import Graph, make_graph

__all__ = ["in_order", "with_shared_storages"]


def with_shared_storages(graph: Graph, memory_of: Mapping[int, int]) -> Graph:
    """The graph in which the op that allocated a key of `memory_of` overwrites the storage given there.

    In the graph's source order nobody reads that storage later.
    """

    def final(storage: int) -> int:
        while storage in memory_of:
            storage = memory_of[storage]
        return storage

    place = {s.index: i for i, s in enumerate(s for s in graph.storages if s.index not in memory_of)}
    ops = []
    for op in graph.ops:
        over = tuple(place[final(s)] for s in op.allocates if s in memory_of)
        ops.append(
            replace(
                op,
                reads=tuple(dict.fromkeys(place[final(s)] for s in op.reads)),
                writes=tuple(dict.fromkeys([*(place[final(s)] for s in op.writes), *over])),
                allocates=tuple(place[s] for s in op.allocates if s not in memory_of),
            )
        )
    return make_graph(
        ops,
        [s.at(place[s.index]) for s in graph.storages if s.index in place],
        [(before, op) for op, earlier in enumerate(graph.predecessors) for before in earlier],
        {place[final(s)] for s in graph.outputs},
    )


def in_order(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with a legal order as its source order; storages keep their indices."""
    place = {op: i for i, op in enumerate(order)}
    edges = [(place[before], place[op]) for op, earlier in enumerate(graph.predecessors) for before in earlier]
    ops = [replace(graph.ops[op], index=i) for i, op in enumerate(order)]
    return make_graph(ops, graph.storages, edges, graph.outputs)
