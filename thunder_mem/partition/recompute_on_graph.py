"""Recompute chosen forward storages in a graph's backward, as `rewrites/recompute.py` does in a trace.

A trial on the graph costs far less than rewriting and reading the trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph, Op, Storage, make_graph

__all__ = ["WithRecompute", "recompute_on_graph"]


@dataclass(frozen=True)
class WithRecompute:
    """A graph with recomputation.

    Attributes:
        graph: like the original, with the repeated ops just before their first use in the backward.
        fuse: the same facts about its ops.
        source: per op, the op of the original graph that it is or repeats.
        moves: the ops that copy a storage to the host or back, each with that storage of the original graph.
    """

    graph: Graph
    fuse: FusionCapabilities
    source: tuple[int, ...]
    moves: Mapping[int, int] = field(default_factory=dict)


def recompute_on_graph(graph: Graph, fuse: FusionCapabilities, storages: Collection[int]) -> WithRecompute:
    """Let the backward recompute `storages`, each once, with the views of them that it uses.

    Args:
        graph: forward and backward of one trace.
        fuse: facts about its ops; its operands show which views are used.
        storages: forward storages, each made by an op that may be repeated.
    """
    return _Repetition(graph, fuse, frozenset(storages)).run()


class _Repetition:
    def __init__(self, graph: Graph, fuse: FusionCapabilities, storages: frozenset[int]) -> None:
        self.graph, self.fuse, self.rebuilt = graph, fuse, storages
        self.ops: list[Op] = []
        self.source: list[int] = []  # per new op, the op that it is or repeats
        self.operands: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.storages: list[Storage] = list(graph.storages)
        self.place: dict[int, int] = {}  # op -> its new index
        self.again: dict[int, int] = {}  # op -> the index of its repetition
        self.fresh: dict[int, int] = {}  # storage -> the recomputed storage

    def run(self) -> WithRecompute:
        for op in self.graph.ops:
            if op.backward:
                self._repeat([p for p in self.fuse.operands[op.index] if self._takes_again(op, p)])
            self._append(op, op.backward)
        fuse = self.fuse.repeated(self.source, self.operands)
        graph = make_graph(self.ops, self.storages, self.edges, self.graph.outputs)
        return WithRecompute(graph, fuse, tuple(self.source))

    def _takes_again(self, op: Op, operand: int) -> bool:
        """Whether backward `op` reads the recomputed `operand`."""
        maker = self.graph.ops[operand]
        if maker.backward:
            return False
        given = set(maker.allocates or maker.reads).intersection(op.reads)
        return not self.rebuilt.isdisjoint(given)

    def _repeat(self, wanted: list[int]) -> None:
        """Repeat the wanted ops that are not yet repeated, with the ops that they need, in source order."""
        missing: set[int] = set()
        stack = [op for op in wanted if op not in self.again]
        while stack:
            op = stack.pop()
            if op not in missing:
                missing.add(op)
                operands = self.fuse.operands[op]
                stack += [p for p in operands if p not in self.again and self._takes_again(self.graph.ops[op], p)]
        for op in sorted(missing):
            self.again[op] = len(self.ops)
            self._append(self.graph.ops[op], True, again=True)

    def _append(self, old: Op, in_backward: bool, again: bool = False) -> None:
        index = len(self.ops)
        reads, allocates, operands = old.reads, old.allocates, set()
        for p in self.fuse.operands[old.index]:
            repeated = in_backward and p in self.again and self._takes_again(old, p)
            operands.add(self.again[p] if repeated else self.place[p])
        if in_backward:
            reads = tuple([self.fresh.get(s, s) for s in old.reads])
        if again:
            allocates = tuple(range(len(self.storages), len(self.storages) + len(old.allocates)))
            self.storages += [self.graph.storages[s].at(new) for s, new in zip(old.allocates, allocates, strict=True)]
            self.fresh |= {s: new for s, new in zip(old.allocates, allocates, strict=True) if s in self.rebuilt}
        self.ops.append(Op(index, old.name, reads, old.writes, allocates, old.scratch_bytes, in_backward, old.payload))
        self.source.append(old.index)
        self.operands.append(tuple(sorted(operands)))
        # A repeated op is pure, so it has no effects that impose an order.
        before = operands if again else {*operands, *(self.place[p] for p in self.graph.predecessors[old.index])}
        self.edges += [(p, index) for p in before]
        if not again:
            self.place[old.index] = index
