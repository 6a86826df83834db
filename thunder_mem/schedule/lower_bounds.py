"""Lower bounds on the peak of every order, so that a report can print peak, bound, gap, proven.

The methods run from cheap to expensive, each only if the one before leaves a gap:

| method | storages that must be alive together |
|---|---|
| `footprint` | those that stay, and inputs, outputs and scratch of one op; the least first and last op |
| `forced` | also those that an ancestor allocates and a descendant still uses |
| `cut` | the least over all sets of ops that may have run before one op, `memory/min_cut.py` |
| `search` | whole orders, refuted level by level, `exact.py` |

The work is limited by counts, never by a clock, so a bound is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from thunder_mem.memory.graph import Graph
from thunder_mem.memory.min_cut import CutNetwork
from thunder_mem.memory.running_set import Liveness, footprint_bytes, liveness, profile
from thunder_mem.schedule.exact import solve, whole_graph
from thunder_mem.schedule.sift import sift

__all__ = ["Bound", "Certificate", "certify", "forced_bytes", "lower_bound"]

# Beyond this many ops the search's sets of ops take too much memory.
_SEARCH_OPS = 6_000
# Beyond this many ops the sets of ancestors would take gigabytes.
_FORCED_OPS = 40_000


@dataclass(frozen=True)
class Bound:
    """No order of the graph has a lower peak than `bound_bytes`.

    Attributes:
        bound_bytes: the bound.
        method: footprint, forced, cut or search.
        complete: no work limit stopped it, so only another method could raise the bound.
    """

    bound_bytes: int
    method: str
    complete: bool


@dataclass(frozen=True)
class Certificate:
    """The largest possible distance of a peak from the optimum.

    Attributes:
        peak_bytes, bound_bytes: the compared figures.
        gap: (peak - bound) / bound; 0.0 if both are 0.
        proven: they are equal, so no order does better.
    """

    peak_bytes: int
    bound_bytes: int
    gap: float
    proven: bool


def certify(peak_bytes: int, bound: Bound) -> Certificate:
    """Compare a peak with a bound.

    Raises:
        ValueError: the peak is below the bound, so they belong to different graphs.

    Example:
        >>> certify(110, Bound(100, "cut", True))
        Certificate(peak_bytes=110, bound_bytes=100, gap=0.1, proven=False)
    """
    if peak_bytes < bound.bound_bytes:
        raise ValueError(f"a peak of {peak_bytes} bytes cannot lie below its bound of {bound.bound_bytes} bytes")
    gap = (peak_bytes - bound.bound_bytes) / bound.bound_bytes if bound.bound_bytes else float(peak_bytes > 0)
    return Certificate(peak_bytes, bound.bound_bytes, gap, peak_bytes == bound.bound_bytes)


def lower_bound(
    graph: Graph, order: Sequence[int] | None = None, max_cuts: int = 64, max_moves: int = 300_000
) -> Bound:
    """The best lower bound on the peak of any order, within the given work.

    Args:
        graph: the graph.
        order: the order to certify; the work stops once the bound proves it optimal. The default is the
            sifted source order.
        max_cuts: the most minimum cuts to solve, first at the ops with the most forced bytes.
        max_moves: the most moves that the final search may price; 0 omits the search.

    Raises:
        GraphError: `order` is not legal.
        ValueError: a negative limit.
    """
    if max_cuts < 0 or max_moves < 0:
        raise ValueError(f"max_cuts and max_moves are counts of work from 0, not {max_cuts} and {max_moves}")
    live = liveness(graph)
    if order is not None:
        graph.check_order(order)
    known = list(order) if order is not None else sift(live, range(len(graph)))[0]
    return _lower_bound(live, known, max_cuts, max_moves)


def _lower_bound(live: Liveness, known: list[int], max_cuts: int, max_moves: int) -> Bound:
    steps = profile(live, known)
    peak_bytes = max(steps, default=live.start_bytes)
    best, method = footprint_bytes(live), "footprint"
    if best >= peak_bytes:
        return Bound(best, method, True)
    forced = forced_bytes(live) if len(live) <= _FORCED_OPS else np.zeros(len(live), np.int64)
    if forced.max() > best:
        best, method = int(forced.max()), "forced"
    if best >= peak_bytes:
        return Bound(best, method, True)

    # The live bytes at an op in a known order are at least its cut, so only ops above the bound matter.
    seen = np.zeros(len(live), np.int64)
    seen[known] = steps
    network = CutNetwork(live)
    cuts = 0
    complete = True
    for op in np.lexsort((np.arange(len(live)), -seen, -forced)):
        if seen[op] <= best:
            continue
        if cuts == max_cuts:
            complete = False
            break
        cuts += 1
        value = network.bound(int(op))
        if value > best:
            best, method = value, "cut"
        if best >= peak_bytes:
            return Bound(best, method, True)
    if max_moves and len(live) <= _SEARCH_OPS:
        found = solve(live, whole_graph(live), best, peak_bytes, max_moves)
        complete = found.complete
        if found.proven_bytes > best:
            best, method = found.proven_bytes, "search"
    return Bound(best, method, complete)


def forced_bytes(live: Liveness) -> np.ndarray:
    """Per op, as (n,) int64, the bytes alive while it runs in every order.

    A storage is forced where its allocator is an ancestor of the op (or it is an input) and a user
    is a descendant or the op itself. Time and space O(n * (n + storages) / 8) in bytes of bit sets.
    """
    n = len(live)
    if not n:
        return np.zeros(0, np.int64)
    above = _closure(live.predecessors, range(n))
    below = _closure(live.successors, reversed(range(n)))
    stays = list(live.allocated_bytes)
    forced = np.array(live.allocated_bytes, np.int64) + np.array(live.scratch_bytes, np.int64)
    base_bytes = live.start_bytes
    width = (n + 7) // 8
    regions: dict[int, int] = {}
    for s, users in enumerate(live.users):
        if not users:
            continue
        until = 0
        for user in users:
            until |= above[user] | 1 << user
        allocator = live.allocators[s]
        if allocator is None:
            base_bytes -= live.nbytes[s]
        else:
            stays[allocator] -= live.nbytes[s]
            until &= below[allocator]
        if until:
            regions[until] = regions.get(until, 0) + live.nbytes[s]
    for op, size in enumerate(stays):
        if size and below[op]:
            regions[below[op]] = regions.get(below[op], 0) + size
    for region, size in regions.items():
        bits = np.unpackbits(np.frombuffer(region.to_bytes(width, "little"), np.uint8), count=n, bitorder="little")
        forced += bits * np.int64(size)
    return forced + base_bytes


def _closure(edges: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    """For each op, as a bit set, all ops that `edges` lead to; `order` lists targets first."""
    reached = [0] * len(edges)
    for op in order:
        for other in edges[op]:
            reached[op] |= reached[other] | 1 << other
    return reached
