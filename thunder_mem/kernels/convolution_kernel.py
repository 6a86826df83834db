"""Convolutions differentiated by PyTorch's kernels, with the argument's gradient separate from the parameters'.

Thunder differentiates a convolution by two more convolutions, of flipped, padded and transposed copies. PyTorch's
single backward makes all gradients while the argument is alive. With separate kernels, the argument may die before its
own gradient exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for, suggest_memory_format

from thunder_mem.kernels.kernel_executor import (
    has_dtype_of,
    is_float,
    mem_gradients_ex,
    put_asked,
    register,
    register_several,
)

__all__: list[str] = []

_backward = torch.ops.aten.convolution_backward.default


def _argument_meta(grad: TensorProxy, weight: TensorProxy, shape: Sequence[int], *geometry: Any) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), dtype=grad.dtype, device=grad.device, requires_grad=False)


def _argument_gradient(grad: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], *geometry: Any) -> torch.Tensor:
    return _backward(grad, _of_shape(tuple(shape), grad, weight), weight, None, *geometry, (True, False, False))[0]


def _of_shape(shape: tuple[int, ...], grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor of which the kernel only reads the shape; it uses the gradient's memory if that is large enough."""
    last = len(shape) in (4, 5) and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=suggest_memory_format(t)) for t in (grad, weight)
    )
    strides = make_channels_last_strides_for(shape) if last else make_contiguous_strides_for(shape)
    room = grad.untyped_storage().nbytes() // grad.itemsize - grad.storage_offset()
    return grad.as_strided(shape, strides) if prod(shape) <= room else grad.new_empty(1).expand(shape)


def _parameters_meta(
    grad: TensorProxy, a: TensorProxy, weight: TensorProxy, *geometry: Any
) -> tuple[TensorProxy, TensorProxy]:
    bias = TensorProxy(shape=(grad.shape[1],), dtype=grad.dtype, device=grad.device, requires_grad=False)
    return TensorProxy(like=weight, requires_grad=False), bias


def _parameter_gradients(grad: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> Sequence[Any]:
    *geometry, mask = geometry  # type: ignore[assignment]
    return _backward(grad, a, weight, [grad.shape[1]], *geometry, (False, *mask))[1:]


_argument = mem_gradients_ex.register_operator("mem_convolution_backward", meta=_argument_meta, fn=_argument_gradient)
_parameters = register_several(
    "mem_convolution_weight_backward", _parameters_meta, _parameter_gradients, mem_gradients_ex
)


def _is_supported(a: Any, weight: Any, bias: Any, *geometry: Any) -> bool:
    sizes = [n for part in geometry for n in (part if isinstance(part, list | tuple) else (part,))]
    return is_float(a) and is_float(weight) and has_dtype_of(a, weight, bias) and all(isinstance(n, int) for n in sizes)


def _differentiate(
    a: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> TensorProxy:
    geometry = tuple(stride), tuple(padding), tuple(dilation), bool(transposed), tuple(output_padding), groups
    out = prims.convolution(a, weight, bias, *geometry)
    grad, mask = get_grad(out), (True, bias is not None)
    put_asked((weight, bias), mask, _parameters(grad, a, weight, *geometry, mask))
    put_grad(a, _argument(grad, weight, tuple(a.shape), *geometry))
    return out


register(prims.convolution, _is_supported, _differentiate, mem_gradients_ex)
