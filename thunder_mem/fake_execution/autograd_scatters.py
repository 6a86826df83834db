"""The gradients that autograd's formulas scatter into their own zeros.

The gradient of an index, `gather`, `topk` and others is a tensor of zeros, into which PyTorch scatters in place. For
tensor subclasses such as fake tensors it scatters into a copy instead (`isTensorSubclassLike` in PyTorch's
`FunctionsManual.cpp`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

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


def plain_form(func: Any, args: tuple, sums: EngineSums) -> Any:
    """The operator that runs for plain tensors where `func` runs for fake ones.

    Args:
        func: an operator.
        args: its arguments.
        sums: knows autograd's present node, whose own tensors are those that a formula scatters into. A formula that
            scatters into the gradient it is given, such as that of `scatter`, always copies it.
    """
    if func not in _IN_PLACE or torch._C._current_graph_task_id() == -1:
        return func
    node = torch._C._current_autograd_node()
    if node is None or isinstance(node, BackwardCFunction) or not sums.is_of_node(args[0]):
        return func
    return _IN_PLACE[func]
