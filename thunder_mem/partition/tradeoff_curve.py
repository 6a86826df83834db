"""Small steps from free recomputation to recomputing nearly everything.

For every price of a byte the minimum cut (`min_cut_partition.py`) gives the best exchange of memory for time. As the
price rises, the sets of recomputed storages are nested. A cut decides equal layers alike, so two neighbouring sets
differ by a whole stack of layers. The points between them switch one stretch of the forward after the other, so a point
says how many layers have switched.

Long before the price is infinite this stops paying, because values recomputed from far back must themselves be alive.
So the values through which all data passes (the residual stream between blocks) are block boundaries that stay kept:
all of them, every second, every fourth, and so on (Chen et al., "Training deep nets with sublinear memory cost", 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph
from thunder_mem.partition.block_boundaries import block_boundaries, without_first_block
from thunder_mem.partition.constraints import UNDECIDED, Constraints
from thunder_mem.partition.min_cut_partition import Exchange, min_cut_partition, saved_storages

__all__ = ["TradeoffPoint", "repeat_seconds", "tradeoff_curves"]

# Prices between which a further cut is looked for, halving; equal layers need few.
_MOST_CUTS = 24


@dataclass(frozen=True)
class TradeoffPoint:
    """One choice of storages that the backward recomputes.

    Attributes:
        rebuilt: the storages.
        seconds: to repeat the ops that make them.
        saved_bytes: the bytes that the backward receives, apart from storages that are alive anyway.
    """

    rebuilt: frozenset[int]
    seconds: float
    saved_bytes: int


def repeat_seconds(graph: Graph, rebuilt: frozenset[int], repeat_s: Sequence[float]) -> float:
    """Seconds to repeat every op that makes one of `rebuilt`."""
    makers = [graph.allocator[s] for s in rebuilt]
    return sum(repeat_s[op] for op in sorted({op for op in makers if op is not None}))


def tradeoff_curves(
    graph: Graph, fuse: FusionCapabilities, repeat_s: Sequence[float], choices: Constraints = UNDECIDED
) -> Iterator[tuple[TradeoffPoint, ...]]:
    """For every spacing of the block boundaries, narrowest first, the points by rising time.

    Args:
        graph: forward and backward of one trace.
        fuse: the facts about cheap ops.
        repeat_s: per op, the seconds to recompute it; infinite if it may not run again.
        choices: decisions already made.
    """
    found = block_boundaries(graph, fuse, repeat_s)
    seen: set[frozenset[int]] = set()
    for spaced in _thinned(found, without_first_block(graph, fuse, found)):
        kept = [s for s in spaced if s not in choices.must_recompute]
        held = replace(choices, must_save=choices.must_save | frozenset(kept))
        points = tuple(_points(graph, fuse, repeat_s, held, [graph.allocator[s] or 0 for s in kept]))
        if points[-1].rebuilt not in seen:
            yield points
        seen.add(points[-1].rebuilt)


def _thinned(found: Sequence[int], thinner: Sequence[int]) -> Iterator[Sequence[int]]:
    """All block boundaries, the thinner ones, and of these every second, every fourth, ..., counted from the last."""
    yield found
    yield thinner
    spacing = 2
    while spacing < 2 * len(thinner):
        yield thinner[::-spacing][::-1]
        spacing *= 2


def _points(
    graph: Graph, fuse: FusionCapabilities, repeat_s: Sequence[float], choices: Constraints, bounds: Sequence[int]
) -> Iterator[TradeoffPoint]:
    """Nested sets: those of the hull, and between two of them one stretch of the forward after the other."""
    hull = _hull(graph, fuse, repeat_s, choices)
    rebuilt = hull[0]
    yield _point(graph, repeat_s, rebuilt)
    for following in hull[1:]:
        stretches: dict[int, set[int]] = {}
        for s in following - rebuilt:
            position = sum(bound < (graph.allocator[s] or 0) for bound in bounds)
            stretches.setdefault(position, set()).add(s)
        for position in sorted(stretches):
            rebuilt = rebuilt | stretches[position]
            yield _point(graph, repeat_s, rebuilt)
        rebuilt = following


def _point(graph: Graph, repeat_s: Sequence[float], rebuilt: frozenset[int]) -> TradeoffPoint:
    return TradeoffPoint(rebuilt, repeat_seconds(graph, rebuilt, repeat_s), _saved_bytes(graph, rebuilt))


def _saved_bytes(graph: Graph, rebuilt: frozenset[int]) -> int:
    kept = saved_storages(graph, rebuilt) - graph.outputs
    return sum(graph.storages[s].nbytes for s in kept if not graph.storages[s].held)


def _hull(
    graph: Graph, fuse: FusionCapabilities, repeat_s: Sequence[float], choices: Constraints
) -> list[frozenset[int]]:
    """The cuts that are best at some price, from free to the most expensive."""

    def cut(byte_s: float) -> TradeoffPoint:
        rebuilt = min_cut_partition(graph, fuse, choices, Exchange(repeat_s, byte_s))
        return _point(graph, repeat_s, rebuilt)

    free = _point(graph, repeat_s, min_cut_partition(graph, fuse, choices))
    total_s = sum(t for t in repeat_s if isfinite(t)) or 1.0
    found = [free, cut(4 * total_s)]  # at which one byte outweighs all work
    stack, cuts = [(0, 1)], 0
    points = {0: found[0], 1: found[1]}
    while stack and cuts < _MOST_CUTS:
        low, high = stack.pop()
        bytes_less = points[low].saved_bytes - points[high].saved_bytes
        more_s = points[high].seconds - points[low].seconds
        if bytes_less <= 0 or more_s <= 0:
            continue
        middle = cut(more_s / bytes_less)
        cuts += 1
        if middle.rebuilt in (points[low].rebuilt, points[high].rebuilt):
            continue
        if points[low].seconds < middle.seconds < points[high].seconds:
            key = len(points)
            points[key] = middle
            stack += [(low, key), (key, high)]
    ordered = sorted(points.values(), key=lambda r: (r.seconds, -r.saved_bytes))
    nested = [ordered[0].rebuilt]
    for point in ordered[1:]:
        nested.append(nested[-1] | point.rebuilt)
    return list(dict.fromkeys(nested))
