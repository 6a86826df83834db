"""Lower the peak by repeatedly re-ordering a window of ops around it, exactly.

The live bytes outside a window do not depend on the order inside it. So a better order of a window can be spliced in
at once. Windows grow until one helps or the widest is exhausted. The idea follows Kayaaslan et al., "Scheduling
series-parallel task graphs to minimize peak memory" (2018). But the exact step here is a search, for any graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thunder_mem.memory.running_set import Liveness, profile
from thunder_mem.schedule.exact import Stretch, solve

__all__ = ["Lowered", "lower_peak"]

WIDTHS = (24, 48, 96)
# The cost of building a window, in moves.
_WINDOW_MOVES = 400


@dataclass(frozen=True)
class Lowered:
    """The order, its peak, the number of priced moves, and whether the peak is proven optimal."""

    order: list[int]
    peak_bytes: int
    moves: int
    optimal: bool


def lower_peak(
    live: Liveness, order: Sequence[int], floor_bytes: int = 0, max_moves: int = 250_000, window_moves: int = 20_000
) -> Lowered:
    """Splice in better windows at the peak until none is found.

    Args:
        live: the graph.
        order: a legal order.
        floor_bytes: a lower bound on every order's peak; stop there.
        max_moves: the total work allowed, in moves of the search.
        window_moves: the work allowed for one window; a window over the whole graph has no such limit.
    """
    plan = _Plan(live, order)
    moves = 0
    optimal = plan.peak_bytes <= floor_bytes
    stuck = False
    while plan.order and not optimal and not stuck and moves < max_moves:
        step = plan.steps.index(plan.peak_bytes)
        stuck = True
        for width in WIDTHS:
            start = max(0, min(step - width // 2, len(plan.order) - width))
            stop = min(len(plan.order), start + width)
            whole = stop - start == len(plan.order)
            allowed = max_moves - moves if whole else min(window_moves, max_moves - moves)
            outcome = solve(live, plan.stretch(start, stop), plan.peak_bytes - 1, plan.peak_bytes, allowed)
            moves += outcome.moves + _WINDOW_MOVES
            if outcome.order is not None:
                plan.splice(start, outcome.order)
                optimal = plan.peak_bytes <= floor_bytes
                stuck = False
                break
            optimal = whole and outcome.complete
            if whole or moves >= max_moves:
                break
    return Lowered(plan.order, plan.peak_bytes, moves, optimal)


class _Plan:
    """An order, its live bytes per step and each storage's last step, kept up to date."""

    def __init__(self, live: Liveness, order: Sequence[int]) -> None:
        self.live = live
        self.order = list(order)
        self.steps = profile(live, order)
        self.peak_bytes = max(self.steps, default=live.start_bytes)
        position = [0] * len(self.order)
        for step, op in enumerate(self.order):
            position[op] = step
        self.last = [max((position[op] for op in users), default=-1) for users in live.users]

    def _before_bytes(self, step: int) -> int:
        if step == len(self.order):
            return self.live.end_bytes
        op = self.order[step]
        return self.steps[step] - self.live.allocated_bytes[op] - self.live.scratch_bytes[op]

    def stretch(self, start: int, stop: int) -> Stretch:
        """The ops of steps `start` to `stop` (excluded) as a problem of their own."""
        ops = tuple(self.order[start:stop])
        inside = tuple(tuple(s for s in self.live.mortal[op] if self.last[s] < stop) for op in ops)
        return Stretch(ops, inside, self._before_bytes(start), self._before_bytes(stop))

    def splice(self, start: int, ops: Sequence[int]) -> None:
        """Put another order of the same ops at `start`."""
        live, stop = self.live, start + len(ops)
        now = self._before_bytes(start)
        self.order[start:stop] = ops
        for step, op in enumerate(ops, start):
            for s in live.mortal[op]:
                if self.last[s] < stop:
                    self.last[s] = step
        for step, op in enumerate(ops, start):
            now += live.allocated_bytes[op]
            self.steps[step] = now + live.scratch_bytes[op]
            now -= sum(live.nbytes[s] for s in live.mortal[op] if self.last[s] == step)
        self.peak_bytes = max(self.steps)
