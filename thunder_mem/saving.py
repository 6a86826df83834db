"""Which forward values the backward receives, and which it rebuilds for free: a minimum cut.

A value that cheap, fusible work can rebuild from what is kept anyway is never worth its bytes. The
problem is AOTAutograd's (`torch/_functorch/partitioners.py`), posed over storages: keeping any view
of a storage keeps all of it, and a second view then costs nothing.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from thunder_mem.choices import Choices
from thunder_mem.graph import Graph
from thunder_mem.regions import Fusibility

__all__ = ["storages_to_rebuild"]

_INFINITE = 2**31 - 1
_MOST_UNITS = 2**30
_UNDECIDED = Choices()


def storages_to_rebuild(graph: Graph, fuse: Fusibility, choices: Choices = _UNDECIDED) -> frozenset[int]:
    """The storages that the backward should compute again instead of receiving them.

    Each storage that the forward allocates is an arc whose capacity is its bytes; a cheap op leads
    from the storages it reads to those it makes; what no cheap op makes comes from the source, what
    the backward touches leads to the sink. The least cut is the least to save. What the caller holds
    is free to keep, so nothing is rebuilt that is alive anyway. Among equal cuts the one nearest to
    the backward is taken: it recomputes least.

    Args:
        graph: forward and backward of one trace.
        fuse: its `cheap` ops may be repeated.
        choices: what is decided already. What it offers or demands to recompute may be repeated
            whatever that costs, so it must be known to be repeatable; what it keeps may not.
    """
    forward = [s for s, a in enumerate(graph.allocator) if a is not None and not graph.ops[a].backward]
    needed = [s for s in forward if any(graph.ops[op].backward for op in graph.users[s])]
    if not needed:
        return frozenset()
    node = {s: 2 + 2 * i for i, s in enumerate(forward)}  # a storage's entry; its exit is one more
    sizes = {s: 0 if s in graph.outputs or graph.storages[s].held else graph.storages[s].nbytes for s in forward}
    unit = max(1, -(-sum(sizes.values()) // _MOST_UNITS))
    tails, heads, capacities = [], [], []

    def arc(tail: int, head: int, capacity: int) -> None:
        tails.append(tail)
        heads.append(head)
        capacities.append(capacity)

    for s in forward:
        forced = s in choices.recompute and sizes[s]
        arc(node[s], node[s] + 1, _INFINITE if forced else -(-sizes[s] // unit))
        maker = graph.ops[graph.allocator[s]]  # type: ignore[index]
        if not _can_repeat(graph, fuse, choices, s):
            arc(0, node[s], _INFINITE)
            continue
        for r in maker.reads:
            if r in node:
                arc(node[r] + 1, node[s], _INFINITE)
    for s in needed:
        arc(node[s] + 1, 1, _INFINITE)
    late = _sink_side(2 + 2 * len(forward), tails, heads, capacities)
    return frozenset(s for s in _reached_back(graph, needed, {s for s in forward if late[node[s]]}))


def _can_repeat(graph: Graph, fuse: Fusibility, choices: Choices, s: int) -> bool:
    """A cheap op makes it, out of storages that nobody overwrites, or it is chosen."""
    maker = graph.allocator[s]
    chosen = s in choices.offered or s in choices.recompute
    return maker is not None and s not in choices.keep and (chosen or fuse.cheap[maker])


def _sink_side(nodes: int, tails: list[int], heads: list[int], capacities: list[int]) -> np.ndarray:
    """Which nodes still reach the sink after a maximum flow from node 0 to node 1."""
    shape = (nodes, nodes)
    matrix = csr_array((np.array(capacities, dtype=np.int64), (tails, heads)), shape=shape)
    matrix.data = np.minimum(matrix.data, _INFINITE)
    flow = maximum_flow(matrix.astype(np.int32), 0, 1).flow
    residual = (matrix - flow.astype(np.int64)).tocsr()
    residual.eliminate_zeros()
    reaches = np.zeros(nodes, dtype=bool)
    reaches[breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)] = True
    return reaches


def _reached_back(graph: Graph, needed: list[int], rebuilt: set[int]) -> set[int]:
    """Those of `rebuilt` that the needed values really go through."""
    found: set[int] = set()
    stack = [s for s in needed if s in rebuilt]
    while stack:
        s = stack.pop()
        if s not in found:
            found.add(s)
            stack += [r for r in graph.ops[graph.allocator[s]].reads if r in rebuilt]  # type: ignore[index]
    return found
