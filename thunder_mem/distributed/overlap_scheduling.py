"""The places of collectives' starts and waits, in an otherwise fixed order.

For memory alone, a gather belongs just before its first use, and the wait for a reduction just after its start: both
hide nothing. Here starts move up and waits move down past computation, which keeps its order. They move as far as
`link_model.py` shows a gain and the live bytes stay under a limit. The starts keep their order among each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from thunder_mem.distributed.collective_order import Walk
from thunder_mem.distributed.link_model import Collective, exposed_s
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import peaks_of, price_order

__all__ = ["overlapped"]


def overlapped(
    graph: Graph,
    order: Sequence[int],
    seconds: Sequence[float],
    collectives: Sequence[Collective],
    limits: tuple[int, int],
) -> list[int]:
    """The order with starts moved up and waits moved down.

    Args:
        graph: of a trace, plain or joint.
        order: legal, its forward before its backward.
        seconds: per op, its computing time.
        collectives: in the order of their starts.
        limits: the most live bytes in the forward and in the backward. If `order` is above its limit already,
            no move may raise it further.

    Returns:
        `order` itself if moves would break a limit in the end, or hide less.
    """
    new: list[int] = []
    live_at = dict(zip(order, price_order(graph, order).live_bytes, strict=True))
    for backward in (False, True):
        half = [op for op in order if graph.ops[op].backward == backward]
        mine = [c for c in collectives if graph.ops[c.start].backward == backward]
        new += _Half(graph, half, live_at, seconds, mine, limits[backward]).moved() if mine else half
    walk = Walk(graph.predecessors)
    for op in new:
        walk.take(op)
    before, after = peaks_of(graph, order), peaks_of(graph, walk.order)
    fits = all(now <= max(was, limit) for now, was, limit in zip(after, before, limits, strict=True))
    better = exposed_s(walk.order, seconds, collectives) <= exposed_s(order, seconds, collectives)
    return walk.order if fits and better else list(order)


class _Half:
    """One half of an order: computing steps, which stay, and between them starts and waits, which move.

    Slot `i` is just before step `i`, the last slot behind all steps. `live` has the live bytes at each step.
    """

    def __init__(
        self,
        graph: Graph,
        half: Sequence[int],
        live_at: Mapping[int, int],
        seconds: Sequence[float],
        collectives: Sequence[Collective],
        limit_bytes: int,
    ) -> None:
        self.graph = graph
        self.collectives = [c for c in collectives if c.wait != c.start]
        self.limit_bytes = limit_bytes
        moving = {op for c in self.collectives for op in (c.start, c.wait) if op is not None}
        self.steps = [op for op in half if op not in moving]
        self.live = [live_at[op] for op in self.steps]
        self.time = [0.0, *accumulate(seconds[op] for op in self.steps)]
        self.order = half
        self.slot: dict[int, int] = {}  # of a step: its own
        passed = 0
        for op in half:
            self.slot[op] = passed
            passed += op not in moving
        self.moving = moving

    def moved(self) -> list[int]:
        """The half in its preferred order: predecessors of an op may still stand behind it."""
        self._gathers_late()
        self._gathers_in_time()
        self._reductions_early()
        self._reductions_waited_for_late()
        # In a slot: ops that end, then ops that start, then ops that are needed at once.
        rank = {c.wait: 2 if c.gather else 0 for c in self.collectives} | {c.start: 1 for c in self.collectives}
        place = {op: i for i, op in enumerate(self.order)}
        return sorted(self.order, key=lambda op: (self.slot[op], rank.get(op, 3), place[op]))

    def _gathers_late(self) -> None:
        """Place each gather just before its wait, or before the next collective, which must not start later."""
        for c in reversed(self.collectives):
            if c.gather and (slot := self._latest(c.start)) > self.slot[c.start]:
                self._add(self.slot[c.start], slot, -self._made_bytes(c))
                self.slot[c.start] = slot

    def _gathers_in_time(self) -> None:
        """Move each gather up, from last to first, until it ends before its wait and before the next one begins."""
        gathers = [c for c in self.collectives if c.gather]
        begins = inf
        for k in range(len(gathers) - 1, -1, -1):
            c = gathers[k]
            ends = self.time[self.slot[c.wait]] if c.wait is not None else inf
            begins = min(ends, begins) - c.seconds
            self._pull_up(gathers[: k + 1], max(0, bisect_right(self.time, begins) - 1))

    def _pull_up(self, gathers: Sequence[Collective], wanted: int) -> None:
        """Move the last of `gathers` up to slot `wanted`, together with earlier ones in its way."""
        slot, carried = self.slot[gathers[-1].start], 1
        while slot > wanted:
            while carried < len(gathers) and self.slot[gathers[-1 - carried].start] >= slot:
                carried += 1
            group = gathers[len(gathers) - carried :]
            step = slot - 1
            more = sum(map(self._made_bytes, group))
            if self.live[step] + more > self.limit_bytes or self._earliest(group) > step:
                return
            self.live[step] += more
            slot = step
            for c in group:
                self.slot[c.start] = slot

    def _reductions_early(self) -> None:
        for c in self.collectives:
            if c.gather:
                continue
            earliest = self._earliest([c])
            while self.slot[c.start] > earliest:
                step = self.slot[c.start] - 1
                if self.live[step] + self._made_bytes(c) > self.limit_bytes:
                    break
                self.live[step] += self._made_bytes(c)
                self.slot[c.start] = step

    def _reductions_waited_for_late(self) -> None:
        link_free = 0.0
        for c in self.collectives:
            link_free = max(link_free, self.time[self.slot[c.start]]) + c.seconds
            if c.gather or c.wait is None:
                continue
            wanted = min(bisect_left(self.time, link_free), self._latest(c.wait))
            while self.slot[c.wait] < wanted:
                step = self.slot[c.wait]
                more = self._kept_bytes(c, step)
                if self.live[step] + more > self.limit_bytes:
                    break
                self.live[step] += more
                self.slot[c.wait] = step + 1

    def _add(self, first: int, last: int, nbytes: int) -> None:
        for step in range(first, last):
            self.live[step] += nbytes

    def _made_bytes(self, c: Collective) -> int:
        return sum(self.graph.storages[s].nbytes for s in self.graph.ops[c.start].allocates)

    def _kept_bytes(self, c: Collective, step: int) -> int:
        """Bytes that stay alive through `step` if the wait follows it: the reduced values, read while in flight."""
        graph, nbytes = self.graph, 0
        for s in graph.ops[c.wait].reads:  # type: ignore[index]
            others = [u for u in graph.users[s] if u not in (c.start, c.wait)]
            stays = graph.storages[s].held or s in graph.outputs or s in graph.ops[c.start].allocates
            if not stays and all(u in self.slot and self.slot[u] < step for u in others if not self._before_half(u)):
                nbytes += graph.storages[s].nbytes
        return nbytes

    def _before_half(self, op: int) -> bool:
        return op not in self.slot and not self.graph.ops[op].backward

    def _earliest(self, group: Sequence[Collective]) -> int:
        """The first slot where all of `group` may start, in their order."""
        mine = {c.start for c in group}
        return max(
            (
                self.slot[p] + (p not in self.moving)
                for c in group
                for p in self.graph.predecessors[c.start]
                if p in self.slot and p not in mine
            ),
            default=0,
        )

    def _latest(self, op: int) -> int:
        """The last slot before all ops that need `op`."""
        return min((self.slot[u] for u in self.graph.successors[op] if u in self.slot), default=len(self.steps))
