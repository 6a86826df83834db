"""The exact price of rebuilding given storages: absorbed, contracted and ordered as a plan of it would be."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_mem.fusion.arrangement import order_halves
from thunder_mem.fusion.contraction import FusionCapabilities, contract_chains
from thunder_mem.fusion.producer_duplication import duplicate_cheap_producers
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import Timeline, price_order
from thunder_mem.partition.offload_on_graph import move_in_backward
from thunder_mem.partition.recompute_on_graph import recompute_on_graph
from thunder_mem.schedule.registry import SortFunction

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs in memory.

    Attributes:
        rebuilt: what the backward computes again.
        offloaded: what it fetches from the host.
        timeline: of its regions as they are ordered, not yet merged for speed (which never raises the peak).
        names: per step, the first op of the original graph in it, which names the step across trials.
        forward_end: per storage of the original graph, the last step of the forward that uses it; -1 if none does.
        backward_start, backward_end: the first and the last step of the backward that uses it, repetitions
            apart; the number of steps and -1 if none does.
    """

    rebuilt: frozenset[int]
    timeline: Timeline
    names: tuple[int, ...]
    forward_end: tuple[int, ...]
    backward_start: tuple[int, ...]
    backward_end: tuple[int, ...]
    offloaded: frozenset[int] = frozenset()

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


def evaluate(
    graph: Graph,
    fuse: FusionCapabilities,
    rebuilt: frozenset[int],
    sort: str | SortFunction = "auto",
    offloaded: frozenset[int] = frozenset(),
) -> Evaluation:
    """Price the program in which the backward rebuilds some storages and fetches others from the host."""
    repeated = recompute_on_graph(graph, fuse, rebuilt)
    if offloaded:
        repeated = move_in_backward(repeated, offloaded)
    absorbed = duplicate_cheap_producers(repeated.graph, repeated.fuse)
    regions = absorbed.graph.contract(contract_chains(absorbed.graph, absorbed.groups, absorbed.fuse))
    timeline = price_order(regions, order_halves(regions, sort)[0])
    names = []
    forward_end = [-1] * len(graph.storages)
    backward_start = [len(timeline.order)] * len(graph.storages)
    backward_end = [-1] * len(graph.storages)
    for step, index in enumerate(timeline.order):
        region = regions.ops[index]
        members = [absorbed.origin[m] for m in region.payload]  # type: ignore[attr-defined]
        names.append(min(repeated.source[m] for m in members))
        for m in members:
            if m in repeated.moves:
                if not region.backward:
                    forward_end[repeated.moves[m]] = step
                continue
            op = graph.ops[repeated.source[m]]
            if not region.backward:
                for s in op.touches:
                    forward_end[s] = step
            elif op.backward or not repeated.graph.ops[m].backward:  # no repetition
                for s in op.touches:
                    backward_start[s] = min(step, backward_start[s])
                    backward_end[s] = step
    return Evaluation(
        rebuilt, timeline, tuple(names), tuple(forward_end), tuple(backward_start), tuple(backward_end), offloaded
    )
