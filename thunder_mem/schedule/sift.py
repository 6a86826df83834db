"""Sift an order: ops that free go up, ops that allocate sink down, until the peak stays.

The exchange argument: within a fixed budget, a ready op that fits and whose net is not positive may always run at
once. Its net only falls as more ops run, so every feasible order stays feasible. In reversed time the same argument
sinks an op that allocates more than it frees down to its first user. So a pass under the budget of the present peak
never raises the peak.

A chain of ops moves as one if its bytes rise and fall again. Each op of a recomputed norm adds bytes or frees some, so
no op sinks past the next, but all of them together do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from thunder_mem.memory.running_set import Liveness, RunningSet, profile

__all__ = ["LOOKAHEAD", "settle", "sift", "toward_source"]

# The length of a layer's longest recomputed chain; more costs time and gains little.
LOOKAHEAD = 16


def settle(
    live: Liveness, order: Sequence[int], budget_bytes: int, reverse: bool = False, lookahead: int = 0
) -> tuple[list[int], int]:
    """One pass: follow `order`, but run every ready op at once that fits and adds no bytes.

    With `reverse` time runs backwards: every op sinks as far as that costs no bytes. Returns the new
    order and its peak bytes; if `order` fits in `budget_bytes`, so does the result. Time O(E log n).

    With `lookahead`, an op that adds bytes also runs at once if at most so many ops that it unlocks bring
    the bytes back: a recomputed chain sinks as a whole. The pass then takes `lookahead` times as long, and
    may miss the budget, so the caller must check the peak.
    """
    frontier = RunningSet(live, reverse)
    appears, vanishes, scratch, done = frontier.appears, frontier.vanishes, frontier.scratch, frontier.done
    rank = [0] * len(order)
    sequence = list(reversed(order)) if reverse else list(order)
    for step, op in enumerate(sequence):
        rank[op] = step
    gains: list[tuple[int, int, int]] = []
    hopes: deque[int] = deque()
    peak_bytes = frontier.now_bytes
    result: list[int] = []

    def offer(op: int) -> None:
        if appears[op] <= vanishes[op]:
            heapq.heappush(gains, (appears[op] + scratch[op], rank[op], op))
        elif lookahead:
            hopes.append(op)

    def run(op: int) -> None:
        nonlocal peak_bytes
        need = frontier.now_bytes + appears[op] + scratch[op]
        if need > peak_bytes:
            peak_bytes = need
        result.append(op)
        for other in frontier.run(op):
            offer(other)

    for op in frontier.ready():
        offer(op)
    for following in sequence:
        while True:
            if gains and gains[0][0] <= budget_bytes - frontier.now_bytes:
                op = heapq.heappop(gains)[2]
                if not done[op]:
                    run(op)
            elif hopes:
                op = hopes.popleft()
                if not done[op]:
                    for member in _paying_chain(frontier, op, rank, budget_bytes, lookahead):
                        run(member)
            else:
                break
        if not done[following]:
            run(following)
    if reverse:
        result.reverse()
    return result, peak_bytes


def _paying_chain(frontier: RunningSet, op: int, rank: Sequence[int], budget_bytes: int, limit: int) -> list[int]:
    """`op` and ops it unlocks, each time the one that leaves the fewest bytes alive, until the present bytes
    are reached again; empty if `limit` ops or the budget do not suffice."""
    start_bytes = frontier.now_bytes
    appears, vanishes, scratch = frontier.appears, frontier.vanishes, frontier.scratch
    chain: list[int] = []
    unlocked = [op]
    paid = False
    while unlocked and len(chain) < limit and not paid:
        member = min(unlocked, key=lambda o: (appears[o] - vanishes[o], rank[o]))
        if frontier.now_bytes + appears[member] + scratch[member] > budget_bytes:
            break
        unlocked.remove(member)
        chain.append(member)
        unlocked += frontier.unlocks(member)
        frontier.run(member)
        paid = frontier.now_bytes <= start_bytes
    for member in reversed(chain):
        frontier.undo(member)
    return chain if paid else []


def sift(live: Liveness, order: Sequence[int], rounds: int = 3, lookahead: int = LOOKAHEAD) -> tuple[list[int], int]:
    """Settle down and up until a round changes nothing or `rounds` are done: (order, peak bytes).

    The peak is never above the given order's.
    """
    current = list(order)
    peak_bytes = max(profile(live, current), default=live.start_bytes)
    for _ in range(rounds):
        before = current
        for reverse in (True, False):
            settled, reached = settle(live, current, peak_bytes, reverse, lookahead)
            if reached <= peak_bytes:
                current, peak_bytes = settled, reached
        if current == before:
            break
    return current, peak_bytes


def toward_source(live: Liveness, order: Sequence[int], peak_bytes: int) -> list[int]:
    """Restore the source order of each stretch of `order` where that fits in `peak_bytes`.

    Stretches are halved until they fit. So ops off the peak return to the source order, which keeps locality
    and overlap. Time O(E log n).
    """
    left = [len(ops) for ops in live.users]
    allocated, scratch, mortal, nbytes = live.allocated_bytes, live.scratch_bytes, live.mortal, live.nbytes
    now_bytes = live.start_bytes

    def run(ops: Sequence[int], limit_bytes: int | None) -> bool:
        """Run `ops` from here; undo them and return False where they pass the limit."""
        nonlocal now_bytes
        now = now_bytes
        for step, op in enumerate(ops):
            now += allocated[op]
            if limit_bytes is not None and now + scratch[op] > limit_bytes:
                for undone in ops[:step]:
                    for s in mortal[undone]:
                        left[s] += 1
                return False
            for s in mortal[op]:
                left[s] -= 1
                if not left[s]:
                    now -= nbytes[s]
        now_bytes = now
        return True

    result: list[int] = []
    stretches = [(0, len(order))]
    while stretches:
        start, stop = stretches.pop()
        stretch = list(order[start:stop])
        by_source = sorted(stretch)
        if stretch != by_source and run(by_source, peak_bytes):
            result += by_source
        elif stretch == by_source or stop - start <= 2:
            run(stretch, None)
            result += stretch
        else:
            middle = (start + stop) // 2
            stretches += [(middle, stop), (start, middle)]
    return result
