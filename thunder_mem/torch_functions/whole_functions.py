"""Functions that Thunder passes to PyTorch whole, written out in operations that it differentiates and fuses.

Thunder registers hundreds of PyTorch's functions by themselves. Such a function runs as it is. Its gradient runs it
once more, under autograd, and makes the gradients of all its arguments. No executor fuses it, and no tile or chunk runs
it. These mean the same as a few operations of `thunder.torch`. At kinks the derivatives are PyTorch's, such as that of
`clamp` at its bounds, where Thunder's own has 0.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import isnan, prod
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy, pyval

from thunder_mem.torch_functions.multi_head_attention import multi_head_attention
from thunder_mem.torch_functions.random_functions import RANDOM

__all__ = ["FUSED", "WRITTEN_OUT", "Written"]

Written = Callable[..., Any]


def _clamp(a: TensorProxy, min: Any = None, max: Any = None) -> TensorProxy | None:
    """Where an element is inside its bounds, it has the gradient; elsewhere a bound that is a tensor, or nobody."""
    low, high = (_bound_in_dtype_of(a, bound) for bound in (min, max))
    if low is high is None or any(bound is _UNKNOWN for bound in (low, high)) or not dtypes.is_float_dtype(a.dtype):
        return None
    outside, inside = a, None
    for is_inside, bound in ((ltorch.ge, low), (ltorch.le, high)):
        if bound is not None:
            # What is no number stays so: in `a`, and in a bound.
            stays = ltorch.logical_or(is_inside(outside, bound), ltorch.ne(outside, outside))
            outside = ltorch.where(stays, outside, bound)
            inside = is_inside(a, bound) if inside is None else ltorch.logical_and(inside, is_inside(a, bound))
    outside.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    if isinstance(high, TensorProxy):
        takes = ltorch.gt(a, high)
        takes = takes if low is None else ltorch.logical_or(takes, ltorch.lt(high, low))
        outside = ltorch.where(takes, high, outside)
    if isinstance(low, TensorProxy):
        takes = ltorch.lt(a, low)
        takes = takes if high is None else ltorch.logical_and(takes, ltorch.lt(low, high))
        outside = ltorch.where(takes, low, outside)
    return ltorch.where(inside, a, outside)


_UNKNOWN = object()


def _bound_in_dtype_of(a: TensorProxy, bound: Any) -> Any:
    """A bound rounded to the dtype of `a`, as PyTorch compares with it."""
    if bound is None:
        return None
    if isinstance(bound, TensorProxy):
        return bound if bound.dtype == a.dtype else _UNKNOWN
    rounded = torch.tensor(float(pyval(bound)), dtype=dtypes.to_torch_dtype(a.dtype)).item()
    return _UNKNOWN if isnan(rounded) else rounded


def _narrow(a: TensorProxy, dim: int, start: int, length: int) -> TensorProxy | None:
    if not (isinstance(start, int) and isinstance(length, int)):
        return None
    dim = dim % a.ndim
    start = start + a.shape[dim] if start < 0 else start
    return _part(a, dim, start, start + length)


def _part(a: TensorProxy, dim: int, start: int, end: int) -> TensorProxy:
    starts, ends = [0] * a.ndim, list(a.shape)
    starts[dim], ends[dim] = start, end
    return prims.slice_prim(a, starts, ends)


def _roll(a: TensorProxy, shifts: Any, dims: Any = None) -> TensorProxy | None:
    """A roll along one dimension; along several it would be several copies."""
    (shift,) = (shifts,) if isinstance(shifts, int) else shifts
    if dims is None or dims == ():
        flat = _roll(ltorch.reshape(a, (a.numel,)), shift, 0)
        return None if flat is None else ltorch.reshape(flat, a.shape)
    (dim,) = (dims % a.ndim,) if isinstance(dims, int) else (d % a.ndim for d in dims)
    if not a.numel or not (cut := -shift % a.shape[dim]):
        return None
    return ltorch.cat([_part(a, dim, cut, a.shape[dim]), _part(a, dim, 0, cut)], dim)


def _pixel_shuffle(a: TensorProxy, upscale_factor: int) -> TensorProxy | None:
    *outer, c, h, w = a.shape
    r = upscale_factor
    if r < 2 or not a.numel or h == w == 1:  # of single pixels it would be a view, where PyTorch copies
        return None
    parts = ltorch.reshape(a, (prod(outer), c // r**2, r, r, h, w))
    return ltorch.reshape(ltorch.permute(parts, (0, 1, 4, 2, 5, 3)), (*outer, c // r**2, h * r, w * r))


def _pixel_unshuffle(a: TensorProxy, downscale_factor: int) -> TensorProxy | None:
    *outer, c, h, w = a.shape
    r = downscale_factor
    if r < 2 or not a.numel or h == w == r:
        return None
    parts = ltorch.reshape(a, (prod(outer), c, h // r, r, w // r, r))
    return ltorch.reshape(ltorch.permute(parts, (0, 1, 3, 5, 2, 4)), (*outer, c * r**2, h // r, w // r))


def _diff(a: TensorProxy, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> TensorProxy | None:
    dim = dim % a.ndim
    if n != 1 or prepend is not None or append is not None or a.shape[dim] < 2 or dtypes.is_boolean_dtype(a.dtype):
        return None
    return ltorch.sub(_part(a, dim, 1, a.shape[dim]), _part(a, dim, 0, a.shape[dim] - 1))


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> TensorProxy | None:
    return ltorch.true_divide(a, b) if rounding_mode is None else None


def _lerp(start: TensorProxy, end: TensorProxy, weight: float | TensorProxy) -> TensorProxy | None:
    if not _are_floats(start, end, *([weight] if isinstance(weight, TensorProxy) else [])):
        return None
    step = ltorch.sub(end, start)
    from_start = ltorch.add(start, ltorch.mul(step, weight))
    from_end = ltorch.sub(end, ltorch.mul(step, ltorch.sub(1, weight)))
    if isinstance(weight, TensorProxy):
        return ltorch.where(ltorch.lt(ltorch.abs(weight), 0.5), from_start, from_end)
    return from_start if abs(weight) < 0.5 else from_end


def _are_floats(*tensors: TensorProxy) -> bool:
    """Whether all are floating, of one dtype."""
    return dtypes.is_float_dtype(tensors[0].dtype) and all(t.dtype == tensors[0].dtype for t in tensors)


def _loss(function: Callable[..., Any], each: Callable[..., TensorProxy | None]) -> Written:
    """A loss of PyTorch between tensors of one shape and dtype, by the loss of each element."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature(function).bind(*args, **kwargs).arguments
        a, target, reduction = given.pop("input"), given.pop("target"), given.pop("reduction", "mean")
        if a.shape != target.shape or any(given.pop(name, None) is not None for name in _NOT_WRITTEN):
            return None
        if not _are_floats(a, target) or (result := each(a, target, **given)) is None:
            return None
        if reduction == "batchmean":
            return ltorch.true_divide(ltorch.sum(result), a.shape[0])
        return {"mean": ltorch.mean, "sum": ltorch.sum}[reduction](result) if reduction != "none" else result

    return loss


_NOT_WRITTEN = ("size_average", "reduce", "weight")


def _smooth_l1(a: TensorProxy, target: TensorProxy, beta: float = 1.0) -> TensorProxy | None:
    distance = ltorch.abs(ltorch.sub(a, target))
    if beta == 0:
        return distance
    if not beta > 0:
        return None
    slope = _at_most(distance, beta)
    share = ltorch.true_divide(slope, beta)
    return ltorch.mul(share, ltorch.sub(distance, ltorch.mul(slope, 0.5)))


def _huber(a: TensorProxy, target: TensorProxy, delta: float = 1.0) -> TensorProxy | None:
    if not delta > 0:
        return None
    distance = ltorch.abs(ltorch.sub(a, target))
    slope = _at_most(distance, delta)
    return ltorch.mul(slope, ltorch.sub(distance, ltorch.mul(slope, 0.5)))


def _at_most(distance: TensorProxy, most: float) -> TensorProxy:
    """The derivative of a Huber loss by the distance, as a constant: a choice of formulas would multiply 0 by inf."""
    slope = ltorch.where(ltorch.lt(distance, most), distance, most)
    slope.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return slope


def _kl_div(a: TensorProxy, target: TensorProxy, log_target: bool = False) -> TensorProxy:
    if log_target:
        return ltorch.mul(ltorch.exp(target), ltorch.sub(target, a))
    log = ltorch.log(ltorch.where(ltorch.eq(target, 0), 1.0, target))  # 0 log 0 is 0
    return ltorch.mul(target, ltorch.sub(log, a))


def _cosine_similarity(a: TensorProxy, b: TensorProxy, dim: int = 1, eps: float = 1e-8) -> TensorProxy | None:
    if a.ndim != b.ndim or not a.ndim or a.shape[dim] != b.shape[dim] or not _are_floats(a, b):
        return None
    wide = dtypes.float32 if dtypes.to_dtype(a.dtype).bytes < 4 else a.dtype  # the squares of 16 bits overflow
    directions = [ltorch.true_divide(x, _length(x, dim, eps)) for x in (ltorch.to(a, wide), ltorch.to(b, wide))]
    return ltorch.to(ltorch.sum(ltorch.mul(*directions), dim), a.dtype)


def _length(a: TensorProxy, dim: int, eps: float) -> TensorProxy:
    """The norm, at least `eps`, with the derivative of the norm, which is 0 for zeros."""
    squares = ltorch.sum(ltorch.mul(a, a), dim, keepdim=True)
    is_zero = ltorch.eq(squares, 0)
    norm = ltorch.sqrt(ltorch.where(is_zero, 1.0, squares))
    missing = ltorch.where(ltorch.lt(norm, eps), ltorch.sub(eps, norm), 0.0)
    missing.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return ltorch.where(is_zero, eps, ltorch.add(norm, missing))


_ALWAYS: dict[Callable[..., Any], Written] = {
    torch.absolute: ltorch.abs,
    torch.diff: _diff,
    torch.divide: _divide,
    torch.lerp: _lerp,
    torch.moveaxis: ltorch.movedim,
    torch.multiply: ltorch.mul,
    torch.narrow: _narrow,
    torch.negative: ltorch.neg,
    F.multi_head_attention_forward: multi_head_attention,
    torch.subtract: ltorch.sub,
    torch.swapaxes: ltorch.transpose,
    torch.swapdims: ltorch.transpose,
    # Of their other argument they read the shape alone: it shares no memory with the result.
    torch.Tensor.expand_as: lambda a, other: ltorch.expand(a, other.shape),
    torch.Tensor.reshape_as: lambda a, other: ltorch.reshape(a, other.shape),
    torch.Tensor.view_as: lambda a, other: ltorch.view(a, other.shape),
}

_WHERE_FUSED: dict[Callable[..., Any], Written] = {
    torch.clamp: _clamp,
    torch.clamp_max: lambda a, max: _clamp(a, None, max),
    torch.clamp_min: lambda a, min: _clamp(a, min),
    torch.clip: _clamp,
    F.cosine_similarity: _cosine_similarity,
    F.huber_loss: _loss(F.huber_loss, _huber),
    F.kl_div: _loss(F.kl_div, _kl_div),
    F.l1_loss: _loss(F.l1_loss, lambda a, target: ltorch.abs(ltorch.sub(a, target))),
    F.pixel_shuffle: _pixel_shuffle,
    F.pixel_unshuffle: _pixel_unshuffle,
    torch.roll: _roll,
    F.smooth_l1_loss: _loss(F.smooth_l1_loss, _smooth_l1),
}


def _by_symbol(written: dict[Callable[..., Any], Written]) -> dict[Any, Written]:
    known = ltorch._torch_to_thunder_function_map
    return {known[function].id: fn for function, fn in written.items() if function in known}


WRITTEN_OUT = _by_symbol(_ALWAYS | RANDOM)
"""By symbol id: `fn(*args, **kwargs)`, which means the same, or None where it does not know the arguments."""

FUSED = _by_symbol(_WHERE_FUSED)
"""The same for functions of several steps: without fusion each step would be a tensor."""
