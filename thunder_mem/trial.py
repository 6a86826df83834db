"""The exact price of rebuilding given storages, in the arrangement that planning starts from."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_mem.amplifiers import absorb_amplifiers
from thunder_mem.graph import Graph
from thunder_mem.regions import Fusibility, contract_chains
from thunder_mem.repeat import repeat_in_backward
from thunder_mem.timeline import Timeline, simulate

__all__ = ["Trial", "try_rebuilding"]


@dataclass(frozen=True)
class Trial:
    """What a choice costs in memory.

    Attributes:
        rebuilt: the choice.
        timeline: of the regions in source order, neither sorted nor merged.
        step_of: per op of the original graph, the first step of its own half that runs it; None if it
            is part of its consumers alone.
    """

    rebuilt: frozenset[int]
    timeline: Timeline
    step_of: tuple[int | None, ...]

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


def try_rebuilding(graph: Graph, fuse: Fusibility, rebuilt: frozenset[int]) -> Trial:
    """Price the program in which the backward rebuilds these storages."""
    repeated = repeat_in_backward(graph, fuse, rebuilt)
    absorbed = absorb_amplifiers(repeated.graph, repeated.fuse)
    regions = absorbed.graph.contract(contract_chains(absorbed.graph, absorbed.groups, absorbed.fuse))
    timeline = simulate(regions)
    step_of: list[int | None] = [None] * len(graph)
    for step, region in enumerate(regions.ops):
        for member in region.payload:  # type: ignore[attr-defined]
            op = repeated.source[absorbed.origin[member]]
            if step_of[op] is None and graph.ops[op].backward == region.backward:
                step_of[op] = step
    return Trial(rebuilt, timeline, tuple(step_of))
