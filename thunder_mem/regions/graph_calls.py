"""Calls that passes add to the graph of a region."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["add_call"]


def add_call(graph: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call at the graph's insertion point, with its example value, which the mode of the operands' values makes.

    Args:
        graph: the graph, whose nodes have example values.
        target: the operation.
        args, kwargs: its arguments; nodes may be in lists.
    """
    node = graph.graph.call_function(target, args, kwargs)
    given, named = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*given, **named)
    return node
