"""The results of a compiled region: whole tensors, of which its caller takes views, and masks as bytes.

A view that a region returns shares memory with its base, as in eager. Inductor 2.11 alone returns a view of a
non-contiguous result as a copy, and an expanded view at full size. So the region returns the base.

On a CPU, Inductor stores a vector of booleans element by element: a mask of 8 x 12 x 128 x 128 random numbers took
13 ms, and 0.2 ms as bytes of 0 and 1 (one thread, AVX-512). Both have the same bytes, so the region returns bytes and
its caller reinterprets them as booleans, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from thunder_mem.regions.graph_calls import add_call

__all__ = ["Finish", "return_whole_results"]

_WRITE = torch.ops.aten.copy_.default
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, slots=True)
class Finish:
    """How to take an output from the compiled region's result, without a copy.

    Attributes:
        mask: whether bytes of 0 and 1 are reinterpreted as booleans.
        view: shape, strides and offset; None for the whole.
    """

    mask: bool
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def __call__(self, returned: Tensor) -> Tensor:
        whole = returned.view(torch.bool) if self.mask else returned
        if self.view is None:
            return whole
        shape, strides, before = self.view
        # Concatenated values lie within the result.
        return whole.as_strided(shape, strides, whole.storage_offset() + before)


def return_whole_results(graph: GraphModule) -> dict[int, Finish]:
    """Rewrite, in place, the results of a graph whose nodes have example values; return how to finish each output.

    Outputs that are views of an input, or of a result in another dtype or conjugated, stay unchanged. So do masks in
    a graph that writes over its inputs: they must exist before the write, and bytes would be additional memory.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: ((x < 0)[1:], x.exp()), tracing_mode="fake")(torch.ones(3))
        >>> finishes = return_whole_results(graph)
        >>> (returned, _) = graph(torch.tensor([-1.0, 2.0, -3.0]))
        >>> returned, finishes[0](returned)
        (tensor([1, 0, 1], dtype=torch.uint8), tensor([False,  True]))
    """
    returned = graph.graph.output_node()
    outputs: list[Node] = list(returned.args[0])  # type: ignore[arg-type]
    writes = any(node.target is _WRITE for node in graph.graph.nodes)
    makers: dict[int, Node] = {}  # per memory, the node that makes it
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            makers.setdefault(_memory(node), node)
    finishes = {}
    as_bytes: dict[Node, Node] = {}
    for i, node in enumerate(outputs):
        whole, value = makers[_memory(node)], node.meta["val"]
        if whole.op == "placeholder" or _kind(value) != _kind(whole.meta["val"]):
            continue
        mask = value.dtype == torch.bool and value.device.type == "cpu" and not writes
        view = None if whole is node else (tuple(value.shape), value.stride(), value.storage_offset())
        if mask and whole not in as_bytes:
            as_bytes[whole] = _as_bytes(graph, whole, before=returned)
        outputs[i] = as_bytes[whole] if mask else whole
        if mask or view:
            finishes[i] = Finish(mask, view)
    returned.args = (tuple(outputs),)
    graph.graph.lint()
    graph.recompile()
    return finishes


def _as_bytes(graph: GraphModule, mask: Node, before: Node) -> Node:
    """Convert through float32, because Inductor also converts directly from masks to bytes element by element."""
    for dtype in (torch.float32, torch.uint8):
        with mask.meta["val"].fake_mode, graph.graph.inserting_before(before):
            mask = add_call(graph, _CONVERT, mask, dtype)
    return mask


def _kind(t: Tensor) -> tuple[torch.dtype, bool, bool]:
    return t.dtype, t.is_conj(), t.is_neg()


def _memory(node: Node) -> int:
    value: Tensor = node.meta["val"]
    return value.untyped_storage()._cdata
