"""Sums over many rows inside a compiled region, in two levels, so that they are as exact as eager's.

On a CPU, Inductor adds up to 4,096 rows one after the other, where eager PyTorch adds in a tree (pairwise summation;
Higham 1993). The gradient of a bias in float32 was up to 8 times less exact. So a sum over rows becomes sums over
stretches of about the square root of their number, and a sum over these. The error then grows with the fourth root of
the number, and the stretches' sums take little memory. A sum that is rounded to 16 bits afterwards shows no difference
and stays whole. So does a sum along the last dim, which vector lanes share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from thunder_mem.regions.graph_calls import add_call

__all__ = ["split_long_sums"]

_SUM = torch.ops.aten.sum.dim_IntList
_LEAST_ROWS = 64
_HALVES = (torch.float16, torch.bfloat16)


def split_long_sums(graph: GraphModule) -> None:
    """Rewrite, in place, the float32 sums over at least 64 rows of a graph whose nodes have example values.

    Example:
        >>> from torch._subclasses.fake_tensor import FakeTensorMode
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: x.sum(0), tracing_mode="fake")(torch.ones(256, 3))
        >>> split_long_sums(graph)
        >>> [n.args[1] for n in graph.graph.nodes if n.op == "call_function"]
        [[16, 16, 3], [1], [0]]
    """
    for node in list(graph.graph.nodes):
        if node.target is _SUM and (stretch := _stretch(node)):
            _split(graph, node, *stretch)
    graph.graph.lint()
    graph.recompile()


def _dims(node: Node) -> list[int]:
    ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    return sorted(d % ndim for d in dims) if dims else list(range(ndim))


def _stretch(node: Node) -> tuple[int, int] | None:
    """The dim to cut and the length of its pieces; None if the sum stays whole."""
    x, out = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if x.dtype != torch.float32 or out.dtype != torch.float32 or x.device.type != "cpu" or not x.numel():
        return None
    dims = _dims(node)
    if x.ndim - 1 in dims or all(_rounds(user) for user in node.users):
        return None
    rows = math.prod(x.shape[d] for d in dims)
    if rows < _LEAST_ROWS:
        return None
    dim = max(dims, key=lambda d: x.shape[d])
    wanted = math.isqrt(rows)
    pieces = [n for n in range(2, 4 * wanted) if x.shape[dim] % n == 0]
    if not pieces:
        return None
    length = min(pieces, key=lambda n: abs(math.log(n / wanted)))
    return dim, length


def _rounds(user: Node) -> bool:
    value = user.meta.get("val")
    return user.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype in _HALVES


def _split(graph: GraphModule, node: Node, dim: int, length: int) -> None:
    x, shape, dims = node.args[0], list(node.args[0].meta["val"].shape), _dims(node)  # type: ignore[union-attr]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    cut = [*shape[:dim], shape[dim] // length, length, *shape[dim + 1 :]]

    with node.meta["val"].fake_mode, graph.graph.inserting_before(node):
        stretches = add_call(graph, _SUM, add_call(graph, torch.ops.aten.view.default, x, cut), [dim + 1])
        whole = add_call(graph, _SUM, stretches, dims, *([True] if keep else []))
    node.replace_all_uses_with(whole)
    graph.graph.erase_node(node)
