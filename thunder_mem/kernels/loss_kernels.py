"""The negative log likelihood by PyTorch's kernel.

Thunder's decomposition negates the log probabilities (B, V) and pads them by one class for ignored targets, so it holds
two copies of them. The kernel reads one value of each row.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad

from thunder_mem.kernels.kernel_executor import has_dtype_of, is_float, mem_kernels_ex, register

__all__: list[str] = []

_aten = torch.ops.aten
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _forward_meta(
    a: TensorProxy, target: TensorProxy, weight: TensorProxy | None, reduction: int, ignore_index: int
) -> tuple[TensorProxy, TensorProxy]:
    def of_shape(*shape: int) -> TensorProxy:
        return TensorProxy(shape=shape, dtype=a.dtype, device=a.device, requires_grad=False)

    return of_shape(*(() if reduction else target.shape)), of_shape()


def _backward_meta(grad: TensorProxy, a: TensorProxy, *_: Any) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


_forward = mem_kernels_ex.register_operator("mem_nll_loss", meta=_forward_meta, fn=_aten.nll_loss_forward.default)
_backward = mem_kernels_ex.register_operator(
    "mem_nll_loss_backward", meta=_backward_meta, fn=_aten.nll_loss_backward.default
)


def _is_nll_loss(a: Any, target: Any, weight: Any = None, ignore_index: Any = -100, reduction: Any = "mean") -> bool:
    """Whether it is a loss of rows (B, V) or of one row (V,), with targets (B,) or ()."""
    if not is_float(a) or a.ndim > 2 or type(target) is not TensorProxy or not has_dtype_of(a, weight):
        return False
    of_classes = dtypes.to_strong_dtype(target.dtype) is dtypes.int64 and target.device == a.device
    return of_classes and tuple(target.shape) == tuple(a.shape[:-1]) and type(ignore_index) is int


def _differentiate_nll_loss(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> TensorProxy:
    known = weight, _REDUCTIONS[reduction], ignore_index
    out, total_weight = _forward(a, target, *known)
    put_grad(a, _backward(get_grad(out), a, target, *known, total_weight))
    return out


register(ltorch.nll_loss, _is_nll_loss, _differentiate_nll_loss)
