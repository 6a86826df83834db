"""Layer norm, group norm and batch norm by PyTorch's kernels, which keep their argument and its statistics.

Shapes: layer norm keeps a mean and a reciprocal standard deviation per row, group norm of a (B, C, ...) per group
(B, G), batch norm per channel (C,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad

from thunder_mem.kernels.kernel_executor import (
    Mask,
    has_dtype_of,
    is_float,
    is_number,
    mem_kernels_ex,
    put_asked,
    register,
    register_several,
)

__all__ = ["batch_norm_training"]

_aten = torch.ops.aten
_Maybe: TypeAlias = TensorProxy | None


def _like(a: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


def _of_shape(a: TensorProxy, *shape: int) -> TensorProxy:
    return TensorProxy(shape=shape, dtype=a.dtype, device=a.device, requires_grad=False)


def _statistic(a: TensorProxy, *shape: int) -> TensorProxy:
    """A statistic, in the dtype of `a` on a CPU, in that of its accumulator on a GPU."""
    on_cpu = a.device.devicetype is DeviceType.CPU
    wide = a.dtype if on_cpu or dtypes.to_strong_dtype(a.dtype) is dtypes.float64 else dtypes.float32
    return TensorProxy(shape=shape, dtype=wide, device=a.device, requires_grad=False)


def _mask(weight: Any, bias: Any) -> Mask:
    return True, weight is not None, bias is not None


def _layer_norm_meta(
    a: TensorProxy, shape: Sequence[int], weight: _Maybe, bias: _Maybe, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    rows = (*a.shape[: -len(shape)], *(1 for _ in shape))
    return _like(a), _statistic(a, *rows), _statistic(a, *rows)


_layer_norm = mem_kernels_ex.register_operator(
    "mem_layer_norm", meta=_layer_norm_meta, fn=_aten.native_layer_norm.default
)
_layer_norm_backward = register_several(
    "mem_layer_norm_backward",
    lambda grad, a, shape, *_: (_like(a), _of_shape(a, *shape), _of_shape(a, *shape)),
    _aten.native_layer_norm_backward.default,
)


def _is_layer_norm(a: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> bool:
    if not is_float(a) or not has_dtype_of(a, weight, bias) or not is_number(eps):
        return False
    # For a sharded parameter, Thunder takes the shape from the others.
    return all(p is None or tuple(p.shape) == tuple(normalized_shape) for p in (weight, bias))


def _differentiate_layer_norm(
    a: TensorProxy, normalized_shape: Sequence[int], weight: _Maybe = None, bias: _Maybe = None, eps: float = 1e-5
) -> TensorProxy:
    shape, mask = tuple(normalized_shape), _mask(weight, bias)
    out, mean, rstd = _layer_norm(a, shape, weight, bias, eps)
    put_asked((a, weight, bias), mask, _layer_norm_backward(get_grad(out), a, shape, mean, rstd, weight, bias, mask))
    return out


register(ltorch.layer_norm, _is_layer_norm, _differentiate_layer_norm)


def _group_norm_meta(
    a: TensorProxy, groups: int, weight: _Maybe, bias: _Maybe, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return _like(a), _statistic(a, a.shape[0], groups), _statistic(a, a.shape[0], groups)


def _of_channels_meta(grad: TensorProxy, a: TensorProxy, *_: Any) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return _like(a), _of_shape(a, a.shape[1]), _of_shape(a, a.shape[1])


def _dense(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the layout that group norm's kernel reads: on a CPU in the memory format of its argument."""
    on_cpu = t.device.type == "cpu"
    return t.contiguous(memory_format=torch._prims_common.suggest_memory_format(like)) if on_cpu else t.contiguous()


def _sizes(a: torch.Tensor) -> tuple[int, int, int]:
    batch, channels = a.shape[:2]
    return batch, channels, a.numel() // (batch * channels)


def _run_group_norm(
    a: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _aten.native_group_norm(_dense(a, a), weight, bias, *_sizes(a), groups, eps)


def _run_group_norm_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, a = _dense(grad, a), _dense(a, a)
    return _aten.native_group_norm_backward(grad, a, mean, rstd, weight, *_sizes(a), groups, mask)


_group_norm = mem_kernels_ex.register_operator("mem_group_norm", meta=_group_norm_meta, fn=_run_group_norm)
_group_norm_backward = register_several("mem_group_norm_backward", _of_channels_meta, _run_group_norm_backward)


def _is_group_norm(a: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> bool:
    return is_float(a) and a.ndim >= 2 and has_dtype_of(a, weight, bias) and is_number(eps)


def _differentiate_group_norm(
    a: TensorProxy, num_groups: int, weight: _Maybe = None, bias: _Maybe = None, eps: float = 1e-5
) -> TensorProxy:
    mask = _mask(weight, bias)
    out, mean, rstd = _group_norm(a, num_groups, weight, bias, eps)
    put_asked((a, weight, bias), mask, _group_norm_backward(get_grad(out), a, mean, rstd, weight, num_groups, mask))
    return out


register(ltorch.group_norm, _is_group_norm, _differentiate_group_norm)


def _batch_norm_meta(
    a: TensorProxy, weight: _Maybe, bias: _Maybe, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy, TensorProxy]:
    mean, rstd, variance = (_statistic(a, a.shape[1]) for _ in range(3))
    return _like(a), mean, rstd, variance


def _run_batch_norm(
    a: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = a.dtype if a.is_cpu or a.dtype is torch.float64 else torch.float32
    mean, variance = (a.new_zeros(a.shape[1], dtype=wide) for _ in range(2))
    # A momentum of one replaces the old values by the batch's mean and unbiased variance.
    out, mean, rstd = _aten._native_batch_norm_legit.default(a, weight, bias, mean, variance, True, 1.0, eps)
    return out, mean, rstd, variance


batch_norm_training = mem_kernels_ex.register_operator("mem_batch_norm", meta=_batch_norm_meta, fn=_run_batch_norm)
"""`(a, weight, bias, eps)` to the normalised (B, C, ...), and of the batch its mean, its reciprocal standard
deviation and its unbiased variance (C,): what is done with these is not part of it."""
_batch_norm_backward = register_several(
    "mem_batch_norm_backward", _of_channels_meta, _aten.native_batch_norm_backward.default
)


def _is_batch_norm(
    a: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> bool:
    """Whether it is a batch norm without writes; others have separate writes (`running_statistics.py`)."""
    writes = training and (running_mean is not None or running_var is not None)
    known = has_dtype_of(a, weight, bias, running_mean, running_var) if is_float(a) else False
    return known and not writes and is_number(eps)


def _differentiate_batch_norm(
    a: TensorProxy,
    running_mean: _Maybe = None,
    running_var: _Maybe = None,
    weight: _Maybe = None,
    bias: _Maybe = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    if training:
        return _differentiate_training(a, weight, bias, eps)[0]
    mask = _mask(weight, bias)
    out = ltorch.batch_norm(a, running_mean, running_var, weight, bias, False, momentum, eps)
    known = (a, weight, running_mean, running_var, None, None, False, eps, mask)
    put_asked((a, weight, bias), mask, _batch_norm_backward(get_grad(out), *known))
    return out


def _differentiate_training(
    a: TensorProxy, weight: _Maybe, bias: _Maybe, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy, TensorProxy]:
    mask = _mask(weight, bias)
    out, mean, rstd, variance = batch_norm_training(a, weight, bias, eps)
    known = (a, weight, None, None, mean, rstd, True, eps, mask)
    put_asked((a, weight, bias), mask, _batch_norm_backward(get_grad(out), *known))
    return out, mean, rstd, variance


register(ltorch.batch_norm, _is_batch_norm, _differentiate_batch_norm)
mem_kernels_ex.register_implementation(batch_norm_training, batch_norm_training, grad_transform=_differentiate_training)
