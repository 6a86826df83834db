"""Convolutions and pools differentiated by PyTorch's kernels, with an argument's gradient separate from parameters'.

Thunder differentiates a convolution by two more convolutions, of flipped, padded and transposed copies. PyTorch's
single backward makes all gradients while the argument is alive. With separate kernels, the argument may die before its
own gradient exists. An average pool, which Thunder makes a convolution of, is PyTorch's own, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
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
    _put_gradients(out, a, weight, bias, geometry)
    return out


def _put_gradients(
    out: TensorProxy, a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, geometry: tuple[Any, ...]
) -> None:
    grad, mask = get_grad(out), (True, bias is not None)
    put_asked((weight, bias), mask, _parameters(grad, a, weight, *geometry, mask))
    put_grad(a, _argument(grad, weight, tuple(a.shape), *geometry))


register(prims.convolution, _is_supported, _differentiate, mem_gradients_ex)


def _of_dims(n: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A number for each dim of a window, of which one may stand for all."""
    return (n,) * dims if isinstance(n, int) else tuple(n) * (dims // len(n))


def _register_transposed(function: Callable[..., Any], dims: int) -> None:
    """Let `F.conv_transpose1d` and its like have these gradients; Thunder runs them once more, as a whole."""
    operation: Symbol = ltorch._torch_to_thunder_function_map[function]

    def differentiate(
        a: TensorProxy,
        weight: TensorProxy,
        bias: TensorProxy | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> TensorProxy:
        out = operation(a, weight, bias, stride, padding, output_padding, groups, dilation)
        stride, padding, dilation, output_padding = (
            _of_dims(n, dims) for n in (stride, padding, dilation, output_padding)
        )
        geometry = stride, padding, dilation, True, output_padding, groups
        _put_gradients(out, a, weight, bias, geometry)
        return out

    def is_supported(a: Any, weight: Any, bias: Any = None, *geometry: Any, **named: Any) -> bool:
        return a.ndim == dims + 2 and _is_supported(a, weight, bias, *geometry, *named.values())

    register(operation, is_supported, differentiate, mem_gradients_ex)


for _dims, _function in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
    _register_transposed(_function, _dims)


def _register_pool(operation: Symbol, function: Callable[..., Any], dims: int) -> None:
    """Let PyTorch's kernels run an average pool, and its gradient; of one dim it is one of two, as in PyTorch."""
    backward: Any = getattr(torch.ops.aten, f"avg_pool{max(dims, 2)}d_backward").default

    def meta(a: TensorProxy, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], _: Any) -> TensorProxy:
        planes = zip(a.shape[-dims:], size, stride, padding, strict=True)
        shape = (*a.shape[:-dims], *((n + 2 * pad - k) // step + 1 for n, k, step, pad in planes))
        return TensorProxy(like=a, shape=shape)

    def pool(a: torch.Tensor, size: Any, stride: Any, padding: Any, divisor: int | None) -> torch.Tensor:
        return function(a, size, stride, padding, **({} if dims == 1 else {"divisor_override": divisor}))

    def gradient_meta(grad: TensorProxy, a: TensorProxy, *_: Any) -> TensorProxy:
        return TensorProxy(like=a, requires_grad=False)

    def gradient(
        grad: torch.Tensor, a: torch.Tensor, size: Any, stride: Any, padding: Any, divisor: int | None
    ) -> torch.Tensor:
        if dims > 1:
            return backward(grad, a, size, stride, padding, False, True, divisor)
        grad, a = grad.unsqueeze(-2), a.unsqueeze(-2)
        return backward(grad, a, (1, *size), (1, *stride), (0, *padding), False, True, None).squeeze(-2)

    forward = mem_gradients_ex.register_operator(f"mem_{operation.name}", meta=meta, fn=pool)
    of_a = mem_gradients_ex.register_operator(f"mem_{operation.name}_backward", meta=gradient_meta, fn=gradient)

    def windows(
        a: TensorProxy,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> tuple[Any, ...]:
        stride = kernel_size if stride is None or stride == () or stride == [] else stride
        return *(_of_dims(n, dims) for n in (kernel_size, stride, padding)), divisor_override

    def run(a: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
        return forward(a, *windows(a, *args, **kwargs))

    def differentiate(a: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
        geometry = windows(a, *args, **kwargs)
        out = forward(a, *geometry)
        put_grad(a, of_a(get_grad(out), a, *geometry))
        return out

    def is_supported(a: Any, *args: Any, **kwargs: Any) -> bool:
        *sizes, divisor = windows(a, *args, **kwargs)
        known = all(isinstance(n, int) for part in sizes for n in part) and isinstance(divisor, int | None)
        return known and is_float(a) and a.ndim in (dims + 1, dims + 2)

    mem_gradients_ex.register_implementation(
        operation, checker=is_supported, execution_transform=run, grad_transform=differentiate
    )


_register_pool(ltorch.avg_pool1d, F.avg_pool1d, 1)
_register_pool(ltorch.avg_pool2d, F.avg_pool2d, 2)
_register_pool(ltorch.avg_pool3d, F.avg_pool3d, 3)
