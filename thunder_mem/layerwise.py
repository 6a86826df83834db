"""Full recomputation layer by layer: each layer keeps what it hands on, the rest is computed again."""

from __future__ import annotations

from thunder_mem.choices import Choices, RecomputeError
from thunder_mem.origins import origin_of
from thunder_mem.recompute import why_not_again
from thunder_mem.trace_graph import TraceGraph

__all__ = ["layerwise_choices"]


def layerwise_choices(source: TraceGraph) -> Choices:
    """The choices that checkpoint every layer of the model.

    The layers are those that `origins.name_origins` finds: parameters whose names differ in nothing but a
    number. What one layer makes and another, or none, uses is kept; whatever else a layer makes is
    offered, so that the minimum cut rebuilds it from there, apart from what must not be repeated.

    Raises:
        RecomputeError: the program has no layers.
    """
    graph = source.graph
    layer: list[int | None] = []
    for bsym in source.bsyms:
        origin = origin_of(bsym)
        layer.append(None if origin is None else origin.layer)
    if all(number is None for number in layer):
        raise RecomputeError(
            '"layerwise" finds no layers here: it goes by modules whose parameters\' names differ in nothing but a '
            "number, such as h.0.mlp.weight and h.1.mlp.weight"
        )
    handed_on, inside = set(), set()
    for op in graph.ops:
        if op.backward or layer[op.index] is None:
            continue
        for s in op.allocates:
            readers = {layer[u] for u in graph.users[s] if not graph.ops[u].backward}
            if readers - {layer[op.index]}:
                handed_on.add(s)
            elif why_not_again(source, op.index) is None:
                inside.add(s)
    return Choices(keep=frozenset(handed_on), offered=frozenset(inside))
