"""Series-parallel modules of a graph, each in its best order: a smaller problem with the same optimum.

A module is a set of ops that looks like one op from outside. Every other op runs before all of it, after all of it, or
has no constraint with any of it. If the bytes that it adds and frees do not depend on ops outside either, it has an
order that is best whatever runs in between (`hill_valley.py`). Its segments can then stand for its ops.

The bytes that an op frees are fixed if every storage that dies has one last reader, which all other readers precede.
Examples are a value that is read once, a value that a residual connection reads again at its end, and storages of the
caller. If several ops may read a storage last, each frees it only in some orders. Such ops stay single, and so do
modules around them. All other ops are collapsed where they are series-parallel: two modules in a row, or two side by
side with the same neighbours, become one. In-trees, forests and series-parallel graphs with such storages end as one
module, whose order is optimal.

Proof that a module M may run in one order. Let f(X) be the live bytes after the subset X of M. f is submodular and
depends only on X. Let V minimise f. An order through the sets T can pass through T & V first and T | V later, while
the rest of the graph waits at its minimum in between; by submodularity neither is above f(T). So all of M passes V,
and the part after V is the part before V in reversed time. Before V let H be the lowest hill that leads to any set
below f(0), and W the least set it leads to. Every order climbs H at some step to get below f(0). Going to W at that
step and through T | W afterwards costs no more, because no subset of W is below f(W). So the segment from 0 to W can
run as one, and W takes the place of 0. If f of a series-parallel module is a sum over ops, sorting finds the segments.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thunder_mem.memory.graph import earliest_first
from thunder_mem.memory.running_set import Liveness
from thunder_mem.schedule.hill_valley import Part, Segments

__all__ = ["Collapsed", "collapse"]

# Beyond this many modules the sets of ancestors take too much memory. Redundant edges stay, and so do
# values with several readers, which is as safe and finds fewer modules.
_CLOSURE_MODULES = 20_000


@dataclass(frozen=True, eq=False)
class Collapsed:
    """A graph whose ops are segments of another's.

    Attributes:
        live: the smaller graph; each of its orders is an order of the original, with the same peak.
        members: for each of its ops, the original ops in order.
        solved: the whole graph is one module, so the order of the indices is optimal.
    """

    live: Liveness
    members: tuple[tuple[int, ...], ...]
    solved: bool

    def expand(self, order: Iterable[int]) -> list[int]:
        """An order of this graph as one of the other."""
        return [op for segment in order for op in self.members[segment]]

    def nearest(self, order: Sequence[int]) -> list[int]:
        """The order of this graph that follows one of the other most closely."""
        place = [0] * len(order)
        for step, op in enumerate(order):
            place[op] = step
        return earliest_first(self.live.predecessors, [max([place[op] for op in ops]) for ops in self.members])


def collapse(live: Liveness) -> Collapsed:
    """Collapse every series-parallel module found; the best order of the result is also optimal for `live`.

    Time O(E log n) if no value has several readers and no edge is redundant. Otherwise bit sets of the
    remaining modules take quadratic time and space, up to 20,000 modules.
    """
    modules = _Modules(live)
    modules.collapse(range(len(live)))
    left = modules.left()
    if 1 < len(left) <= _CLOSURE_MODULES and modules.resolve(left):
        modules.collapse(left)
    return modules.graph()


class _Modules:
    """A graph of modules, each named by one of its ops."""

    def __init__(self, live: Liveness) -> None:
        self._live = live
        self._before = [set(ops) for ops in live.predecessors]
        self._after = [set(ops) for ops in live.successors]
        self._segments = Segments(len(live))
        # For each storage that dies, the readers of which one is last.
        self._last: list[tuple[int, ...]] = []
        # Ops that free a storage in some orders only.
        self._fixed = [False] * len(live)
        self._frees = [0] * len(live)
        for users, maker, nbytes in zip(live.users, live.allocators, live.nbytes, strict=True):
            last = users if maker is None or len(users) == 1 else tuple([op for op in users if op != maker])
            self._last.append(last)
            if len(last) == 1:
                self._frees[last[0]] += nbytes
            else:
                for op in last:
                    self._fixed[op] = True
        self._alive = [True] * len(live)
        # Only for modules of several ops, because most modules have one.
        self._parts: dict[int, Part] = {}
        # The last op of each module, which sorts modules into a legal order.
        self._end = list(range(len(live)))
        # Modules with equal sums of these numbers have the same neighbours, almost certainly.
        draw = random.Random(0)
        self._mark = [draw.getrandbits(62) for _ in range(len(live))]
        self._before_sum = [sum([self._mark[p] for p in ops]) for ops in live.predecessors]
        self._after_sum = [sum([self._mark[p] for p in ops]) for ops in live.successors]
        self._beside: dict[tuple[int, int], int] = {}

    def left(self) -> list[int]:
        """The modules, in a legal order."""
        return sorted([m for m, alive in enumerate(self._alive) if alive], key=self._end.__getitem__)

    def collapse(self, modules: Iterable[int]) -> None:
        """Compose neighbours of `modules`, and of all modules that change, until no two fit together."""
        queue = deque(modules)
        waiting = [False] * len(self._live)
        for m in queue:
            waiting[m] = True
        while queue:
            m = queue.popleft()
            waiting[m] = False
            if self._fixed[m] or not self._alive[m]:
                continue
            for other in self._compose(m):
                if not waiting[other] and not self._fixed[other]:
                    waiting[other] = True
                    queue.append(other)

    def _compose(self, m: int) -> list[int]:
        """Compose `m` with one neighbour, if one fits; return the modules whose neighbours changed."""
        if len(self._after[m]) == 1:
            (then,) = self._after[m]
            if len(self._before[then]) == 1 and not self._fixed[then]:
                return self._series(m, then)
        if len(self._before[m]) == 1:
            (first,) = self._before[m]
            if len(self._after[first]) == 1 and not self._fixed[first]:
                return self._series(first, m)
        key = self._before_sum[m], self._after_sum[m]
        other = self._beside.setdefault(key, m)
        if other != m:
            alive = self._alive[other] and (self._before_sum[other], self._after_sum[other]) == key
            if alive and self._before[m] == self._before[other] and self._after[m] == self._after[other]:
                return self._parallel(other, m)
            self._beside[key] = m
        return []

    def _series(self, first: int, then: int) -> list[int]:
        part = self._segments.series(self._part(first), self._part(then))
        self._after[first].clear()
        self._before[then].clear()
        # The name with fewer neighbours is dropped.
        if len(self._before[first]) <= len(self._after[then]):
            kept, gone, near, far, near_sum, far_sum = (
                then, first, self._before, self._after, self._before_sum, self._after_sum,
            )  # fmt: skip
        else:
            kept, gone, near, far, near_sum, far_sum = (
                first, then, self._after, self._before, self._after_sum, self._before_sum,
            )  # fmt: skip
        changed = self._mark[kept] - self._mark[gone]
        for neighbour in near[gone]:
            far[neighbour].remove(gone)
            far[neighbour].add(kept)
            far_sum[neighbour] += changed
        near[kept], near_sum[kept] = near[gone], near_sum[gone]
        self._keep(kept, gone, part)
        return [kept, *near[kept]]

    def _parallel(self, kept: int, gone: int) -> list[int]:
        for near, far, far_sum in (
            (self._before, self._after, self._after_sum),
            (self._after, self._before, self._before_sum),
        ):
            for neighbour in near[gone]:
                far[neighbour].remove(gone)
                far_sum[neighbour] -= self._mark[gone]
        self._keep(kept, gone, self._segments.parallel(self._part(kept), self._part(gone)))
        return [kept, *self._before[kept], *self._after[kept]]

    def _keep(self, kept: int, gone: int, part: Part) -> None:
        self._parts[kept] = part
        self._alive[gone] = False
        self._end[kept] = max(self._end[kept], self._end[gone])

    def _part(self, m: int) -> Part:
        """Module `m` as a part, to be composed with another."""
        if m in self._parts:
            return self._parts.pop(m)
        allocated = self._live.allocated_bytes[m]
        return self._segments.single(m, allocated + self._live.scratch_bytes[m], allocated - self._frees[m])

    def resolve(self, modules: Sequence[int]) -> bool:
        """Drop redundant edges, and find which readers of a storage can be its last; return whether either
        changed something. Storages with several readers have no composed readers yet."""
        place = {m: i for i, m in enumerate(modules)}
        above = [0] * len(modules)
        found = False
        for i, m in enumerate(modules):
            direct = [place[p] for p in self._before[m]]
            implied = 0
            for p in direct:
                implied |= above[p]
            above[i] = implied
            for p in direct:
                above[i] |= 1 << p
            if len(direct) > 1 and implied:
                for p in direct:
                    if implied >> p & 1:
                        self._drop(modules[p], m)
                        found = True
        self._fixed = [False] * len(self._fixed)
        for s, last in enumerate(self._last):
            if len(last) > 1:
                earlier = 0
                for op in last:
                    earlier |= above[place[op]]
                last = self._last[s] = tuple(op for op in last if not earlier >> place[op] & 1)
                if len(last) == 1:
                    self._frees[last[0]] += self._live.nbytes[s]
                    found = True
                else:
                    for op in last:
                        self._fixed[op] = True
        return found

    def _drop(self, first: int, then: int) -> None:
        self._after[first].remove(then)
        self._before[then].remove(first)
        self._after_sum[first] -= self._mark[then]
        self._before_sum[then] -= self._mark[first]

    def graph(self) -> Collapsed:
        """The graph of all modules' segments, in the legal order nearest to the source's."""
        modules = self.left()
        live = self._live
        if len(modules) == len(live):
            return Collapsed(live, tuple([(op,) for op in range(len(live))]), len(live) <= 1)
        hills: list[int] = []
        members: list[tuple[int, ...]] = []
        before: list[list[int]] = []
        end = [0] * len(live)
        for m in modules:
            before.append([end[p] for p in self._before[m]])
            if m not in self._parts:
                hills.append(live.allocated_bytes[m] + live.scratch_bytes[m])
                members.append((m,))
            else:
                for i, segment in enumerate(self._segments.sequence(self._parts[m])):
                    if i:
                        before.append([len(hills) - 1])
                    hills.append(segment.hill)
                    members.append(tuple(self._segments.ops(segment)))
            end[m] = len(hills) - 1
        order = earliest_first(before, [max(ops) for ops in members])
        place = [0] * len(order)
        for step, c in enumerate(order):
            place[c] = step
        members = [members[c] for c in order]
        smaller = _smaller(
            live, members, [hills[c] for c in order], [[place[p] for p in before[c]] for c in order], self._last
        )
        return Collapsed(smaller, tuple(members), len(modules) == 1)


def _smaller(
    live: Liveness,
    members: Sequence[tuple[int, ...]],
    hills: Sequence[int],
    predecessors: Sequence[Sequence[int]],
    last: Sequence[tuple[int, ...]],
) -> Liveness:
    """The graph of segments: storages made and freed within a segment count only as its scratch.

    A segment that frees before it allocates may have negative scratch: it needs fewer bytes than its inputs
    and its results have together.
    """
    home = [0] * len(live)
    allocated = []
    for c, ops in enumerate(members):
        allocated.append(sum([live.allocated_bytes[op] for op in ops]))
        for op in ops:
            home[op] = c
    sizes: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for nbytes, maker, ops in zip(live.nbytes, live.allocators, last, strict=True):
        if not ops:
            continue
        made = None if maker is None else home[maker]
        readers = (home[ops[0]],) if len(ops) == 1 else tuple(sorted([home[op] for op in ops]))
        if readers == (made,) and maker != ops[0]:
            allocated[readers[0]] -= nbytes
        else:
            sizes[made, readers] = sizes.get((made, readers), 0) + nbytes
    mortal: list[list[int]] = [[] for _ in members]
    users = []
    for s, (made, readers) in enumerate(sizes):
        users.append(readers if made is None or readers == (made,) else (made, *readers))
        for c in users[-1]:
            mortal[c].append(s)
    successors: list[list[int]] = [[] for _ in members]
    for c, earlier in enumerate(predecessors):
        for p in earlier:
            successors[p].append(c)
    return Liveness(
        start_bytes=live.start_bytes,
        end_bytes=live.end_bytes,
        allocated_bytes=tuple(allocated),
        scratch_bytes=tuple([hill - nbytes for hill, nbytes in zip(hills, allocated, strict=True)]),
        mortal=tuple(map(tuple, mortal)),
        users=tuple(users),
        nbytes=tuple(sizes.values()),
        predecessors=tuple([tuple(sorted(earlier)) for earlier in predecessors]),
        successors=tuple(map(tuple, successors)),
        allocators=tuple([made for made, _ in sizes]),
    )
