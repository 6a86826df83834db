"""Search over the sets of ops that have run: the exact order of a short stretch, or a proof.

A state is the set of a stretch's ops that have run. Its live bytes do not depend on the path to it. So the least peak
is a bottleneck shortest path from the empty set to the full one. Two facts keep the search small. A ready op that fits
under the level already paid for, and adds no bytes, is the only move worth trying (`sift.py` gives the argument). The
same problem in reversed time often has far fewer states, so both directions advance in turn.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from thunder_mem.memory.running_set import Liveness

__all__ = ["Outcome", "Stretch", "solve", "whole_graph"]

_TURN_MOVES = 2_000


@dataclass(frozen=True, eq=False)
class Stretch:
    """Ops to be ordered among themselves, between fixed ops before and after them.

    Attributes:
        ops: in some legal order.
        inside: for each of them, the storages it touches that die with the last of these ops.
        start_bytes, end_bytes: alive before the first and after the last of them.
    """

    ops: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    start_bytes: int
    end_bytes: int


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Attributes:
        order: an order of the stretch, or None if none below the upper limit was found.
        proven_bytes: no order of the stretch has a smaller peak.
        complete: the search ended: `order` is optimal, or None because no order is below the limit.
        moves: the number of priced moves, the measure of the work.
    """

    order: tuple[int, ...] | None
    proven_bytes: int
    complete: bool
    moves: int


def whole_graph(live: Liveness) -> Stretch:
    """All ops in source order."""
    return Stretch(tuple(range(len(live))), live.mortal, live.start_bytes, live.end_bytes)


def solve(live: Liveness, stretch: Stretch, floor_bytes: int, upper_bytes: int, max_moves: int) -> Outcome:
    """Find an order of `stretch` with the least peak below `upper_bytes`.

    Args:
        live: the graph.
        stretch: the ops to order.
        floor_bytes: a peak that needs no improvement; the first order found that stays within it is
            returned. With a lower bound the result is optimal; a larger value makes the search faster.
        upper_bytes: orders that reach it are ignored.
        max_moves: the most moves to price, a little over a microsecond each; a move among thousands of
            ops counts more, because its sets are longer.
    """
    if floor_bytes >= upper_bytes:
        return Outcome(None, upper_bytes, True, 0)
    if not stretch.ops:
        return Outcome((), stretch.start_bytes, True, 0)
    directions = [_Direction(live, stretch, reverse, floor_bytes, upper_bytes) for reverse in (False, True)]
    moves = 0
    while moves < max_moves:
        for direction in directions:
            moves += direction.advance(min(_TURN_MOVES, max_moves - moves))
            if direction.done:
                proven = upper_bytes if direction.order is None else direction.level
                return Outcome(direction.order, proven, True, moves)
        level = max(direction.level for direction in directions)
        for direction in directions:
            direction.level = level
    return Outcome(None, directions[0].level, False, moves)


class _Direction:
    """One direction of time: a bottleneck search, depth first within the present level."""

    def __init__(self, live: Liveness, stretch: Stretch, reverse: bool, floor_bytes: int, upper_bytes: int) -> None:
        ops = stretch.ops
        local = {op: i for i, op in enumerate(ops)}
        edges_in, edges_out = live.predecessors, live.successors
        if reverse:
            edges_in, edges_out = edges_out, edges_in
        self.reverse = reverse
        self._weight = 1 + len(ops) // 256
        self.level = max(floor_bytes, stretch.start_bytes, stretch.end_bytes)
        self.upper = upper_bytes
        self.done = self.level >= upper_bytes
        self.order: tuple[int, ...] | None = None
        self._ops = ops
        self._before = [sum(1 << local[p] for p in edges_in[op] if p in local) for op in ops]
        self._after = [[local[p] for p in edges_out[op] if p in local] for op in ops]
        users: dict[int, int] = {}
        for i, storages in enumerate(stretch.inside):
            for s in storages:
                users[s] = users.get(s, 0) | 1 << i
        self._mortal = [[(users[s], live.nbytes[s]) for s in storages] for storages in stretch.inside]
        self._allocated = [live.allocated_bytes[op] for op in ops]
        self._scratch = [live.scratch_bytes[op] for op in ops]
        start = stretch.end_bytes if reverse else stretch.start_bytes
        ready = sum(1 << i for i, before in enumerate(self._before) if not before)
        self._came: dict[int, tuple[int, int]] = {}
        self._paid = {0: self.level}
        # A stack within the level; above it, a heap by the level that a state needs.
        self._stack = [(0, start, ready)]
        self._waiting: list[tuple[int, int, int, int, int]] = []
        self._pushed = 0

    def advance(self, limit: int) -> int:
        """Expand states until about `limit` moves are priced and return their number; set `done`
        at the end, and `order` if the full set is reached."""
        full = (1 << len(self._ops)) - 1
        stack, waiting, paid = self._stack, self._waiting, self._paid
        moves = 0
        while not self.done and moves < limit:
            while waiting and waiting[0][0] <= self.level:
                need, _, ran, now, ready = heapq.heappop(waiting)
                if need == paid[ran]:
                    stack.append((ran, now, ready))
            if not stack:
                if not waiting:
                    self.done = True
                else:
                    self.level = waiting[0][0]
                continue
            ran, now, ready = stack.pop()
            if ran == full:
                self.order = self._path()
                self.done = True
                continue
            moves += self._expand(ran, now, ready) * self._weight
        return moves

    def _expand(self, ran: int, now: int, ready: int) -> int:
        """Push the states that one move leads to; return how many moves were priced."""
        priced = 0
        level, upper, reverse = self.level, self.upper, self.reverse
        moves = []
        rest = ready
        while rest:
            bit = rest & -rest
            rest ^= bit
            priced += 1
            i = bit.bit_length() - 1
            if reverse:
                appears = 0
                for users, size in self._mortal[i]:
                    if not users & ran:
                        appears += size
                need = now + appears + self._scratch[i]
                net = appears - self._allocated[i]
            else:
                need = now + self._allocated[i] + self._scratch[i]
                if need >= upper:
                    continue
                net = self._allocated[i]
                waits = ~(ran | bit)
                for users, size in self._mortal[i]:
                    if not users & waits:
                        net -= size
            if need >= upper:
                continue
            if net <= 0 and need <= level:
                moves = [(net, i, need)]
                break
            moves.append((net, i, need))
        moves.sort(reverse=True)
        paid, before = self._paid, self._before
        for net, i, need in moves:
            bit = 1 << i
            after = ran | bit
            need = max(need, level)
            if paid.get(after, upper) <= need:
                continue
            paid[after] = need
            self._came[after] = (ran, i)
            unlocked = ready ^ bit
            for other in self._after[i]:
                if not before[other] & ~after:
                    unlocked |= 1 << other
            if need <= level:
                self._stack.append((after, now + net, unlocked))
            else:
                self._pushed += 1
                heapq.heappush(self._waiting, (need, -self._pushed, after, now + net, unlocked))
        return priced

    def _path(self) -> tuple[int, ...]:
        state = (1 << len(self._ops)) - 1
        path = []
        while state:
            state, i = self._came[state]
            path.append(self._ops[i])
        return tuple(path if self.reverse else reversed(path))
