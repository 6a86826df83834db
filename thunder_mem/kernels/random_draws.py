"""Random numbers as PyTorch's own functions draw them, as operations of a trace.

A function that draws inside and is differentiated as a whole draws once more in the backward: its gradient belongs to
other numbers. Written out with these operations it draws once, and in the order of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.devices import Device, to_device, to_torch_device
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor

__all__ = ["bernoulli", "exponential", "filled", "permutation"]

mem_random_ex = OperatorExecutor("mem_random", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""


def _filled_meta(method: str, shape: Sequence[int], device: Any, dtype: Any, numbers: tuple[Any, ...]) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=to_device(device), dtype=dtypes.to_dtype(dtype), requires_grad=False)


def _filled(method: str, shape: Sequence[int], device: Any, dtype: Any, numbers: tuple[Any, ...]) -> torch.Tensor:
    empty = torch.empty(shape, dtype=dtypes.to_torch_dtype(dtype), device=_of_torch(device))
    return getattr(empty, method)(*numbers)


def _permutation_meta(n: int, device: Any, dtype: Any) -> TensorProxy:
    return TensorProxy(shape=(n,), device=to_device(device), dtype=dtypes.to_dtype(dtype), requires_grad=False)


def _permutation(n: int, device: Any, dtype: Any) -> torch.Tensor:
    return torch.randperm(n, dtype=dtypes.to_torch_dtype(dtype), device=_of_torch(device))


def _of_torch(device: Any) -> torch.device:
    return to_torch_device(device) if isinstance(device, Device) else torch.device(device)


filled = mem_random_ex.register_operator("mem_filled", meta=_filled_meta, fn=_filled, tags=[OpTags.RANDOM_OP])
"""`filled(method, shape, device, dtype, numbers)`: what a method such as `normal_` draws with these numbers."""


def bernoulli(shape: Sequence[int], p: float, device: Any) -> TensorProxy:
    """Booleans that are true with probability `p`."""
    return filled("bernoulli_", tuple(shape), device, torch.bool, (p,))


def exponential(shape: Sequence[int], device: Any, dtype: Any) -> TensorProxy:
    """Numbers with the density exp(-x)."""
    return filled("exponential_", tuple(shape), device, dtype, ())


permutation = mem_random_ex.register_operator(
    "mem_permutation", meta=_permutation_meta, fn=_permutation, tags=[OpTags.RANDOM_OP]
)
"""`permutation(n, device, dtype)`: the numbers below n in random order."""
