"""Values that a region on CUDA recomputes in each loop, instead of keeping them between two kernels.

Inductor stores a value with more than 30 operations or several reads. If all loops index the value alike, they run as
one kernel and the store vanishes. If a reader permutes, cuts or concatenates, as the gradient of rotary embeddings
does, the value stays in memory, in float32. That was 537 MB in the backward of longchat-7b-16k, and more than twice the
traffic. So a region stores only what it must, unless that makes it much longer: each reader recomputes a value that is
not stored, which doubles the work with each level of a diamond.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["evaluations", "inlining_options"]

# The largest region of the benchmark's models takes 363; far beyond, Inductor itself takes long.
_MOST_EVALUATIONS = 2_000

_STORED = ("sum", "amax", "amin", "prod", "var", "var_mean", "copy_", "inductor_force_stride_order")


def inlining_options(graph: GraphModule) -> dict[str, Any]:
    """Inductor's options for a graph on CUDA; none elsewhere, or if inlining would make the graph much longer."""
    on_cuda = any(_device(node) == "cuda" for node in graph.graph.nodes)
    if not on_cuda or evaluations(graph) > _MOST_EVALUATIONS:
        return {}
    return {
        "realize_opcount_threshold": _MOST_EVALUATIONS,
        "realize_reads_threshold": _MOST_EVALUATIONS,
        "realize_acc_reads_threshold": _MOST_EVALUATIONS,
    }


def evaluations(graph: GraphModule) -> int:
    """The number of operations if each reader recomputes every value, element by element.

    Results of reductions and values written to memory exist already.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def diamonds(x):
        ...     for _ in range(10):
        ...         x = x.sin() + x.cos()
        ...     return x
        >>> evaluations(make_fx(diamonds, tracing_mode="fake")(torch.ones(2)))
        3069
    """
    calls: dict[Node, int] = {}
    total = 0
    for node in graph.graph.nodes:
        calls[node] = 0 if node.op in ("placeholder", "get_attr") else 1 + sum(calls[a] for a in _operands(node))
        if node.op == "output":
            return total + calls[node] - 1
        if _name(node) in _STORED:
            total, calls[node] = total + calls[node], 0
    return total


def _operands(node: Node) -> list[Node]:
    """Its operands, with repetitions."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _name(node: Node) -> str:
    return getattr(node.target, "_opname", "")


def _device(node: Node) -> str:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else ""
