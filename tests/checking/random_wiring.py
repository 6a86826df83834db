"""Randomly wired networks, forward alone and with the mirrored backward: no order is obvious, and few are good.

The wiring is that of Xie et al., "Exploring randomly wired neural networks for image recognition" (2019): 64 nodes of
a Watts-Strogatz graph, each edge from the lower to the higher number.
"""

import math
import random

import networkx

from tests.checking.graphs import Builder
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.running_set import liveness, profile

__all__ = ["ALIKE", "MIXED", "annealed_bytes", "forward", "mirrored", "mirrored_by_edges"]

NODES, ALIKE, MIXED = 64, (16,), (4, 8, 16, 32)


def wiring(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each node the nodes before and after it."""
    edges = networkx.connected_watts_strogatz_graph(NODES, 4, 0.75, seed=seed).edges
    before: list[list[int]] = [[] for _ in range(NODES)]
    after: list[list[int]] = [[] for _ in range(NODES)]
    for low, high in sorted(tuple(sorted(edge)) for edge in edges):
        before[high].append(low)
        after[low].append(high)
    return before, after


def forward(seed: int, sizes: tuple[int, ...]) -> Graph:
    before, after = wiring(seed)
    rng, b = random.Random(seed), Builder()
    x, out = b.storage(16, held=True), []
    for node in range(NODES):
        out.append(b.op(tuple(out[n] for n in before[node]) or (x,), rng.choice(sizes)))
    return b.build(outputs=tuple(out[n] for n in range(NODES) if not after[n]))


def mirrored(seed: int, sizes: tuple[int, ...]) -> Graph:
    """Each node sums up its inputs, which its backward needs, and computes from the sum."""
    before, after = wiring(seed)
    rng, b = random.Random(seed), Builder()
    nbytes = [rng.choice(sizes) for _ in range(NODES)]
    x, kept, out = b.storage(16, held=True), [], []
    for node in range(NODES):
        kept.append(b.op(tuple(out[n] for n in before[node]) or (x,), nbytes[node]))
        out.append(b.op((kept[node],), nbytes[node]))
    loss = b.op(tuple(out[n] for n in range(NODES) if not after[n]), 1)
    grads: dict[int, int] = {}
    for node in reversed(range(NODES)):
        total = b.op(tuple(grads[n] for n in after[node]) or (loss,), nbytes[node], backward=True)
        grads[node] = b.op((total, kept[node]), nbytes[node], backward=True)
    return b.build(outputs=(loss, *(grads[n] for n in range(NODES) if not before[n])))


def mirrored_by_edges(seed: int, sizes: tuple[int, ...]) -> Graph:
    """Each node's backward makes one gradient for each of its inputs, and each producer sums up its gradients."""
    before, after = wiring(seed)
    rng, b = random.Random(seed), Builder()
    nbytes = [rng.choice(sizes) for _ in range(NODES)]
    x, out, ends = b.storage(16, held=True), [], []
    for node in range(NODES):
        out.append(b.op(tuple(out[n] for n in before[node]) or (x,), nbytes[node]))
    loss = b.op(tuple(out[n] for n in range(NODES) if not after[n]), 1)
    grads: list[list[int]] = [[] for _ in range(NODES)]
    for node in reversed(range(NODES)):
        total = b.op(tuple(grads[node]) or (loss,), nbytes[node], backward=True)
        inputs = before[node]
        reads = (total, out[node], *(out[n] for n in inputs))
        made = b.op(reads, tuple(nbytes[n] for n in inputs), backward=True) if inputs else ()
        ends += [] if inputs else [total]
        for n, grad in zip(inputs, made, strict=True):
            grads[n].append(grad)
    return b.build(outputs=(loss, *ends))


def annealed_bytes(graph: Graph, steps: int) -> int:
    """The least peak that simulated annealing finds from the source order, by moving one operation at a time."""
    live, rng = liveness(graph), random.Random(0)

    def cost(order: list[int]) -> float:
        alive = profile(live, order)
        return max(alive) + alive.count(max(alive)) / len(alive)

    order = list(range(len(graph)))
    now = best = cost(order)
    for step in range(steps):
        heat = 8.0 * 0.006 ** (step / steps)
        at = rng.randrange(len(order))
        place = {op: i for i, op in enumerate(order)}
        low = max((place[o] for o in graph.predecessors[order[at]]), default=-1) + 1
        high = min((place[o] for o in graph.successors[order[at]]), default=len(order)) - 1
        moved = order[:at] + order[at + 1 :]
        moved.insert(rng.randint(low, high), order[at])
        found = cost(moved)
        if found <= now or rng.random() < math.exp((now - found) / heat):
            order, now = moved, found
            best = min(best, now)
    return math.floor(best)
