"""The least bytes that can be alive when an op runs, by minimum cut.

Between two ops the live bytes depend only on the set X of ops that have run. `f(X)` sums the storages whose allocator
is in X while one of their users is not. A minimum cut minimises `f` over the sets that hold all ancestors of an op,
but not the op itself. Ops on the source side have run. An infinite arc leads from every op to its predecessors. An arc
with a storage's bytes leads from its allocator to the storage's node, and infinite arcs lead from there to all users.

The minimum plus the op's own allocations is a lower bound on every order's peak. A better order would pass through
the set that attains it.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from thunder_mem.memory.running_set import Liveness

__all__ = ["INFINITE", "CutNetwork", "flow_through"]

# scipy's maximum_flow takes int32 capacities: larger ones are solved in two digits.
INFINITE = 2**31 - 1
_DIGIT_BITS = 15


class CutNetwork:
    """The flow network of one graph, built once for cuts at many ops. Space linear in the graph."""

    def __init__(self, live: Liveness) -> None:
        self._live = live
        n = len(live)
        self._source, self._sink = n, n + 1
        nodes = n + 2
        tails: list[int] = []
        heads: list[int] = []
        sizes: list[int] = []
        allocator = live.allocators
        stays = list(live.allocated_bytes)
        self._always_bytes = live.start_bytes
        for s, users in enumerate(live.users):
            if not users:
                continue
            a = allocator[s]
            if a is None:
                self._always_bytes -= live.nbytes[s]
            else:
                stays[a] -= live.nbytes[s]
            last = [u for u in users if u != a]
            if not last:
                continue
            if len(last) == 1:
                node = last[0]
            else:
                node = nodes
                nodes += 1
                tails += [node] * len(last)
                heads += last
                sizes += [-1] * len(last)
            tails.append(self._source if a is None else a)
            heads.append(node)
            sizes.append(live.nbytes[s])
        for op, size in enumerate(stays):
            if size:
                tails.append(op)
                heads.append(self._sink)
                sizes.append(size)
        for op, before in enumerate(live.predecessors):
            tails += [op] * len(before)
            heads += before
            sizes += [-1] * len(before)
        self._nodes = nodes
        finite = [size for size in sizes if size > 0]
        self._unit = gcd(*finite) if finite else 1
        total = sum(finite) // self._unit
        self._digits = 1 if total < INFINITE else 2
        if total >> _DIGIT_BITS >= INFINITE:
            # Beyond 2**46 units even two digits overflow: round down, which keeps the bound valid.
            self._unit <<= (total >> _DIGIT_BITS).bit_length() - 30
        self._tails = np.array(tails, dtype=np.int32)
        self._heads = np.array(heads, dtype=np.int32)
        self._units = np.array([size // self._unit if size > 0 else -1 for size in sizes], dtype=np.int64)

    def least_before(self, op: int) -> tuple[int, np.ndarray]:
        """The least bytes alive just before `op` can run, and which ops have run then, as (n,) bool.

        The bytes count inputs and storages that stay, but not the allocations of `op`. They are always a lower
        bound, and exact unless the graph's bytes exceed 2**46 of their common divisor.
        """
        tails, heads, units, names = self._merged(op)
        nodes = int(names.max()) + 1
        infinite = units < 0
        if self._digits == 1:
            residual, value = flow_through(nodes, tails, heads, np.where(infinite, INFINITE, units))
        else:
            high = np.where(infinite, INFINITE, units >> _DIGIT_BITS)
            residual, value = flow_through(nodes, tails, heads, high)
            low = _matrix(nodes, tails, heads, np.where(infinite, 0, units & ((1 << _DIGIT_BITS) - 1)))
            remaining = (residual * (1 << _DIGIT_BITS) + low).tocoo()
            capacity = np.minimum(remaining.data, INFINITE)
            residual, rest = flow_through(nodes, remaining.row, remaining.col, capacity)
            value = (value << _DIGIT_BITS) + rest
        ran = np.zeros(nodes, dtype=bool)
        ran[breadth_first_order(residual, 0, return_predecessors=False)] = True
        return self._always_bytes + value * self._unit, ran[names[: len(self._live)]]

    def _merged(self, op: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The arcs left once all ancestors of `op` are the source and it and its descendants the
        sink, and each node's name among those left."""
        names = np.zeros(self._nodes, np.int64)
        names[self._reach(op, self._live.predecessors)] = 1
        sink = self._reach(op, self._live.successors)
        names[[op, *sink]] = 2
        names[self._source], names[self._sink] = 1, 2
        free = np.flatnonzero(names == 0)
        names -= 1
        names[free] = np.arange(2, 2 + len(free))
        tails, heads = names[self._tails], names[self._heads]
        # Nothing flows into the source, out of the sink or from a node to itself.
        matters = (heads != 0) & (tails != 1) & (tails != heads)
        return tails[matters], heads[matters], self._units[matters], names

    def _reach(self, op: int, edges: tuple[tuple[int, ...], ...]) -> list[int]:
        reached, stack = {op}, [op]
        while stack:
            for other in edges[stack.pop()]:
                if other not in reached:
                    reached.add(other)
                    stack.append(other)
        reached.discard(op)
        return sorted(reached)

    def bound(self, op: int) -> int:
        """The least bytes alive while `op` runs, over all orders."""
        return self.least_before(op)[0] + self._live.allocated_bytes[op] + self._live.scratch_bytes[op]


def _matrix(nodes: int, tails: np.ndarray, heads: np.ndarray, capacity: np.ndarray) -> csr_array:
    return csr_array((capacity.astype(np.int64), (tails, heads)), shape=(nodes, nodes))


def flow_through(nodes: int, tails: np.ndarray, heads: np.ndarray, capacity: np.ndarray) -> tuple[csr_array, int]:
    """The residual capacities after a maximum flow from node 0 to node 1, and its value."""
    matrix = _matrix(nodes, tails, heads, capacity)
    matrix.data = np.minimum(matrix.data, INFINITE)
    result = maximum_flow(matrix.astype(np.int32), 0, 1)
    residual = (matrix - result.flow.astype(np.int64)).tocsr()
    residual.eliminate_zeros()
    return residual, int(result.flow_value)
