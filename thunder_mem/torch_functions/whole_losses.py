"""Losses that Thunder passes to PyTorch whole, by the loss of each element or row.

The formulas are those of `ATen/native/Loss.cpp` and `ATen/native/Distance.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import pi
from typing import Any

import thunder.torch as ltorch
import torch.nn.functional as F
from thunder.clang import maybe_convert_to_dtype
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_mem.torch_functions.steps import are_floats, clamp, constant, norm, reduced, wide_dtype

__all__ = ["LOSSES", "LOSSES_WITHOUT_DERIVATIVE", "binary_cross_entropy_with_logits"]

_NOT_WRITTEN = ("size_average", "reduce", "weight")


def _loss(function: Callable[..., Any], each: Callable[..., TensorProxy | None]) -> Callable[..., Any]:
    """A loss of PyTorch, by a function of the same arguments without the reduction."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature(function).bind(*args, **kwargs).arguments
        reduction = given.pop("reduction", "mean")
        if any(given.pop(name, None) is not None for name in _NOT_WRITTEN):
            return None
        tensors = [x for x in given.values() if isinstance(x, TensorProxy)]
        if not are_floats(*tensors) or (result := each(**given)) is None:
            return None
        return reduced(result, reduction, tensors[0].shape[0] if tensors[0].ndim else 1)

    return loss


def _of_one_shape(each: Callable[..., TensorProxy | None]) -> Callable[..., TensorProxy | None]:
    def checked(input: TensorProxy, target: TensorProxy, **options: Any) -> TensorProxy | None:
        return each(input, target, **options) if input.shape == target.shape else None

    return checked


def _l1(a: TensorProxy, target: TensorProxy) -> TensorProxy:
    return ltorch.abs(ltorch.sub(a, target))


def _smooth_l1(a: TensorProxy, target: TensorProxy, beta: float = 1.0) -> TensorProxy | None:
    distance = _l1(a, target)
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
    distance = _l1(a, target)
    slope = _at_most(distance, delta)
    return ltorch.mul(slope, ltorch.sub(distance, ltorch.mul(slope, 0.5)))


def _at_most(distance: TensorProxy, most: float) -> TensorProxy:
    """The derivative of a Huber loss by the distance, as a constant: a choice of formulas would multiply 0 by inf."""
    return constant(ltorch.where(ltorch.lt(distance, most), distance, most))


def _kl_div(a: TensorProxy, target: TensorProxy, log_target: bool = False) -> TensorProxy:
    if log_target:
        return ltorch.mul(ltorch.exp(target), ltorch.sub(target, a))
    log = ltorch.log(ltorch.where(ltorch.eq(target, 0), 1.0, target))  # 0 log 0 is 0
    return ltorch.mul(target, ltorch.sub(log, a))


def _soft_margin(a: TensorProxy, target: TensorProxy) -> TensorProxy:
    return ltorch.log1p(ltorch.exp(ltorch.mul(ltorch.neg(target), a)))


def _poisson(
    input: TensorProxy, target: TensorProxy, log_input: bool = True, full: bool = False, eps: float = 1e-8
) -> TensorProxy:
    if log_input:
        result = ltorch.sub(ltorch.exp(input), ltorch.mul(target, input))
    else:
        result = ltorch.sub(input, ltorch.mul(target, ltorch.log(ltorch.add(input, eps))))
    if not full:
        return result
    stirling = ltorch.add(
        ltorch.sub(ltorch.mul(target, ltorch.log(target)), target),
        ltorch.mul(ltorch.log(ltorch.mul(target, 2 * pi)), 0.5),
    )
    return ltorch.add(result, ltorch.where(ltorch.le(target, 1), 0.0, stirling))


def _margin_ranking(input1: TensorProxy, input2: TensorProxy, target: TensorProxy, margin: float = 0) -> Any:
    return clamp(ltorch.add(ltorch.mul(ltorch.neg(target), ltorch.sub(input1, input2)), margin), 0)


def _hinge_embedding(input: TensorProxy, target: TensorProxy, margin: float = 1.0) -> Any:
    far = ltorch.where(ltorch.ne(target, 1), clamp(ltorch.sub(margin, input), 0), 0.0)
    return ltorch.add(far, ltorch.where(ltorch.ne(target, -1), input, 0.0))


def _cosine_embedding(input1: TensorProxy, input2: TensorProxy, target: TensorProxy, margin: float = 0) -> Any:
    if input1.shape != input2.shape or target.ndim != input1.ndim - 1:
        return None
    product, *lengths = (
        ltorch.sum(ltorch.mul(x, y), -1) for x, y in ((input1, input2), (input1, input1), (input2, input2))
    )
    lengths = [ltorch.add(length, 1e-12) for length in lengths]
    cosine = ltorch.true_divide(product, ltorch.sqrt(ltorch.mul(*lengths)))
    near = ltorch.where(ltorch.eq(target, 1), ltorch.sub(1, cosine), 0.0)
    return ltorch.add(near, ltorch.where(ltorch.eq(target, -1), clamp(ltorch.sub(cosine, margin), 0), 0.0))


def _pairwise_distance(
    x1: TensorProxy, x2: TensorProxy, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> TensorProxy | None:
    if p != 2 or not are_floats(x1, x2) or not x1.ndim or not x2.ndim:
        return None
    difference = ltorch.add(ltorch.sub(x1, x2), eps)
    distance, is_zero = norm(ltorch.to(difference, wide_dtype(x1)), -1, keepdim)
    return ltorch.to(ltorch.where(is_zero, 0.0, distance), x1.dtype)


def _triplet_margin(
    anchor: TensorProxy,
    positive: TensorProxy,
    negative: TensorProxy,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
) -> TensorProxy | None:
    near, far = (_pairwise_distance(anchor, x, p, eps) for x in (positive, negative))
    if near is None or far is None:
        return None
    if swap and (other := _pairwise_distance(positive, negative, p, eps)) is not None:
        far = ltorch.minimum(far, other)
    return clamp(ltorch.sub(ltorch.add(near, margin), far), 0)


def binary_cross_entropy_with_logits(
    input: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: TensorProxy | None = None,
) -> TensorProxy | None:
    """The loss by its formula, of tensors whose dtypes may differ; None for arguments that it does not know."""
    tensors = [t for t in (input, target, weight, pos_weight) if t is not None]
    if size_average is not None or reduce is not None or any(t.requires_grad for t in tensors[2:]):
        return None
    if not all(dtypes.is_float_dtype(t.dtype) for t in tensors) or input.shape != target.shape:
        return None
    wide = maybe_convert_to_dtype(input, wide_dtype(input))
    positive = maybe_convert_to_dtype(ltorch.neg(ltorch.logsigmoid(wide)), input.dtype)  # the loss of a target of 1
    if pos_weight is not None:
        positive = ltorch.mul(positive, ltorch.add(ltorch.mul(ltorch.sub(pos_weight, 1), target), 1))
    result = ltorch.add(ltorch.mul(ltorch.sub(1, target), input), positive)
    result = result if weight is None else ltorch.mul(result, weight)
    return reduced(maybe_convert_to_dtype(result, target.dtype), reduction)  # PyTorch writes it over `1 - target`


LOSSES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
    F.cosine_embedding_loss: _loss(F.cosine_embedding_loss, _cosine_embedding),
    F.hinge_embedding_loss: _loss(F.hinge_embedding_loss, _hinge_embedding),
    F.huber_loss: _loss(F.huber_loss, _of_one_shape(_huber)),
    F.kl_div: _loss(F.kl_div, _of_one_shape(_kl_div)),
    F.l1_loss: _loss(F.l1_loss, _of_one_shape(_l1)),
    F.margin_ranking_loss: _loss(F.margin_ranking_loss, _margin_ranking),
    F.pairwise_distance: _pairwise_distance,
    F.poisson_nll_loss: _loss(F.poisson_nll_loss, _poisson),
    F.smooth_l1_loss: _loss(F.smooth_l1_loss, _of_one_shape(_smooth_l1)),
    F.triplet_margin_loss: _loss(F.triplet_margin_loss, _triplet_margin),
}
"""By PyTorch's function: `fn(*args, **kwargs)`, which means the same, or None where it does not know the arguments."""

LOSSES_WITHOUT_DERIVATIVE: dict[Callable[..., Any], Callable[..., Any]] = {
    F.soft_margin_loss: _loss(F.soft_margin_loss, _of_one_shape(_soft_margin)),
}
"""The same for losses that Thunder cannot differentiate."""
