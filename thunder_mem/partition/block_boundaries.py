"""The boundary values of blocks: at some point of the forward, all data passes through one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph

__all__ = ["block_boundaries", "without_first_block"]


def block_boundaries(graph: Graph, fuse: FusionCapabilities, repeat_s: Sequence[float]) -> list[int]:
    """Storages that alone carry the forward past some point, in order.

    Values that cannot be recomputed (random draws) are kept in any case. They do not count as carrying, nor do small
    values, nor values that are cheap to recompute from them or from the caller's tensors (masks, rotary tables).

    Args:
        graph: forward and backward of one trace.
        fuse: the facts about cheap ops.
        repeat_s: per op, the seconds to recompute it; infinite if it may not run again.
    """
    given = _given(graph, fuse, repeat_s)
    found: list[int] = []
    for carrier in _alone(graph, given):
        # A storage made cheaply from the anchor before it alone (a cast): the smaller of the two is enough.
        makers = (graph.allocator[s] for s in _sources(graph, fuse, carrier, found[-1:]))
        if found and all(maker is None or given[maker] for maker in makers):
            if graph.storages[carrier].nbytes > graph.storages[found[-1]].nbytes:
                continue
            found.pop()
        found.append(carrier)
    return found


def without_first_block(graph: Graph, fuse: FusionCapabilities, found: Sequence[int]) -> list[int]:
    """Anchors without those inside a first block, which an argument of the program bypasses."""
    inside: set[int] = set()
    for i, anchor in enumerate(found):
        nbytes = graph.storages[anchor].nbytes
        for s in _sources(graph, fuse, anchor, found[:i]):
            if graph.allocator[s] is None and graph.storages[s].nbytes * 2 >= nbytes:
                first = graph.users[s][0]
                inside.update(a for a in found[:i] if (graph.allocator[a] or 0) >= first)
    return [a for a in found if a not in inside]


def _given(graph: Graph, fuse: FusionCapabilities, repeat_s: Sequence[float]) -> list[bool]:
    """Per op, whether its results are kept in any case, or cheap to make from such results and the caller's tensors."""
    given = [False] * len(graph)
    for op in graph.ops:
        makers = [graph.allocator[s] for s in op.reads]
        from_given = fuse.cheap[op.index] and all(m is None or given[m] for m in makers)
        given[op.index] = from_given or not isfinite(repeat_s[op.index])
    return given


def _alone(graph: Graph, given: Sequence[bool]) -> list[int]:
    """Storages that are alive alone after some op of the forward, apart from given ones."""
    last = [-1] * len(graph.storages)
    for op in graph.ops:
        if not op.backward:
            for s in op.touches:
                last[s] = op.index
    alive: set[int] = set()
    found: dict[int, None] = {}
    for op in graph.ops:
        if op.backward:
            break
        alive |= {s for s in op.allocates if last[s] > op.index and not given[op.index]}
        alive -= {s for s in op.touches if last[s] <= op.index}
        large = max((graph.storages[s].nbytes for s in alive), default=0)
        carriers = [s for s in alive if graph.storages[s].nbytes * 16 > large]
        if len(carriers) == 1:
            found.setdefault(carriers[0])
    return list(found)


def _sources(graph: Graph, fuse: FusionCapabilities, made: int, known: Iterable[int]) -> set[int]:
    """The inputs and costly results from which cheap ops make `made`, if `known` exists already."""
    found: set[int] = set()
    stack, seen = [made], {made, *known}
    while stack:
        s = stack.pop()
        maker = graph.allocator[s]
        if maker is None or not fuse.cheap[maker]:
            found.add(s)
        else:
            stack += [r for r in graph.ops[maker].reads if r not in seen]
            seen.update(graph.ops[maker].reads)
    return found
