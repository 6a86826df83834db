"""`sort="auto"`: sift several seeds, keep the best, lower its peak window by window.

All limits are counts of work, never clocks, so the same graph gives the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from thunder_mem.cuts import CutNetwork
from thunder_mem.liveness import Liveness, footprint_bytes, profile
from thunder_mem.sort_greedy import breadth_first, depth_first, least_peak_first
from thunder_mem.sort_search import solve, whole_graph
from thunder_mem.sort_sift import LOOKAHEAD, sift, toward_source
from thunder_mem.sort_window import lower_peak

__all__ = ["Sorted", "exact", "portfolio"]

# Cheap rounds show which seed is promising; only the source order and the best go on.
_SEED_ROUNDS = 1
# Windows and full sifts alternate while they help, within this many moves of the search.
_ROUNDS = 2
_WINDOW_MOVES = 150_000
_EXACT_MOVES = 5_000_000


@dataclass(frozen=True)
class Sorted:
    """An order, its peak, the algorithm that won, and whether the peak is proven least."""

    order: list[int]
    peak_bytes: int
    algorithm: str
    optimal: bool


def _seeds(live: Liveness) -> Iterator[tuple[str, Sequence[int]]]:
    yield "source", range(len(live))
    yield "lpmf", least_peak_first(live)
    yield "backward_lpmf", least_peak_first(live, reverse=True)
    yield "dfs", depth_first(live)
    yield "bfs", breadth_first(live)


def portfolio(live: Liveness) -> Sorted:
    """The best order found, never above the source order, and that order itself unless beaten.

    It stops as soon as one minimum cut at the peak proves that nothing is left to gain. Time
    near-linear in the graph: five greedy seeds, a fixed number of sift rounds, of cuts and of
    search moves.
    """
    source = list(range(len(live)))
    source_bytes = max(profile(live, source), default=live.start_bytes)
    floor_bytes = footprint_bytes(live)
    best = Sorted(source, source_bytes, "source", source_bytes == floor_bytes)
    for name, seed in _seeds(live):
        if best.optimal:
            break
        order, peak_bytes = sift(live, seed, _SEED_ROUNDS, 0 if name != "source" else LOOKAHEAD)
        if peak_bytes < best.peak_bytes:
            best = Sorted(order, peak_bytes, f"{name}+sift", peak_bytes == floor_bytes)
        if name == "source" and not best.optimal:
            floor_bytes = max(floor_bytes, _cut_at_peak(live, best.order))
            best = replace(best, optimal=best.peak_bytes == floor_bytes)
    moves = 0
    for _ in range(_ROUNDS):
        if best.optimal or moves >= _WINDOW_MOVES:
            break
        order, _ = sift(live, best.order, _SEED_ROUNDS)
        lowered = lower_peak(live, order, floor_bytes, _WINDOW_MOVES - moves)
        moves += lowered.moves
        if lowered.peak_bytes == best.peak_bytes:
            best = replace(best, optimal=lowered.optimal)
            break
        grown_from = best.algorithm.split("+")[0]
        best = Sorted(lowered.order, lowered.peak_bytes, f"{grown_from}+window", lowered.optimal)
    if not best.optimal:
        best = replace(best, optimal=best.peak_bytes == _cut_at_peak(live, best.order))
    if best.peak_bytes == source_bytes:
        return replace(best, order=source, algorithm="source")
    return replace(best, order=toward_source(live, best.order, best.peak_bytes))


def _cut_at_peak(live: Liveness, order: Sequence[int]) -> int:
    """A lower bound on every order's peak: the least that can be alive at this one's peak op."""
    steps = profile(live, order)
    return CutNetwork(live).bound(order[steps.index(max(steps))]) if steps else live.start_bytes


def exact(live: Liveness, max_moves: int = _EXACT_MOVES) -> Sorted:
    """The optimal order, by search over the sets of ops that have run.

    Exponential: meant for up to about 60 ops. Where `max_moves` do not suffice the portfolio's
    order comes back, with `optimal` False.
    """
    start = portfolio(live)
    if start.optimal:
        return start
    found = solve(live, whole_graph(live), footprint_bytes(live), start.peak_bytes, max_moves)
    if found.order is None:
        return Sorted(start.order, start.peak_bytes, start.algorithm, found.complete)
    order = toward_source(live, found.order, found.proven_bytes)
    return Sorted(order, found.proven_bytes, "exact", True)
