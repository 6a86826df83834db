"""Orders of a graph that a user's own sort might return."""

from __future__ import annotations

from random import Random

from thunder_mem.memory.graph import Graph

__all__ = ["at_random", "latest_first", "random_order"]


def latest_first(graph: Graph) -> list[int]:
    """Depth first from the latest: the example of a sort of one's own in `docs/guides/sorting.md`."""
    order, waiting = [], [len(before) for before in graph.predecessors]
    ready = [op for op, count in enumerate(waiting) if not count]
    while ready:
        order.append(ready.pop())
        for after in graph.successors[order[-1]]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return order


def random_order(graph: Graph, rng: Random) -> list[int]:
    """A legal order of the ops, drawn step by step."""
    waits = [len(p) for p in graph.predecessors]
    ready = [op for op, count in enumerate(waits) if not count]
    order = []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for after in graph.successors[order[-1]]:
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return order


def at_random(graph: Graph) -> list[int]:
    """A legal order, always the same for the same graph."""
    return random_order(graph, Random(len(graph)))
