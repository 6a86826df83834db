"""Numbers that code reads from tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FRACTION", "FakeNumbers", "number_in"]

FRACTION = 0.5
"""A number of which nothing is known: one that neither overflows nor divides by zero if 1 is subtracted."""


class FakeNumbers(TorchDispatchMode):
    """Lets code read a number from a fake or meta tensor, as an optimizer does from a count of steps.

    Args:
        fraction: the number in a tensor of floating-point numbers, of which nothing is known.
    """

    def __init__(self, fraction: float = FRACTION) -> None:
        super().__init__()
        self.fraction = fraction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (isinstance(args[0], FakeTensor) or args[0].is_meta):
            return number_in(args[0], self.fraction)
        return func(*args, **(kwargs or {}))


def number_in(t: torch.Tensor, fraction: float) -> float | int:
    """A number for a tensor without data.

    Args:
        t: the tensor, of one element.
        fraction: the number, if the tensor is not of integers.
    """
    return fraction if t.dtype.is_floating_point else 1
