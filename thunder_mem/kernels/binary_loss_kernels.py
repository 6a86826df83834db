"""Binary cross entropy of logits, with each gradient by a function of its own.

Thunder differentiates it by PyTorch's autograd inside one operation, which runs the forward once more, and makes the
gradient of the targets too. Here each gradient is an operation, and an unread one is never made. With logits x, targets
y, weights w and positive weights p, an element of the loss is::

    w * ((1 - y) * softplus(x) + p * y * softplus(-x))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import get_grad, put_grad

from thunder_mem.kernels.kernel_executor import has_dtype_of, is_float, mem_gradients_ex, register
from thunder_mem.semantics.layout import dense_bytes
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__: list[str] = []

_operation: Symbol = ltorch._torch_to_thunder_function_map[F.binary_cross_entropy_with_logits]

_Weight = torch.Tensor | None


def _of_logits(a: torch.Tensor, target: torch.Tensor, pos_weight: _Weight) -> torch.Tensor:
    if pos_weight is None:
        return a.sigmoid().sub_(target)
    # (1 + (p - 1) y) sigmoid(x) - p y, as in PyTorch's own derivative, beside one temporary.
    slope = a.sigmoid()
    return slope.mul_((target * (pos_weight - 1)).add_(1)).addcmul_(target, pos_weight, value=-1)


def _of_target(a: torch.Tensor, target: torch.Tensor, pos_weight: _Weight) -> torch.Tensor:
    return -a if pos_weight is None else F.logsigmoid(-a).sub_(F.logsigmoid(a).mul_(pos_weight))


def _register_gradient(name: str, derivative: Callable[..., torch.Tensor]) -> Symbol:
    def gradient(
        grad: torch.Tensor,
        a: torch.Tensor,
        target: torch.Tensor,
        weight: _Weight,
        pos_weight: _Weight,
        reduction: str,
    ) -> torch.Tensor:
        result = derivative(a, target, pos_weight).mul_(grad)
        if weight is not None:
            result.mul_(weight)
        return result.div_(a.numel()) if reduction == "mean" else result

    return mem_gradients_ex.register_operator(f"mem_binary_cross_entropy_{name}", meta=_like_logits, fn=gradient)


def _like_logits(grad: TensorProxy, a: TensorProxy, *_: Any) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


_of_a = _register_gradient("backward", _of_logits)
_of_y = _register_gradient("target_backward", _of_target)


def _is_binary_loss(
    a: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    pos_weight: Any = None,
) -> bool:
    if size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        return False
    # PyTorch refuses to differentiate weights.
    fixed = not any(w is not None and w.requires_grad for w in (weight, pos_weight))
    return fixed and is_float(a) and has_dtype_of(a, target, weight, pos_weight) and a.shape == target.shape


def _differentiate(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: TensorProxy | None = None,
) -> TensorProxy:
    out = _operation(a, target, weight, reduction=reduction, pos_weight=pos_weight)
    grad, known = get_grad(out), (a, target, weight, pos_weight, reduction)
    put_grad(a, _of_a(grad, *known))
    put_grad(target, _of_y(grad, *known))
    return out


register(_operation, _is_binary_loss, _differentiate, mem_gradients_ex)


# --- for those who plan ----------------------------------------------------------------------------


def _scratch_bytes(bsym: BoundSymbol) -> int:
    """Temporaries as large as the logits, beside a positive weight: one for their gradient, two for the targets'."""
    _, a, _, _, pos_weight, _ = bsym.args
    return 0 if pos_weight is None else _TEMPORARIES[bsym.sym.name] * dense_bytes(a)


_TEMPORARIES = {_of_a.name: 1, _of_y.name: 2}
_TRAITS = MemoryTraits(scratch_bytes=_scratch_bytes)
declare(mem_gradients_ex, lambda name: _TRAITS if name in _TEMPORARIES else PLAIN)
