"""Losses of a tensor and its target, element by element, with each gradient by a function of its own.

Thunder differentiates such a loss by PyTorch's autograd inside one operation, which runs the forward once more, and
makes the gradient of the targets too. Here each gradient is an operation, and an unread one is never made.

PyTorch's reduced `binary_cross_entropy` and `smooth_l1_loss` are numbers that keep the memory of all elements
(`ATen/native/Loss.cpp` reduces in place). Here the forward lets it go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy, pyval
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import get_grad, put_grad

from thunder_mem.kernels.kernel_executor import has_dtype_of, is_float, is_number, mem_gradients_ex, register
from thunder_mem.semantics.layout import dense_bytes
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__: list[str] = []

_aten = torch.ops.aten
_Tensor = torch.Tensor
_Weight = torch.Tensor | None


@dataclass(frozen=True)
class _Loss:
    """A loss by its kernels, which take its own options by position, in PyTorch's order.

    Attributes:
        function: PyTorch's.
        of_a: `of_a(grad, a, target, reduction, *options)`, the gradient of `a`.
        of_target: the same of the targets.
        each: `each(a, target, *options)`, the loss of each element; None if PyTorch's own function runs the forward.
        accepts: of the options, whether the kernels know them.
        temporaries: of the options, how many tensors as large as `a` exist beside the result of `each`, `of_a`, and
            `of_target`.
    """

    function: Callable[..., Any]
    of_a: Callable[..., _Tensor]
    of_target: Callable[..., _Tensor]
    each: Callable[..., _Tensor] | None = None
    accepts: Callable[..., bool] = lambda *options: True
    temporaries: Callable[..., tuple[int, int, int]] = lambda *options: (0, 0, 0)


def _register(loss: _Loss) -> None:
    operation: Symbol = ltorch._torch_to_thunder_function_map[loss.function]
    name = f"mem_{operation.name}"

    def like_a(grad: TensorProxy, a: TensorProxy, *_: Any) -> TensorProxy:
        return TensorProxy(like=a, requires_grad=False)

    of_a = mem_gradients_ex.register_operator(f"{name}_backward", meta=like_a, fn=loss.of_a)
    of_target = mem_gradients_ex.register_operator(f"{name}_target_backward", meta=like_a, fn=loss.of_target)
    forward: Callable[..., TensorProxy] = operation if loss.each is None else _forward(loss, name)

    def is_supported(*args: Any, **kwargs: Any) -> bool:
        a, target, reduction, *options = _arguments(loss, args, kwargs)
        weights = [x for x in options if isinstance(x, TensorProxy)]
        # PyTorch refuses to differentiate weights.
        if reduction not in ("none", "mean", "sum") or any(w.requires_grad for w in weights):
            return False
        return is_float(a) and has_dtype_of(a, target, *weights) and a.shape == target.shape and loss.accepts(*options)

    def differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
        a, target, *options = _arguments(loss, args, kwargs)
        out = forward(*args, **kwargs)
        grad = get_grad(out)
        put_grad(a, of_a(grad, a, target, *options))
        put_grad(target, of_target(grad, a, target, *options))
        return out

    if forward is operation:
        register(operation, is_supported, differentiate, mem_gradients_ex)
    else:
        mem_gradients_ex.register_implementation(
            operation, checker=is_supported, execution_transform=forward, grad_transform=differentiate
        )
    for index, symbol in enumerate((name if loss.each else "", of_a.name, of_target.name)):
        if symbol:
            _TRAITS[symbol] = MemoryTraits(scratch_bytes=partial(_scratch_bytes, loss, index))


def _forward(loss: _Loss, name: str) -> Callable[..., TensorProxy]:
    """The loss by `each`, with the arguments of PyTorch's function."""
    each = loss.each
    assert each is not None

    def meta(a: TensorProxy, target: TensorProxy, reduction: str, *options: Any) -> TensorProxy:
        return TensorProxy(like=a, shape=a.shape if reduction == "none" else (), requires_grad=False)

    def reduced(a: _Tensor, target: _Tensor, reduction: str, *options: Any) -> _Tensor:
        result = each(a, target, *options)
        return result if reduction == "none" else result.mean() if reduction == "mean" else result.sum()

    symbol = mem_gradients_ex.register_operator(name, meta=meta, fn=reduced)
    return lambda *args, **kwargs: symbol(*_arguments(loss, args, kwargs))


def _arguments(loss: _Loss, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The tensor, its target, the reduction, and the options; the reduction is empty for PyTorch's old arguments."""
    bound = signature(loss.function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    reduction = given.pop("reduction")
    old = given.pop("size_average"), given.pop("reduce")
    a, target, *options = given.values()
    return a, target, reduction if old == (None, None) else "", *options


# --- the losses ------------------------------------------------------------------------------------


def _mean(gradient: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """A gradient of a sum or of each element, as one of a mean, too."""

    def of(grad: _Tensor, a: _Tensor, target: _Tensor, reduction: str, *options: Any) -> _Tensor:
        result = gradient(grad, a, target, *options)
        return result.div_(a.numel()) if reduction == "mean" else result

    return of


def _by_slope(slope: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """A gradient by the derivative of each element, which is a new tensor."""
    return _mean(lambda grad, a, target, *options: slope(a, target, *options).mul_(grad))


def _of_logits(grad: _Tensor, a: _Tensor, target: _Tensor, weight: _Weight, pos_weight: _Weight) -> _Tensor:
    """Of `w ((1 - y) softplus(x) + p y softplus(-x))`, with logits x, targets y, weights w and positive weights p."""
    slope = a.sigmoid()
    if pos_weight is None:
        slope.sub_(target)
    else:
        # (1 + (p - 1) y) sigmoid(x) - p y, as in PyTorch's own derivative, beside one temporary.
        slope.mul_((target * (pos_weight - 1)).add_(1)).addcmul_(target, pos_weight, value=-1)
    return _weighted(slope.mul_(grad), weight)


def _of_targets_of_logits(grad: _Tensor, a: _Tensor, target: _Tensor, weight: _Weight, pos_weight: _Weight) -> _Tensor:
    slope = -a if pos_weight is None else F.logsigmoid(-a).sub_(F.logsigmoid(a).mul_(pos_weight))
    return _weighted(slope.mul_(grad), weight)


def _weighted(gradient: _Tensor, weight: _Weight) -> _Tensor:
    return gradient if weight is None else gradient.mul_(weight)


def _of_probabilities(grad: _Tensor, a: _Tensor, target: _Tensor, weight: _Weight) -> _Tensor:
    wide = None if weight is None else weight.expand_as(a)
    return _aten.binary_cross_entropy_backward(grad.expand_as(a), a, target, wide, 0)


def _of_targets_of_probabilities(grad: _Tensor, a: _Tensor, target: _Tensor, weight: _Weight) -> _Tensor:
    return _weighted((1 - a).log_().sub_(a.log()).mul_(grad), weight)


def _smooth_l1(grad: _Tensor, a: _Tensor, target: _Tensor, beta: float) -> _Tensor:
    return _aten.smooth_l1_loss_backward(grad.expand_as(a), a, target, 0, beta)


_LOSSES = (
    _Loss(
        F.binary_cross_entropy_with_logits,
        of_a=_mean(_of_logits),
        of_target=_mean(_of_targets_of_logits),
        temporaries=lambda weight, pos_weight: (0, 0, 0) if pos_weight is None else (0, 1, 2),
    ),
    _Loss(
        F.binary_cross_entropy,
        of_a=_mean(_of_probabilities),
        of_target=_mean(_of_targets_of_probabilities),
        each=lambda a, target, weight: F.binary_cross_entropy(a, target, weight, reduction="none"),
        temporaries=lambda weight: (0, 0, 1),
    ),
    _Loss(
        F.smooth_l1_loss,
        of_a=_mean(_smooth_l1),
        of_target=_mean(lambda grad, a, target, beta: _smooth_l1(grad, target, a, beta)),
        each=lambda a, target, beta: F.smooth_l1_loss(a, target, reduction="none", beta=beta),
        accepts=lambda beta: is_number(beta) and pyval(beta) > 0,  # of 0, PyTorch calls `l1_loss`
    ),
    _Loss(
        F.l1_loss,
        of_a=_by_slope(lambda a, target, weight: torch.sub(a, target).sign_()),
        of_target=_by_slope(lambda a, target, weight: torch.sub(target, a).sign_()),
        each=lambda a, target, weight: torch.sub(a, target).abs_(),
        accepts=lambda weight: weight is None,
    ),
    _Loss(
        F.poisson_nll_loss,
        of_a=_by_slope(lambda a, target, *_: torch.exp(a).sub_(target)),
        of_target=_by_slope(lambda a, target, *_: torch.neg(a)),
        each=lambda a, target, *_: torch.exp(a).sub_(target * a),
        accepts=lambda log_input, full, eps: log_input is True and full is False,
        temporaries=lambda *_: (1, 0, 0),
    ),
)


# --- for those who plan ----------------------------------------------------------------------------


def _scratch_bytes(loss: _Loss, index: int, bsym: BoundSymbol) -> int:
    """Temporaries as large as the tensor; the losses of all elements are one where they are added up."""
    a, _, reduction, *options = bsym.args[1:] if index else bsym.args
    count = loss.temporaries(*options)[index] + (not index and reduction != "none")
    return count * dense_bytes(a)


_TRAITS: dict[str, MemoryTraits] = {}
for _loss in _LOSSES:
    _register(_loss)
declare(mem_gradients_ex, lambda name: _TRAITS.get(name, PLAIN))
