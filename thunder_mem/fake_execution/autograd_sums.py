"""The sums of gradients that autograd's engine makes in place.

Where two gradients meet, the engine adds the second to the first in place if nobody else holds the first
(`InputBuffer::accumulate` in PyTorch's `torch/csrc/autograd/input_buffer.cpp`). It never does so for tensor subclasses
such as fake tensors. This module finds out what the engine would do with plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_mem.fake_execution.replay import Ledger

__all__ = ["EngineSums"]


class EngineSums:
    """Recognises the engine's own sums among the operators that run in a backward.

    The engine adds while no operator of a node runs, but nothing reports that. Two facts distinguish its sums
    from a node's own. Only the engine holds the first operand. And the operand is older than the present node, or
    this node passes two results to the same place.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._holders: tuple[int, int] | None = None
        self._node: object = None
        self._since = 0
        self.learning = False

    def learn(self) -> None:
        """Let the engine make such a sum, to count the holders of its operands in the present setting."""
        if not hasattr(torch.Tensor, "_use_count"):
            return  # an older PyTorch: every sum counts as a new tensor
        self.learning = True
        try:
            x = torch.zeros(2, device="cpu", requires_grad=True)
            with torch.enable_grad():
                y = x.sin() + x.cos()
            y.backward(torch.zeros(2, device="cpu"))
        finally:
            self.learning = False

    def enter_node(self) -> None:
        """Note that operators from now on belong to another node."""
        node = torch._C._current_autograd_node()
        key = None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())
        if key != self._node:
            self._node, self._since = key, len(self._ledger.events)

    def is_of_node(self, t: torch.Tensor) -> bool:
        """Whether an operator of the present node has made a tensor's memory."""
        block = self._ledger.block_of(t)
        return block is not None and block.born >= self._since

    def in_place(self, func: Any, args: Any) -> bool:
        """Whether the engine makes this sum in place, into `args[0]`, for plain tensors."""
        if torch._C._current_graph_task_id() == -1:
            return False
        self.enter_node()
        if func is not torch.ops.aten.add.Tensor or len(args) != 2:
            return False
        if not all(isinstance(t, torch.Tensor) for t in args) or args[0] is args[1]:
            return False
        holders = (args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata))
        if self.learning:
            self._holders = holders
            return False
        if holders != self._holders or not torch.ops.aten.is_non_overlapping_and_dense.default(args[0]):
            return False
        older = self._ledger.block_of(args[0]) is not None and not self.is_of_node(args[0])
        return older or _meets_itself(torch._C._current_autograd_node())


def _meets_itself(node: Any) -> bool:
    """Whether two results of a node go to the same place."""
    places = []
    for fn, index in getattr(node, "next_functions", ()):
        if fn is not None:
            variable = getattr(fn, "variable", None)
            places.append((fn._sequence_nr() if variable is None else id(variable), index))
    return len(set(places)) < len(places)
