"""A graph whose backward computes chosen forward storages again: what `recompute.py` does to a trace.

Trying a choice on the graph costs far less than rewriting and reading the trace.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from thunder_mem.graph import Graph, Op, Storage, make_graph
from thunder_mem.regions import Fusibility

__all__ = ["Repeated", "repeat_in_backward"]


@dataclass(frozen=True)
class Repeated:
    """A graph with repetitions.

    Attributes:
        graph: like the original, with the repeated ops just before their first use in the backward.
        fuse: the same facts about its ops.
        source: per op, the op of the original graph that it is or repeats.
    """

    graph: Graph
    fuse: Fusibility
    source: tuple[int, ...]


def repeat_in_backward(graph: Graph, fuse: Fusibility, storages: Collection[int]) -> Repeated:
    """Let the backward compute `storages` itself, each once, with the views that it uses of them.

    Args:
        graph: forward and backward of one trace.
        fuse: facts about its ops; its operands tell which views are used.
        storages: forward storages, each made by an op that may be repeated.
    """
    return _Repetition(graph, fuse, frozenset(storages)).run()


class _Repetition:
    def __init__(self, graph: Graph, fuse: Fusibility, storages: frozenset[int]) -> None:
        self.graph, self.fuse, self.rebuilt = graph, fuse, storages
        self.ops: list[Op] = []
        self.source: list[int] = []  # per new op, the op that it is or repeats
        self.operands: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.storages: list[Storage] = list(graph.storages)
        self.place: dict[int, int] = {}  # op -> its new index
        self.again: dict[int, int] = {}  # op -> the index of its repetition
        self.fresh: dict[int, int] = {}  # storage -> the one that is computed again

    def run(self) -> Repeated:
        for op in self.graph.ops:
            if op.backward:
                for operand in self.fuse.operands[op.index]:
                    if self._is_rebuilt(operand) and operand not in self.again:
                        self._repeat(operand)
            self._append(op, op.backward)
        fuse = replace(
            self.fuse,
            takes=tuple(self.fuse.takes[o] for o in self.source),
            required=tuple(self.fuse.required[o] for o in self.source),
            cheap=tuple(self.fuse.cheap[o] for o in self.source),
            operands=tuple(self.operands),
        )
        graph = make_graph(self.ops, self.storages, self.edges, self.graph.outputs)
        return Repeated(graph, fuse, tuple(self.source))

    def _is_rebuilt(self, op: int) -> bool:
        o = self.graph.ops[op]
        return not o.backward and not self.rebuilt.isdisjoint(o.allocates or o.reads)

    def _repeat(self, root: int) -> None:
        """Append `root` and what it needs once more, operands first."""
        stack = [root]
        while stack:
            op = stack[-1]
            missing = [p for p in self.fuse.operands[op] if self._is_rebuilt(p) and p not in self.again]
            if missing:
                stack += missing
                continue
            stack.pop()
            if op in self.again:
                continue
            self.again[op] = len(self.ops)
            for s in self.graph.ops[op].allocates:
                self.fresh[s] = len(self.storages)
                self.storages.append(self.graph.storages[s].at(len(self.storages)))
            self._append(self.graph.ops[op], True, again=True)

    def _append(self, old: Op, in_backward: bool, again: bool = False) -> None:
        index = len(self.ops)

        def renamed(storages: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([self.fresh.get(s, s) for s in storages]) if in_backward else storages

        operands = [
            self.again[p] if in_backward and p in self.again else self.place[p] for p in self.fuse.operands[old.index]
        ]
        self.ops.append(
            Op(
                index,
                old.name,
                renamed(old.reads),
                old.writes,
                renamed(old.allocates) if again else old.allocates,
                old.scratch_bytes,
                in_backward,
                old.payload,
            )
        )
        self.source.append(old.index)
        self.operands.append(tuple(operands))
        # What is repeated is pure, so its effects order nothing.
        before = operands if again else [*operands, *(self.place[p] for p in self.graph.predecessors[old.index])]
        self.edges += [(p, index) for p in before]
        if not again:
            self.place[old.index] = index
