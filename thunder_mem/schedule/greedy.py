"""Greedy orders: least peak memory first (forwards, or backwards from the sinks), DFS and BFS.

In forward direction they are the rules of PyTorch's `torch/_inductor/memory.py` (`topological_sort_lpmf`,
`topological_sort_dfs`, `topological_sort_bfs`), with heaps in place of scans over all ready ops.
None of them looks ahead, so each is only a seed for `sift.py` and `window.py`.
"""

from __future__ import annotations

import heapq
from collections import deque

from thunder_mem.memory.running_set import Liveness, RunningSet

__all__ = ["breadth_first", "depth_first", "least_peak_first"]

# After so many ops with the least net that do not fit, the smallest op is taken instead;
# without a limit a wide graph could cost quadratic time.
_MISFITS = 32


def least_peak_first(live: Liveness, reverse: bool = False) -> list[int]:
    """Run the ready op that leaves the fewest bytes alive without raising the peak so far. If every op
    raises the peak, run the one that raises it least. Ties follow the source order.

    `reverse` applies the rule from the sinks to the sources. Time O(E log n).
    """
    frontier = RunningSet(live, reverse)
    appears, vanishes, scratch, done = frontier.appears, frontier.vanishes, frontier.scratch, frontier.done
    sign = -1 if reverse else 1
    by_net: list[tuple[int, int, int]] = []
    by_size: list[tuple[int, int, int]] = []
    misfits: list[tuple[int, int, int]] = []
    peak_bytes = frontier.now_bytes
    order: list[int] = []

    def offer(op: int) -> None:
        size = appears[op] + scratch[op]
        heapq.heappush(by_net, (appears[op] - vanishes[op], sign * op, op))
        heapq.heappush(by_size, (size, sign * op, op))

    for op in frontier.ready():
        offer(op)
    while by_size:
        slack = peak_bytes - frontier.now_bytes
        while misfits and misfits[0][0] <= slack:
            _, _, op = heapq.heappop(misfits)
            if not done[op]:
                heapq.heappush(by_net, (appears[op] - vanishes[op], sign * op, op))
        chosen = -1
        tried = 0
        while by_net and tried < _MISFITS:
            net, _, op = heapq.heappop(by_net)
            if done[op] or net != appears[op] - vanishes[op]:
                continue
            size = appears[op] + scratch[op]
            if size <= slack:
                chosen = op
                break
            heapq.heappush(misfits, (size, sign * op, op))
            tried += 1
        if chosen < 0:
            while by_size and (done[by_size[0][2]] or by_size[0][0] != appears[by_size[0][2]] + scratch[by_size[0][2]]):
                heapq.heappop(by_size)
            if not by_size:
                break
            chosen = by_size[0][2]
        peak_bytes = max(peak_bytes, frontier.now_bytes + appears[chosen] + scratch[chosen])
        order.append(chosen)
        for op in frontier.run(chosen):
            offer(op)
    if reverse:
        order.reverse()
    return order


def breadth_first(live: Liveness) -> list[int]:
    """First ready, first run. Time O(E)."""
    waits = [len(ops) for ops in live.predecessors]
    queue = deque(op for op, count in enumerate(waits) if not count)
    order = []
    while queue:
        op = queue.popleft()
        order.append(op)
        for other in live.successors[op]:
            waits[other] -= 1
            if not waits[other]:
                queue.append(other)
    return order


def depth_first(live: Liveness) -> list[int]:
    """Depth first from each sink; predecessors with the most bytes below them come first. Time O(E log n)."""
    weight = [0] * len(live)
    for op in range(len(live)):
        # Capped: along many joins the sum of the paths would grow exponentially.
        below = max((weight[p] for p in live.predecessors[op]), default=0)
        weight[op] = below + live.allocated_bytes[op] + live.scratch_bytes[op]
    first = [sorted(ops, key=lambda p: (weight[p], -p)) for ops in live.predecessors]
    seen = [False] * len(live)
    order: list[int] = []
    for sink in range(len(live)):
        if live.successors[sink]:
            continue
        stack = [sink]
        while stack:
            op = stack[-1]
            while first[op] and seen[first[op][-1]]:
                first[op].pop()
            if first[op]:
                stack.append(first[op].pop())
                continue
            stack.pop()
            if not seen[op]:
                seen[op] = True
                order.append(op)
    return order
