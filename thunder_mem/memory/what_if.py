"""The peak after moving a stretch of steps, computed much faster than by a full pass.

A moved stretch changes the live bytes only at the steps it passes, and there only by the storages it touches itself.
The storages it allocates appear later (or earlier) by as many steps. An input whose last user it was lives longer (or
shorter) from the next-to-last user on. So a question costs one range maximum per storage that the stretch touches, at
any distance.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder_mem.memory.graph import Graph, GraphError
from thunder_mem.memory.running_set import liveness, profile

__all__ = ["WhatIf"]


class WhatIf:
    """An order for which moves of stretches can be priced and made.

    Building it takes one full pass. It is the one mutable structure here: `move` changes it.

    Raises:
        GraphError: `order` is not a legal order of all ops.

    Example:
        >>> from thunder_mem.memory.graph import Op, Storage, make_graph
        >>> storages = [Storage(0, 8), Storage(1, 8), Storage(2, 1), Storage(3, 1)]
        >>> ops = [Op(0, "iota", (), (), (0,)), Op(1, "iota", (), (), (1,)),
        ...        Op(2, "sum", (0,), (), (2,)), Op(3, "sum", (1,), (), (3,))]
        >>> what_if = WhatIf(make_graph(ops, storages, outputs=[2, 3]))
        >>> what_if.peak_bytes, what_if.peak_if_moved(2, 3, to=1)
        (17, 10)
    """

    def __init__(self, graph: Graph, order: Sequence[int] | None = None) -> None:
        self.graph = graph
        self._live = liveness(graph)
        self._order = list(range(len(graph)) if order is None else order)
        if order is not None:
            graph.check_order(self._order)
        self._position = [0] * len(self._order)
        for step, op in enumerate(self._order):
            self._position[op] = step
        self._mortal = [False] * len(graph.storages)
        for s, users in enumerate(self._live.users):
            self._mortal[s] = bool(users)
        # A segment tree over the steps: leaves from `_leaves`, each node the maximum of its two.
        self._leaves = len(self._order)
        steps = profile(self._live, self._order)
        self._tree = [0] * self._leaves + steps
        for node in range(self._leaves - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])

    @property
    def order(self) -> tuple[int, ...]:
        """The present order."""
        return tuple(self._order)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Live bytes per step, as in `Timeline`."""
        return tuple(self._tree[self._leaves :])

    @property
    def peak_bytes(self) -> int:
        """The present peak."""
        return max(self._live.start_bytes, self._maximum(0, self._leaves))

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last step that the stretch `start` to `stop` (excluded) may begin at."""
        self._check_stretch(start, stop)
        graph, position = self.graph, self._position
        stretch = self._order[start:stop]
        earliest = max(
            (position[p] + 1 for op in stretch for p in graph.predecessors[op] if position[p] < start), default=0
        )
        latest = min(
            (position[n] for op in stretch for n in graph.successors[op] if position[n] >= stop), default=self._leaves
        )
        return earliest, latest - (stop - start)

    def peak_if_moved(self, start: int, stop: int, to: int) -> int:
        """The peak if steps `start` to `stop` (excluded) were moved, so that they begin at step `to`.

        Raises:
            ValueError: there is no such stretch, or no room for it at `to`.
            GraphError: the move breaks an edge; the message names it.
        """
        first, last, passed, moved = self._price(start, stop, to)
        inside = [self._maximum(a, b) + change for a, b, change in passed]
        return max(self._live.start_bytes, self._maximum(0, first), self._maximum(last, self._leaves), *inside, *moved)

    def move(self, start: int, stop: int, to: int) -> None:
        """Make the move that `peak_if_moved` prices, in time linear in the steps it passes.

        Raises: as `peak_if_moved`.
        """
        first, last, passed, moved = self._price(start, stop, to)
        steps = [self._tree[self._leaves + step] + change for a, b, change in passed for step in range(a, b)]
        ops = [op for a, b, _ in passed for op in self._order[a:b]]
        stretch = self._order[start:stop]
        self._order[first:last] = stretch + ops if to < start else ops + stretch
        steps = moved + steps if to < start else steps + moved
        for step in range(first, last):
            self._position[self._order[step]] = step
            self._tree[self._leaves + step] = steps[step - first]
        low, high = self._leaves + first, self._leaves + last - 1
        while low > 1:
            low, high = low // 2, high // 2
            for node in range(max(low, 1), high + 1):
                self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])

    def _check_stretch(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= self._leaves:
            raise ValueError(f"steps {start} to {stop} are no stretch of an order of {self._leaves} steps")

    def _price(self, start: int, stop: int, to: int) -> tuple[int, int, list[tuple[int, int, int]], list[int]]:
        """The steps affected (first, last excluded); the passed steps in pieces (a, b, change of
        their live bytes); and the live bytes of the moved ones."""
        self._check_stretch(start, stop)
        if not 0 <= to <= self._leaves - (stop - start):
            raise ValueError(f"a stretch of {stop - start} steps cannot begin at step {to} of {self._leaves}")
        earliest, latest = self.reach(start, stop)
        if not earliest <= to <= latest:
            self._refuse(start, stop, to)
        live, graph = self._live, self.graph
        stretch = self._order[start:stop]
        later = to >= start
        low, high = (stop, to + stop - start) if later else (to, start)

        # The other users of the storages that the stretch touches, and their last use.
        members = set(stretch)
        last_inside: dict[int, int] = {}
        made: set[int] = set()
        for op in stretch:
            for s in live.mortal[op]:
                last_inside[s] = op
            made.update(graph.ops[op].allocates)
        elsewhere = {
            s: max((self._position[u] for u in live.users[s] if u not in members), default=-1) for s in last_inside
        }
        # A passed step loses (gains) the storages that the stretch leaves alive. From their last other user on, it
        # keeps (is rid of) the storages that the stretch would free.
        sign = -1 if later else 1
        change = sign * sum(live.nbytes[s] for s in made if not self._mortal[s] or elsewhere.get(s, -1) >= 0)
        turns = sorted((elsewhere[s] + 1, -sign * live.nbytes[s]) for s in last_inside if s not in made)
        passed = []
        at = low
        for turn, delta in turns:
            if at < turn <= high:
                passed.append((at, turn, change))
                at = turn
            if turn <= high:
                change += delta
        if at < high:
            passed.append((at, high, change))

        now = self._before_bytes(high) + change if later else self._before_bytes(low)
        gone = high if later else low
        moved = []
        for op in stretch:
            now += live.allocated_bytes[op]
            moved.append(now + live.scratch_bytes[op])
            now -= sum(live.nbytes[s] for s in live.mortal[op] if last_inside[s] == op and elsewhere[s] < gone)
        return min(start, low), max(stop, high), passed, moved

    def _before_bytes(self, step: int) -> int:
        if step == self._leaves:
            return self._live.end_bytes
        op = self._order[step]
        return self._tree[self._leaves + step] - self._live.allocated_bytes[op] - self._live.scratch_bytes[op]

    def _refuse(self, start: int, stop: int, to: int) -> None:
        """Raise for the first edge, in the order of the stretch, that the move breaks."""
        graph, position = self.graph, self._position
        for op in self._order[start:stop]:
            for p in graph.predecessors[op]:
                if to <= position[p] < start:
                    raise GraphError(f"the move breaks the edge {self._label(p)} -> {self._label(op)}")
            for n in graph.successors[op]:
                if stop <= position[n] < to + stop - start:
                    raise GraphError(f"the move breaks the edge {self._label(op)} -> {self._label(n)}")

    def _label(self, op: int) -> str:
        return f"{self.graph.ops[op].name or 'op'}#{op}"

    def _maximum(self, start: int, stop: int) -> int:
        """The most live bytes at steps `start` to `stop` (excluded); 0 if there are none."""
        tree, low, high = self._tree, start + self._leaves, stop + self._leaves
        best = 0
        while low < high:
            if low & 1:
                best = max(best, tree[low])
                low += 1
            if high & 1:
                high -= 1
                best = max(best, tree[high])
            low, high = low // 2, high // 2
        return best
