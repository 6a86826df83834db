"""The gradients that autograd's formulas scatter into their own zeros.

The gradient of an index, `gather`, `topk` and others is a tensor of zeros, into which PyTorch scatters in place. For
tensor subclasses such as fake tensors it scatters into a copy instead (`isTensorSubclassLike` in PyTorch's
`FunctionsManual.cpp`).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from thunder_mem.fake_execution.autograd_sums import EngineSums

__all__ = ["plain_form"]

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.put.default: _aten.put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
# The nodes whose formulas scatter so. Others, such as that of `scatter_reduce`, scatter into a copy for all tensors.
_NODES = re.compile(
    "(Index|UnsafeIndex|IndexSelect|Gather|Take|Topk|Sort|Max|Min|Median|Nanmedian|Mode|Kthvalue|Cummax|Cummin)"
    "Backward[0-9]"
)


def plain_form(func: Any, args: tuple, sums: EngineSums) -> Any:
    """The operator that runs for plain tensors where `func` runs for fake ones.

    Args:
        func: an operator.
        args: its arguments.
        sums: knows which tensors autograd's present node has made, such as a formula's zeros.
    """
    if func not in _IN_PLACE or torch.is_grad_enabled():
        return func  # with gradients on, a checkpoint runs again inside the node
    node = torch._C._current_autograd_node()
    if node is None or not _NODES.fullmatch(node.name()) or not sums.is_of_node(args[0]):
        return func
    return _IN_PLACE[func]
