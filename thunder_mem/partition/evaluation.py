"""The exact price of recomputing given storages: absorbed, contracted and ordered as in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from thunder_mem.fusion.arrangement import order_halves
from thunder_mem.fusion.contraction import FusionCapabilities, contract_chains
from thunder_mem.fusion.producer_duplication import duplicate_cheap_producers
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import Timeline, price_order
from thunder_mem.partition.offload_on_graph import move_in_backward
from thunder_mem.partition.overwriting_on_graph import Overwritable, overwrite_operands
from thunder_mem.partition.recompute_on_graph import recompute_on_graph
from thunder_mem.schedule.registry import SortFunction

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The cost of a choice in memory.

    Attributes:
        rebuilt: the storages that the backward recomputes.
        offloaded: the storages that it fetches from the host.
        timeline: of its ordered regions, not yet merged for speed (which never raises the peak).
        names: per step, its first op of the original graph, which names the step across trials.
        forward_end: per storage of the original graph, the last step of the forward that uses it; -1 if none does.
        backward_start, backward_end: the first and the last step of the backward that uses it, apart from
            recomputation; the number of steps and -1 if none does.
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
    over: Mapping[int, Overwritable] = MappingProxyType({}),
) -> Evaluation:
    """Price the program whose backward recomputes some storages and fetches others from the host.

    Operations of the backward may write gradients `over` their operands.
    """
    repeated = recompute_on_graph(graph, fuse, rebuilt)
    if offloaded:
        repeated = move_in_backward(repeated, offloaded)
    if over:
        repeated = overwrite_operands(repeated, graph, over)
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
            elif op.backward or not repeated.graph.ops[m].backward:  # not recomputed
                for s in op.touches:
                    backward_start[s] = min(step, backward_start[s])
                    backward_end[s] = step
    return Evaluation(
        rebuilt, timeline, tuple(names), tuple(forward_end), tuple(backward_start), tuple(backward_end), offloaded
    )
