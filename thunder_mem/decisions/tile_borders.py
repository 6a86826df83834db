"""Which narrow inputs of tiled stretches the backward receives, although a checkpoint would repeat them.

A stretch's backward reads its narrow input. If the repetition makes it, all that the repetition makes before it waits
meanwhile: attention's operands, before an MLP. If the forward keeps it, the stretch's backward runs first, and
attention is repeated afterwards. That costs no time, and one narrow value a layer until its backward. At the last
layers, whose backward runs first, this is cheapest, because few others wait. At the first layers it lowers a peak that
all gradients of weights have raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.partition.constraints import Constraints
from thunder_mem.partition.min_cut_partition import min_cut_partition
from thunder_mem.trace.reading import TraceGraph

__all__ = ["keeping_borders"]

Partitioned = Callable[[frozenset[int]], tuple[TraceCtx, TraceGraph]]

_FEW = (1, 2, 4)
"""So many of the last or of the first stretches keep their input in the candidates, or all do."""


def keeping_borders(
    partitioned: Partitioned,
    source: TraceGraph,
    fuse: FusionCapabilities,
    constraints: Constraints,
    offered: frozenset[int],
    gathered: frozenset[int],
) -> frozenset[int] | None:
    """The storages to recompute if the backward also receives the inputs of some stretches.

    Candidates are compared in the source's order, unfused, from the first stretch's backward to the last one's.

    Args:
        partitioned: gives the joint trace that recomputes some storages, and its reading.
        source: the reading of the trace that recomputes none.
        fuse: the executors that take each operation.
        constraints: of its partition.
        offered: the storages that the user's checkpoints let the backward recompute.
        gathered: those that are gathered again from the caller's parameters, before which nothing waits.

    Returns:
        the choice with the lowest such peak; None if that is `offered` itself.
    """
    borders = _borders(source, offered - gathered - constraints.must_recompute)
    if not borders:
        return None
    costly = replace(fuse, cheap=(False,) * len(source.graph))
    best, lowest = None, _peak_bytes(partitioned, offered)
    tried = {offered}
    for waiting in _choices(borders):
        kept = frozenset[int]().union(*waiting)
        choice = replace(constraints, must_save=constraints.must_save | kept)
        rebuilt = min_cut_partition(source.graph, costly, choice)
        if rebuilt not in tried and (peak := _peak_bytes(partitioned, rebuilt)) < lowest:
            best, lowest = rebuilt, peak
        tried.add(rebuilt)
    return best


def _choices(borders: list[frozenset[int]]) -> list[list[frozenset[int]]]:
    """Stretches whose input is kept: a few of the last layers, a few of the first, or all."""
    few = [k for k in _FEW if k < len(borders)]
    ends = [part for k in few for part in (borders[:k], borders[-k:])]
    return [*ends, borders]


def _borders(source: TraceGraph, offered: frozenset[int]) -> list[frozenset[int]]:
    """For each stretch with a backward, in the order of the backward, the storages of its inputs by rows to rebuild."""
    found = []
    for bsym in source.bsyms:
        if _is_backward_of_stretch(bsym):
            plan = loop_of(bsym).plan
            rows = [
                a.name for a, s in zip(bsym.args[-len(plan.inputs) :], plan.inputs, strict=True) if s.sharding.split
            ]
            found.append(frozenset(source.storage_of[name] for name in rows) & offered)
    return [border for border in found if border]


def _is_backward_of_stretch(bsym: BoundSymbol) -> bool:
    named = bsym.sym.name.startswith("chunk_loop_backward")
    return named and is_chunk_loop(bsym) and loop_of(bsym).plan.is_stretch


def _peak_bytes(partitioned: Partitioned, rebuilt: frozenset[int]) -> int:
    """The peak in the source's order from the first stretch's backward to the last one's.

    Layers that run whole may be higher before fusion, and the choice changes nothing there.
    """
    _, read = partitioned(rebuilt)
    stretches = [i for i, bsym in enumerate(read.bsyms) if _is_backward_of_stretch(bsym)]
    return max(price_order(read.graph).live_bytes[stretches[0] : stretches[-1] + 1])
