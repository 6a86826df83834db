"""Functions that Thunder 0.2.6 refuses, by others, or passed to PyTorch whole.

- draws in place, as in a stochastic depth: ``x.new_empty(shape).bernoulli_(p)``; `uniform_`, `normal_`, `exponential_`
  and `fill_`. The numbers are those of eager PyTorch;
- `torch.normal` and `randperm`;
- `linspace`, `logspace`, `tril_indices`, `triu_indices`, and `full` with ``size=``;
- `F.pad` by reflection, replication and around the edge, and all modes of `F.interpolate`;
- `F.normalize` with ``out=``, and what weights of a given length are made by (`nn.utils.parametrizations`);
- `nan_to_num` with its arguments by name, and gradients of a tensor's method `unfold`, for which Thunder takes that of
  `F.unfold`;
- `F.binary_cross_entropy_with_logits` with weights of another dtype;
- `F.gaussian_nll_loss`. Of a negative variance, for which PyTorch raises an error, it is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.clang import maybe_convert_to_dtype
from thunder.core.proxies import TensorProxy

from thunder_mem.kernels.random_draws import filled, permutation
from thunder_mem.torch_functions.plain_arguments import run_whole
from thunder_mem.torch_functions.steps import are_floats, clamp, constant, wide_dtype
from thunder_mem.torch_functions.whole_losses import binary_cross_entropy_with_logits

__all__ = ["REFUSED", "REFUSED_METHODS"]


def _filled(method: str, **defaults: float) -> Callable[..., TensorProxy]:
    """A method that fills a tensor with random numbers, by its arguments and their defaults."""

    def fill(a: TensorProxy, *args: Any, generator: None = None, **named: Any) -> TensorProxy:
        if generator is not None:
            raise NotImplementedError(f"{method} with a generator cannot be compiled; seed PyTorch's own instead")
        given = dict(zip(defaults, args, strict=False)) | named
        if len(args) > len(defaults) or not given.keys() <= defaults.keys():
            raise TypeError(f"{method} takes {', '.join(defaults)}, not {args} and {named}")
        numbers = tuple((defaults | given).values())
        return ltorch.copy_(a, constant(filled(method, tuple(a.shape), a.device, a.dtype, numbers)))

    fill.__name__ = method
    return fill


def _fill(a: TensorProxy, value: Any) -> TensorProxy:
    return ltorch.copy_(
        a, ltorch.expand(value, a.shape) if isinstance(value, TensorProxy) else ltorch.full_like(a, value)
    )


def _normal(
    mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Any:
    """In the steps of `ATen/native/Distributions.cpp`."""
    if any(value for value in kwargs.values()):
        raise NotImplementedError(f"torch.normal with {', '.join(kwargs)} cannot be compiled")
    tensors = [t for t in (mean, std) if isinstance(t, TensorProxy)]
    if not tensors:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else device
        return filled("normal_", tuple(size), device, dtype, (mean, std))
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in tensors))
    scale = 1.0 if isinstance(std, TensorProxy) else std
    drawn = filled("normal_", shape, tensors[-1].device, tensors[-1].dtype, (0.0, scale))
    drawn = ltorch.mul(drawn, std) if isinstance(std, TensorProxy) else drawn
    return constant(ltorch.add(drawn, mean))


def _randperm(n: int, *, dtype: Any = torch.int64, device: Any = None, **kwargs: Any) -> TensorProxy:
    if any(value for value in kwargs.values()):
        raise NotImplementedError(f"torch.randperm with {', '.join(kwargs)} cannot be compiled")
    return permutation(n, torch.get_default_device() if device is None else device, dtype or torch.int64)


def _made(function: Callable[..., Any]) -> Callable[..., TensorProxy]:
    """A function of numbers alone, on the device that is PyTorch's default while it is traced."""

    def made(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> TensorProxy:
        device = torch.get_default_device() if device is None else device
        return run_whole(function, *args, device=device, **kwargs)

    return made


def _full(size: Any, fill_value: Any, **kwargs: Any) -> TensorProxy:
    return ltorch.full(size, fill_value, **kwargs)


def _pad(a: TensorProxy, pad: Any, mode: str | None = "constant", value: Any = None) -> TensorProxy:
    if mode in ("constant", None):
        return ltorch.pad(a, tuple(pad), "constant", value)
    return run_whole(F.pad, a, tuple(pad), mode)


def _interpolate(
    a: TensorProxy,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> TensorProxy:
    """PyTorch's default is not to align corners."""
    known = mode in ("nearest", "nearest-exact") or (mode == "bilinear" and not align_corners)
    if not known or recompute_scale_factor or antialias:
        return run_whole(F.interpolate, a, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    factor = float(scale_factor) if isinstance(scale_factor, int) else scale_factor
    return ltorch.interpolate(a, size, factor, mode, None)


def _binary_cross_entropy_with_logits(input: TensorProxy, target: TensorProxy, *args: Any, **kwargs: Any) -> Any:
    weights = [w for w in (*args, *kwargs.values()) if isinstance(w, TensorProxy)]
    if weights and not are_floats(input, target, *weights):
        written = binary_cross_entropy_with_logits(input, target, *args, **kwargs)
        if written is not None:
            return written
    return ltorch._torch_to_thunder_function_map[F.binary_cross_entropy_with_logits](input, target, *args, **kwargs)


def _normalize(
    a: TensorProxy, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: TensorProxy | None = None
) -> TensorProxy:
    normalized = ltorch.normalize(a, p, dim, eps)
    return normalized if out is None else ltorch.copy_(out, normalized)


def _weight_norm(v: TensorProxy, g: TensorProxy, dim: int = 0) -> TensorProxy:
    """`v` with the lengths `g` along a dim, which is that of all elements for -1."""
    wide = maybe_convert_to_dtype(v, wide_dtype(v))
    dims = [d for d in range(v.ndim) if d != dim]
    lengths = ltorch.sqrt(ltorch.sum(ltorch.mul(wide, wide), dims, keepdim=dim != -1))
    return maybe_convert_to_dtype(ltorch.mul(wide, ltorch.true_divide(g, lengths)), v.dtype)


def _unfold(a: TensorProxy, dimension: int, size: int, step: int) -> TensorProxy:
    """Windows side by side are views. Nobody can write into overlapping ones, so they may be copies."""
    if not a.ndim or size < 1 or step > size or step < 1 or size > a.shape[dimension]:
        return ltorch.unfold(a, dimension, size, step)
    dim = dimension % a.ndim
    count = (a.shape[dim] - size) // step + 1
    if step == size:
        whole = tuple(slice(0, count * size) if d == dim else slice(None) for d in range(a.ndim))
        windows = ltorch.unflatten(a[whole], dim, (count, size))
    else:
        starts = ltorch.mul(ltorch.arange(count, device=a.device), step)
        places = ltorch.add(ltorch.unsqueeze(starts, 1), ltorch.arange(size, device=a.device))
        windows = ltorch.unflatten(ltorch.index_select(a, dim, ltorch.reshape(places, (-1,))), dim, (count, size))
    return ltorch.movedim(windows, dim + 1, -1)


def _nan_to_num(a: TensorProxy, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> TensorProxy:
    return ltorch.nan_to_num(a, nan, posinf, neginf)


def _gaussian_nll(
    input: TensorProxy, target: TensorProxy, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> TensorProxy:
    if not isinstance(var, TensorProxy):
        var = ltorch.full_like(input, var)
    if tuple(var.shape) == tuple(input.shape[:-1]):
        var = ltorch.unsqueeze(var, -1)
    var = ltorch.where(ltorch.lt(var, 0), torch.nan, var)
    # PyTorch bounds the variance's value, and not its gradient.
    missing = constant(ltorch.sub(clamp(var, eps), var))
    var = ltorch.add(var, missing)
    error = ltorch.sub(input, target)
    loss = ltorch.mul(ltorch.add(ltorch.log(var), ltorch.true_divide(ltorch.mul(error, error), var)), 0.5)
    if full:
        loss = ltorch.add(loss, log(2 * pi) / 2)
    return {"mean": ltorch.mean, "sum": ltorch.sum, "none": lambda x: x}[reduction](loss)


REFUSED_METHODS: dict[str, Callable[..., TensorProxy]] = {
    "bernoulli_": _filled("bernoulli_", p=0.5),
    "exponential_": _filled("exponential_", lambd=1.0),
    "normal_": _filled("normal_", mean=0.0, std=1.0),
    "uniform_": _filled("uniform_", **{"from": 0.0, "to": 1.0}),
    "fill_": _fill,
    "nan_to_num": _nan_to_num,
    "unfold": _unfold,
}
"""By the name of a tensor's method: `fn(a, *args, **kwargs)` while it is traced."""

REFUSED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): function for name, function in REFUSED_METHODS.items()},
    **{function: _made(function) for function in (torch.linspace, torch.logspace)},
    **{function: _made(function) for function in (torch.tril_indices, torch.triu_indices)},
    torch._weight_norm: _weight_norm,
    torch.nan_to_num: _nan_to_num,
    torch.full: _full,
    torch.normal: _normal,
    torch.randperm: _randperm,
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
    F.gaussian_nll_loss: _gaussian_nll,
    F.interpolate: _interpolate,
    F.normalize: _normalize,
    F.pad: _pad,
}
"""The same by PyTorch's function."""
