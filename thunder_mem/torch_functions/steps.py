"""Steps of functions that are written out, with PyTorch's derivatives at kinks."""

from __future__ import annotations

from math import isnan
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import ProxyTag, TensorProxy, pyval

__all__ = ["are_floats", "clamp", "constant", "norm", "reduced", "wide_dtype"]


def are_floats(*tensors: TensorProxy) -> bool:
    """Whether all are floating, of one dtype."""
    return dtypes.is_float_dtype(tensors[0].dtype) and all(t.dtype == tensors[0].dtype for t in tensors)


def constant(a: TensorProxy) -> TensorProxy:
    """The tensor, which no gradient passes."""
    a.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return a


def wide_dtype(a: TensorProxy) -> Any:
    """The dtype in which squares of its elements are added up: those of 16 bits overflow."""
    return dtypes.float32 if dtypes.to_dtype(a.dtype).bytes < 4 else a.dtype


def reduced(each: TensorProxy, reduction: str, batch: int = 1) -> TensorProxy:
    """A loss by its elements, and by PyTorch's name of the reduction. "batchmean" divides the sum by `batch`."""
    if reduction == "none":
        return each
    if reduction == "mean":
        return ltorch.mean(each)
    total = ltorch.sum(each)
    return ltorch.true_divide(total, batch) if reduction == "batchmean" else total


def norm(a: TensorProxy, dim: int, keepdim: bool = False) -> tuple[TensorProxy, TensorProxy]:
    """The Euclidean norm along a dim, 1 for zeros; and where they are zeros, whose derivative is 0."""
    squares = ltorch.sum(ltorch.mul(a, a), dim, keepdim=keepdim)
    is_zero = ltorch.eq(squares, 0)
    return ltorch.sqrt(ltorch.where(is_zero, 1.0, squares)), is_zero


def clamp(a: TensorProxy, min: Any = None, max: Any = None) -> TensorProxy | None:
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
    outside = constant(outside)
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
