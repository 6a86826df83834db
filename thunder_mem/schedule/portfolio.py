"""`sort="auto"`: sift several seeds, keep the best, lower its peak window by window.

All limits are counts of work, never clocks, so the same graph gives the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from thunder_mem.memory.min_cut import CutNetwork
from thunder_mem.memory.running_set import Liveness, footprint_bytes, profile
from thunder_mem.schedule.exact import solve, whole_graph
from thunder_mem.schedule.greedy import breadth_first, depth_first, least_peak_first
from thunder_mem.schedule.series_parallel import collapse
from thunder_mem.schedule.sift import sift, toward_source
from thunder_mem.schedule.window import lower_peak

__all__ = ["Sorted", "exact", "portfolio"]

# Cheap rounds show which seed is promising; only the source order and the best go on.
_SEED_ROUNDS = 1
# Windows and full sifts alternate while they help, within this many moves of the search.
_ROUNDS = 2
_WINDOW_MOVES = 150_000
_EXACT_MOVES = 5_000_000


@dataclass(frozen=True)
class Sorted:
    """An order, its peak, the algorithm that won, and a lower bound on the peak of every order."""

    order: list[int]
    peak_bytes: int
    algorithm: str
    bound_bytes: int

    @property
    def optimal(self) -> bool:
        return self.peak_bytes == self.bound_bytes


def _seeds(live: Liveness) -> Iterator[tuple[str, Sequence[int]]]:
    yield "lpmf", least_peak_first(live)
    yield "backward_lpmf", least_peak_first(live, reverse=True)
    yield "dfs", depth_first(live)
    yield "bfs", breadth_first(live)


def portfolio(live: Liveness) -> Sorted:
    """The best order found, never above the source order, and that order itself unless beaten.

    Nothing else is tried if one minimum cut proves the source order optimal, sifted or not. Else
    series-parallel modules are collapsed. If that leaves more than one order, their segments are searched.
    """
    source = list(range(len(live)))
    best = _proven(live, source, "source", footprint_bytes(live))
    source_bytes = best.peak_bytes
    if not best.optimal:
        best = _proven(live, sift(live, source, _SEED_ROUNDS)[0], "source+sift", best.bound_bytes)
    if not best.optimal:
        collapsed = collapse(live)
        found = _search(collapsed.live, collapsed.nearest(best.order), best.bound_bytes, collapsed.solved)
        if found.optimal or found.peak_bytes < best.peak_bytes:
            best = replace(found, order=collapsed.expand(found.order))
    if best.peak_bytes == source_bytes:
        return replace(best, order=source, algorithm="source")
    return replace(best, order=toward_source(live, best.order, best.peak_bytes))


def _search(live: Liveness, order: list[int], floor_bytes: int, solved: bool) -> Sorted:
    """The best order of several seeds, sifted and searched window by window, until a minimum cut at the peak
    proves it optimal. Time near-linear in the graph: five greedy seeds, and fixed numbers of sift rounds, cuts
    and search moves."""
    if solved:
        order = list(range(len(live)))
        peak_bytes = max(profile(live, order))
        return Sorted(order, peak_bytes, "series_parallel", peak_bytes)
    order, peak_bytes = sift(live, order, _SEED_ROUNDS, 0)
    best = Sorted(order, peak_bytes, "source+sift", floor_bytes)
    for name, seed in _seeds(live):
        if best.optimal:
            break
        order, peak_bytes = sift(live, seed, _SEED_ROUNDS, 0)
        if peak_bytes < best.peak_bytes:
            best = Sorted(order, peak_bytes, f"{name}+sift", best.bound_bytes)
    moves = 0
    for _ in range(_ROUNDS):
        if best.optimal or moves >= _WINDOW_MOVES:
            break
        order, _ = sift(live, best.order, _SEED_ROUNDS)
        lowered = lower_peak(live, order, best.bound_bytes, _WINDOW_MOVES - moves)
        moves += lowered.moves
        bound_bytes = lowered.peak_bytes if lowered.optimal else best.bound_bytes
        if lowered.peak_bytes == best.peak_bytes:
            best = replace(best, bound_bytes=bound_bytes)
            break
        grown_from = best.algorithm.split("+")[0]
        best = Sorted(lowered.order, lowered.peak_bytes, f"{grown_from}+window", bound_bytes)
    if not best.optimal:
        best = _proven(live, best.order, best.algorithm, best.bound_bytes)
    return best


def _proven(live: Liveness, order: list[int], algorithm: str, floor_bytes: int) -> Sorted:
    """An order, its peak, and a lower bound on every order's peak: the cut at its peak op, or the floor."""
    steps = profile(live, order)
    peak_bytes = max(steps, default=live.start_bytes)
    if peak_bytes > floor_bytes:
        floor_bytes = max(floor_bytes, CutNetwork(live).bound(order[steps.index(peak_bytes)]))
    return Sorted(order, peak_bytes, algorithm, floor_bytes)


def exact(live: Liveness, max_moves: int = _EXACT_MOVES) -> Sorted:
    """The optimal order, by search over the sets of ops that have run.

    Exponential: meant for up to about 60 ops. If `max_moves` do not suffice, the result is the portfolio's
    order, and `bound_bytes` is what the search has proven.
    """
    start = portfolio(live)
    if start.optimal:
        return start
    found = solve(live, whole_graph(live), start.bound_bytes, start.peak_bytes, max_moves)
    if found.order is None:
        return replace(start, bound_bytes=max(start.bound_bytes, found.proven_bytes))
    order = toward_source(live, found.order, found.proven_bytes)
    return Sorted(order, found.proven_bytes, "exact", found.proven_bytes)
