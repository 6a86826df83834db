"""Gradients over operands in a graph: what `rewrites/gradients_over_operands.py` does to a trace.

A trial on the graph costs far less than rewriting and reading the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thunder_mem.memory.graph import Graph, Op
from thunder_mem.memory.shared_storages import with_shared_storages
from thunder_mem.partition.recompute_on_graph import WithRecompute

__all__ = ["Overwritable", "overwrite_operands"]


@dataclass(frozen=True)
class Overwritable:
    """The operands over which an operation of the backward may write their gradients.

    Attributes:
        gradients: the gradient's storage, by the operand's.
        from_forward: operands that the forward made are among them; else only those that the backward makes again.
    """

    gradients: Mapping[int, int]
    from_forward: bool


def overwrite_operands(repeated: WithRecompute, old: Graph, over: Mapping[int, Overwritable]) -> WithRecompute:
    """The graph with such gradients over operands that no later operation reads.

    Args:
        repeated: the graph with all recomputation and offload.
        old: the graph without them.
        over: by the operation of `old`.
    """
    graph = repeated.graph
    into: dict[int, int] = {}  # a gradient -> the operand that it overwrites
    for op in graph.ops:
        found = over.get(repeated.source[op.index]) if op.backward else None
        if found is not None:
            reads = dict(zip(old.ops[repeated.source[op.index]].reads, op.reads, strict=True))
            pairs = ((reads[operand], gradient) for operand, gradient in found.gradients.items())
            into |= {g: s for s, g in pairs if _dies_in(graph, s, op, found.from_forward)}
    return replace(repeated, graph=with_shared_storages(graph, into)) if into else repeated


def _dies_in(graph: Graph, s: int, op: Op, from_forward: bool) -> bool:
    maker = graph.allocator[s]
    if maker is None or s in graph.outputs or not (from_forward or graph.ops[maker].backward):
        return False
    return set(graph.users[s]) - {op.index} <= graph.ancestors(op.index)
