"""A graph whose backward fetches chosen forward storages from the host: what `rewrites/offload.py` does to a trace.

Trying a choice on the graph costs far less than rewriting and reading the trace.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from thunder_mem.memory.graph import Graph, Op, Storage, make_graph
from thunder_mem.partition.recompute_on_graph import WithRecompute

__all__ = ["move_in_backward"]


def move_in_backward(repeated: WithRecompute, storages: Collection[int]) -> WithRecompute:
    """The graph whose backward fetches `storages`, each just before its first use.

    Args:
        repeated: the graph, with all recomputation.
        storages: of the original graph, whose forward keeps their numbers.
    """
    return _GraphMoves(repeated, frozenset(storages)).run()


class _GraphMoves:
    def __init__(self, repeated: WithRecompute, storages: frozenset[int]) -> None:
        self.repeated, self.moved = repeated, storages
        self.old: Graph = repeated.graph
        self.ops: list[Op] = []
        self.origin: list[int | None] = []  # per new op, the old op; None for a copy to the host or back
        self.source: list[int] = []
        self.operands: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.storages: list[Storage] = list(self.old.storages)
        self.place: dict[int, int] = {}  # old op -> its new index
        self.again: dict[int, int] = {}  # old op of the forward -> the op that gives its results to the backward
        self.fresh: dict[int, int] = {}  # storage -> the storage that receives the fetched copy
        self.moves: dict[int, int] = {}  # copy -> the storage that it moves
        self.left: dict[int, int] = {}  # storage -> the copy to the host

    def run(self) -> WithRecompute:
        last: dict[int, list[int]] = {}
        for s in sorted(self.moved):
            last.setdefault(max(op for op in self.old.users[s] if not self.old.ops[op].backward), []).append(s)
        for op in self.old.ops:
            if op.backward:
                self._fetch(op)
            self._append(op, op.backward)
            for s in last.get(op.index, ()):
                maker = self.place[self.old.allocator[s]]  # type: ignore[index]
                self.left[s] = self._append_copy("offload", s, maker, reads=(s,), operands=(maker,))
        fuse = self.repeated.fuse.repeated(self.origin, self.operands)
        graph = make_graph(self.ops, self.storages, self.edges, self.old.outputs)
        return WithRecompute(graph, fuse, tuple(self.source), self.moves)

    def _takes_fetched(self, op: Op, operand: int) -> bool:
        """Whether backward `op` reads the result of `operand` from the host."""
        maker = self.old.ops[operand]
        return not maker.backward and not self.moved.isdisjoint({*(maker.allocates or maker.reads)} & {*op.reads})

    def _fetch(self, op: Op) -> None:
        for operand in self.repeated.fuse.operands[op.index]:
            if operand in self.again or not self._takes_fetched(op, operand):
                continue
            maker = self.old.ops[operand]
            if not maker.allocates:  # a view
                self._fetch(maker)
                self.again[operand] = self._append(maker, True)
                continue
            for s in maker.allocates:
                if s in self.moved:
                    self.fresh[s] = len(self.storages)
                    self.storages.append(self.old.storages[s].at(self.fresh[s]))
                    self.again[operand] = self._append_copy(
                        "prefetch", s, self.place[operand], allocates=(self.fresh[s],), operands=(self.left[s],)
                    )

    def _append(self, op: Op, in_backward: bool) -> int:
        index = len(self.ops)
        fetched = {p: self.again[p] for p in self.repeated.fuse.operands[op.index] if p in self.again and in_backward}
        fetched = {p: new for p, new in fetched.items() if self._takes_fetched(op, p)}
        operands = {fetched.get(p, self.place[p]) for p in self.repeated.fuse.operands[op.index]}
        reads = tuple([self.fresh.get(s, s) for s in op.reads]) if in_backward else op.reads
        self.ops.append(replace(op, index=index, reads=reads, backward=in_backward))
        self._record(op.index, self.repeated.source[op.index], operands)
        if in_backward == op.backward:  # a repeated view imposes no order
            self.edges += [(self.place[p], index) for p in self.old.predecessors[op.index]]
            self.place[op.index] = index
        return index

    def _append_copy(
        self,
        name: str,
        s: int,
        maker: int,
        operands: tuple[int, ...],
        reads: tuple[int, ...] = (),
        allocates: tuple[int, ...] = (),
    ) -> int:
        index = len(self.ops)
        self.ops.append(Op(index, name, reads, (), allocates, 0, name == "prefetch"))
        self._record(None, self.source[maker], operands)
        self.moves[index] = s
        return index

    def _record(self, origin: int | None, source: int, operands: Collection[int]) -> None:
        self.edges += [(p, len(self.origin)) for p in operands]
        self.origin.append(origin)
        self.source.append(source)
        self.operands.append(tuple(sorted(operands)))
