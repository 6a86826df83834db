"""Full recomputation layer by layer: each layer keeps the values that it passes on and recomputes the rest."""

from __future__ import annotations

from thunder_mem.partition.constraints import Constraints, RecomputeError
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.origins import origin_of
from thunder_mem.trace.reading import TraceGraph

__all__ = ["handed_between_layers", "layerwise_choices"]


def layerwise_choices(source: TraceGraph) -> Constraints:
    """The choices that checkpoint every layer of the model.

    The layers are those of `origins.name_origins`: parameters whose names differ only in a number. Values that one
    layer makes and that are used outside it are kept. A layer's other values are offered, so that the minimum cut
    recomputes them, except those that must not be repeated.

    Raises:
        RecomputeError: the program has no layers.
    """
    layer = _layers(source)
    if all(number is None for number in layer):
        raise RecomputeError(
            '"layerwise" finds no layers here: it needs modules whose parameters\' names differ only in a number, '
            "such as h.0.mlp.weight and h.1.mlp.weight"
        )
    handed_on = handed_between_layers(source)
    inside = {
        s
        for op in source.graph.ops
        if not op.backward and layer[op.index] is not None and recompute_obstacle(source, op.index) is None
        for s in op.allocates
    }
    return Constraints(must_save=handed_on, may_recompute=frozenset(inside - handed_on))


def handed_between_layers(source: TraceGraph) -> frozenset[int]:
    """The forward's storages that one layer makes and that are read outside it."""
    graph, layer = source.graph, _layers(source)
    found: set[int] = set()
    for op in graph.ops:
        if op.backward or layer[op.index] is None:
            continue
        for s in op.allocates:
            if {layer[u] for u in graph.users[s] if not graph.ops[u].backward} - {layer[op.index]}:
                found.add(s)
    return frozenset(found)


def _layers(source: TraceGraph) -> list[int | None]:
    """Per op, the number of its layer."""
    origins = [origin_of(bsym) for bsym in source.bsyms]
    return [None if origin is None else origin.layer for origin in origins]
