"""Sift an order: ops that free go up, ops that allocate sink down, until the peak stays.

The exchange argument behind it: within a fixed budget, a ready op that fits and whose net is not
positive may always run at once, for its net only falls as more ops run, so whatever order was
feasible stays so. Read backwards the same argument sinks an op that allocates more than it frees
down to its first user. A pass under the budget of the present peak therefore never raises it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from thunder_mem.liveness import Frontier, Liveness, profile

__all__ = ["settle", "sift", "toward_source"]


def settle(live: Liveness, order: Sequence[int], budget_bytes: int, reverse: bool = False) -> tuple[list[int], int]:
    """One pass: follow `order`, but run every ready op at once that fits and does not add bytes.

    With `reverse` time runs backwards: every op sinks as far as that costs nothing. Returns the new
    order and its peak bytes; if `order` fits in `budget_bytes`, so does the result. Time O(E log n).
    """
    frontier = Frontier(live, reverse)
    appears, vanishes, scratch, done = frontier.appears, frontier.vanishes, frontier.scratch, frontier.done
    rank = [0] * len(order)
    sequence = list(reversed(order)) if reverse else list(order)
    for step, op in enumerate(sequence):
        rank[op] = step
    gains: list[tuple[int, int, int]] = []
    peak_bytes = frontier.now_bytes
    result: list[int] = []

    def run(op: int) -> None:
        nonlocal peak_bytes
        need = frontier.now_bytes + appears[op] + scratch[op]
        if need > peak_bytes:
            peak_bytes = need
        result.append(op)
        for other in frontier.run(op):
            if appears[other] <= vanishes[other]:
                heapq.heappush(gains, (appears[other] + scratch[other], rank[other], other))

    for op in frontier.ready():
        if appears[op] <= vanishes[op]:
            heapq.heappush(gains, (appears[op] + scratch[op], rank[op], op))
    for following in sequence:
        while gains and gains[0][0] <= budget_bytes - frontier.now_bytes:
            op = heapq.heappop(gains)[2]
            if not done[op]:
                run(op)
        if not done[following]:
            run(following)
    if reverse:
        result.reverse()
    return result, peak_bytes


def sift(live: Liveness, order: Sequence[int], rounds: int = 4) -> tuple[list[int], int]:
    """Pass up and down until a round changes nothing or `rounds` are done: (order, peak bytes)."""
    current = list(order)
    peak_bytes = max(profile(live, current), default=live.start_bytes)
    for _ in range(rounds):
        before = current
        for reverse in (True, False):
            current, peak_bytes = settle(live, current, peak_bytes, reverse)
        if current == before:
            break
    return current, peak_bytes


def toward_source(live: Liveness, order: Sequence[int], peak_bytes: int) -> list[int]:
    """Give each stretch of `order` its source order back where that fits in `peak_bytes`.

    Stretches are halved until they fit, so what lies off the peak returns to the order the user
    wrote, which keeps locality and overlap. Time O(E log n).
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
