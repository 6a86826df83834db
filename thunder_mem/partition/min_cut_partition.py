"""The minimum cut that decides which forward values the backward receives and which it recomputes.

A value is not worth its bytes if cheap, fusible ops can recompute it from values that are kept anyway. Under a budget,
costly recomputation competes with bytes at a price. The problem is AOTAutograd's (`torch/_functorch/partitioners.py`),
posed over storages: keeping any view of a storage keeps all of it, and a second view then costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.sparse.csgraph import breadth_first_order

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.min_cut import INFINITE, flow_through
from thunder_mem.memory.plan import Decision
from thunder_mem.partition.constraints import UNDECIDED, Constraints

__all__ = ["Exchange", "about_recompute", "about_saving", "min_cut_partition", "saved_storages"]

_MOST_UNITS = 2**30


@dataclass(frozen=True)
class Exchange:
    """The exchange rate of time and memory.

    Attributes:
        repeat_s: per op, the seconds to recompute it in the backward; infinite if it may not run again.
        byte_s: the seconds that each saved byte is worth.
    """

    repeat_s: Sequence[float]
    byte_s: float


def min_cut_partition(
    graph: Graph,
    fuse: FusionCapabilities,
    choices: Constraints = UNDECIDED,
    exchange: Exchange | None = None,
    needed: Collection[int] | None = None,
) -> frozenset[int]:
    """The storages that the backward should recompute instead of receiving them.

    Each storage that the forward allocates is an arc whose capacity is the worth of its bytes. An arc from the
    source to an op has the price of repeating the op. Infinite arcs lead from the storages that an op reads,
    through the op, to the storages that it makes. Storages that the backward touches lead to the sink. The
    minimum cut is the least price: its storages are kept, its ops repeated. The caller's storages are free to
    keep, so no live storage is recomputed. Among equal cuts the one nearest to the backward wins, because it
    repeats least.

    Args:
        graph: forward and backward of one trace.
        fuse: without an `exchange`, its `cheap` ops may be repeated, at no price.
        choices: decisions already made. Storages that they offer or demand to recompute may be repeated at any
            price, so these must be repeatable. Storages that they keep may not be repeated.
        exchange: prices; without it bytes are worth any work that is cheap or offered, and no other.
        needed: the forward's storages to receive or recompute; by default those that the backward touches.
    """
    forward = [s for s, a in enumerate(graph.allocator) if a is not None and not graph.ops[a].backward]
    if needed is None:
        needed = [s for s in forward if any(graph.ops[op].backward for op in graph.users[s])]
    if not needed:
        return frozenset()
    if exchange is None:
        exchange = Exchange([0.0 if cheap else inf for cheap in fuse.cheap], 1.0)
    makers = [op.index for op in graph.ops if op.allocates and not op.backward]
    entry = {s: 2 + 2 * i for i, s in enumerate(forward)}  # a storage's exit is one more
    node = {op: 2 + 2 * len(forward) + i for i, op in enumerate(makers)}
    arcs: list[tuple[int, int, float]] = []
    for s in forward:
        alive = s in graph.outputs or graph.storages[s].held or s in choices.free_to_save
        worth = 0.0 if alive else graph.storages[s].nbytes * exchange.byte_s
        arcs.append((entry[s], entry[s] + 1, inf if worth and s in choices.must_recompute else worth))
        if s in choices.must_save:
            arcs.append((0, entry[s], inf))
    for op in makers:
        made = graph.ops[op].allocates
        chosen = not choices.may_recompute.isdisjoint(made) or not choices.must_recompute.isdisjoint(made)
        arcs.append((0, node[op], 0.0 if chosen else exchange.repeat_s[op]))
        arcs += [(node[op], entry[s], inf) for s in made]
        arcs += [(entry[r] + 1, node[op], inf) for r in graph.ops[op].reads if r in entry]
    arcs += [(entry[s] + 1, 1, inf) for s in needed]
    late = _sink_side(2 + 2 * len(forward) + len(node), arcs)
    # What leads to the sink past a full arc also leads there along the flow, so the needed values need all of these.
    return frozenset(s for s in forward if late[entry[s]])


def saved_storages(graph: Graph, rebuilt: frozenset[int] = frozenset()) -> frozenset[int]:
    """The forward's storages that the backward receives if it recomputes `rebuilt`."""
    used = {s for op in graph.ops if op.backward for s in op.touches}
    used |= {r for s in rebuilt for r in graph.ops[graph.allocator[s]].reads}  # type: ignore[index]
    made = {s for op in graph.ops if not op.backward for s in op.allocates}
    return frozenset((used & made) - rebuilt)


def _sink_side(nodes: int, arcs: list[tuple[int, int, float]]) -> np.ndarray:
    """The nodes that still reach the sink after a maximum flow from node 0 to node 1."""
    tails, heads, worths = (np.array(column) for column in zip(*arcs, strict=True))
    finite = np.isfinite(worths)
    unit = max(worths[finite].sum() / _MOST_UNITS, np.finfo(float).tiny)
    capacities = np.full(len(arcs), INFINITE, dtype=np.int64)
    capacities[finite] = np.ceil(worths[finite] / unit)
    residual, _ = flow_through(nodes, tails, heads, capacities)
    reaches = np.zeros(nodes, dtype=bool)
    reaches[breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)] = True
    return reaches


def about_saving(before: Graph, after: Graph) -> Decision:
    """The decision about saved values, from program `before` to program `after`."""
    names_before, bytes_before = _saved(before)
    names_after, bytes_after = _saved(after)
    rebuilt = len(names_before - names_after)
    how = f"{len(names_after)} tensors received, {rebuilt} others rebuilt" if rebuilt else "all received, none rebuilt"
    return Decision("saved for the backward", how, "saved", bytes_before, bytes_after)


def about_recompute(asked: str, graph: Graph, free: frozenset[int], chosen: frozenset[int]) -> Decision:
    """The decision about the user's own choices: bytes that the backward receives without and with them."""

    def received(rebuilt: frozenset[int]) -> int:
        return sum(graph.storages[s].nbytes for s in saved_storages(graph, rebuilt))

    return Decision("recompute", asked, "saved", received(free), received(chosen))


def _saved(graph: Graph) -> tuple[set[str], int]:
    saved = [graph.storages[s] for s in saved_storages(graph)]
    return {s.name for s in saved}, sum(s.nbytes for s in saved)
