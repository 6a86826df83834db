"""Gradients of complex numbers as PyTorch gives them. Thunder 0.2.6 gives them without conjugates, and without a word.

PyTorch's gradient points where a real loss grows fastest: that of z in w = f(z), f being analytic, is the gradient of w
times the conjugate of f'(z). (https://pytorch.org/docs/stable/notes/autograd.html, "Autograd for Complex Numbers".)
Thunder's rules multiply by f'(z), as is right for real numbers. What such a rule multiplies gradients by is computed
from values of the forward alone, so the rule becomes right once its operations on gradients read conjugates of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx
from thunder.core.transforms import _grad_fn_map, augmented_forward_impls, backward_impls, register_grad
from thunder.executors.torchex import _always_executable, _pad_prim_impl, pad_prim_impl
from thunder.executors.torchex import ex as torch_ex

from thunder_mem.torch_functions.whole_gradients import mem_whole_ex

__all__ = ["register_complex"]

_ANALYTIC = (
    *(PrimIDs.MUL, PrimIDs.DIV, PrimIDs.POW, PrimIDs.RECIPROCAL, PrimIDs.RSQRT, PrimIDs.MATMUL, PrimIDs.LINEAR),
    *(PrimIDs.EXP, PrimIDs.LOG, PrimIDs.SIN, PrimIDs.COS, PrimIDs.TANH, PrimIDs.PROD),
    *(ltorch.addmm.id, ltorch.sigmoid.id),
)
"""Whose rules in Thunder depend on their arguments. Those of linear operations are right as they are."""
_ANALYTIC_UNARY = (
    *(PrimIDs.SQRT, PrimIDs.EXP2, PrimIDs.EXPM1, PrimIDs.LOG10, PrimIDs.LOG1P, PrimIDs.LOG2, PrimIDs.TAN),
    *(PrimIDs.SINH, PrimIDs.COSH, PrimIDs.ASIN, PrimIDs.ASINH, PrimIDs.ACOS, PrimIDs.ATAN),
    PrimIDs.ATANH,
)
"""The same, of one argument, with rules in two halves."""

Rule = Callable[..., Any]


def register_complex() -> None:
    """Register gradients of complex numbers in Thunder's tables; those of real ones stay."""
    for prim in _ANALYTIC:
        register_grad(prim, _by_conjugates(_grad_fn_map[prim]))
    for prim in _ANALYTIC_UNARY:
        register_grad(prim, _by_conjugates(_joined(augmented_forward_impls[prim], backward_impls[prim])))
    register_grad(prims.acosh, _by_conjugates(_acosh_grad))
    register_grad(prims.convert_element_type, _convert_grad)
    register_grad(prims.real, _real_grad)
    register_grad(prims.imag, _imag_grad)
    register_grad(_VIEW_AS_REAL, _view_as_real_grad)
    register_grad(_VIEW_AS_COMPLEX, _view_as_complex_grad)
    torch_ex.register_implementation(prims.pad, checker=_always_executable, execution_transform=_pad)


def _joined(forward: Rule, backward: Rule) -> Rule:
    def rule(a: TensorProxy) -> TensorProxy:
        (result, saved) = forward(a)
        prims.put_grad(a, backward(*saved, prims.get_grad(result)))
        return result

    return rule


def _by_conjugates(rule: Rule) -> Rule:
    def conjugating(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_complex(x) for x in args):
            return rule(*args, **kwargs)
        trace = get_tracectx()
        trace.push_scope([])
        result = rule(*args, **kwargs)
        _record_with_conjugates(trace.pop_scope())
        return result

    return conjugating


def _record_with_conjugates(bsyms: list[BoundSymbol]) -> None:
    """Record a rule's operations again; those on gradients read conjugates of all that is no gradient."""
    gradients: dict[str, Any] = {}  # by their names in the rule
    conjugates: dict[str, TensorProxy] = {}
    scope = get_tracectx().peek_scope()

    def read(x: Any) -> Any:
        if isinstance(x, complex):
            return x.conjugate()
        if not _is_complex(x):
            return gradients.get(x.name, x) if isinstance(x, TensorProxy) else x
        if x.name in gradients:
            return gradients[x.name]
        if x.name not in conjugates:
            conjugates[x.name] = ltorch.conj(x)
        return conjugates[x.name]

    for b in bsyms:
        if b.sym is prims.put_grad:
            prims.put_grad(b.args[0], gradients.get(b.args[1].name, b.args[1]))
        elif b.sym is prims.get_grad:
            scope.append(b)
            gradients[b.output.name] = b.output
        elif any(p.name in gradients for p in b.flat_proxy_args):
            gradients[b.output.name] = b.sym(*tree_map(read, b.args), **tree_map(read, b.kwargs))
        else:
            scope.append(b)


def _acosh_grad(a: TensorProxy) -> TensorProxy:
    """By two roots: the one of `a * a - 1` is another branch for half of all complex numbers."""
    result = prims.acosh(a)
    root = ltorch.mul(ltorch.sqrt(ltorch.sub(a, 1)), ltorch.sqrt(ltorch.add(a, 1)))
    prims.put_grad(a, ltorch.true_divide(prims.get_grad(result), root))
    return result


def _convert_grad(a: Any, dtype: Any) -> Any:
    """A real number's gradient is the real part, without PyTorch's warning of what a cast drops."""
    result = prims.convert_element_type(a, dtype)
    g = prims.get_grad(result)
    real = prims.real(g) if _is_complex(result) and not _is_complex(a) else g
    prims.put_grad(a, prims.convert_element_type(real, dtypes.to_dtype(a)))
    return result


def _real_grad(a: TensorProxy) -> TensorProxy:
    result = prims.real(a)
    prims.put_grad(a, prims.convert_element_type(prims.get_grad(result), a.dtype))
    return result


def _imag_grad(a: TensorProxy) -> TensorProxy:
    result = prims.imag(a)
    prims.put_grad(a, ltorch.mul(prims.convert_element_type(prims.get_grad(result), a.dtype), 1j))
    return result


def _view_as_real_grad(a: TensorProxy) -> TensorProxy:
    result = _VIEW_AS_REAL(a)
    prims.put_grad(a, _VIEW_AS_COMPLEX(ltorch.contiguous(prims.get_grad(result))))
    return result


def _view_as_complex_grad(a: TensorProxy) -> TensorProxy:
    result = _VIEW_AS_COMPLEX(a)
    prims.put_grad(a, _VIEW_AS_REAL(_RESOLVE_CONJ(ltorch.contiguous(prims.get_grad(result)))))
    return result


_VIEW_AS_REAL, _VIEW_AS_COMPLEX, _RESOLVE_CONJ = map(
    ltorch._torch_to_thunder_function_map.__getitem__, (torch.view_as_real, torch.view_as_complex, torch.resolve_conj)
)


def _pad_with_real(a: torch.Tensor, value: complex, config: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return _pad_prim_impl(a, value.real, config)


_PAD_COMPLEX = mem_whole_ex.register_operator("pad_complex", meta=prims.pad.meta, fn=_pad_with_real)


def _pad(a: TensorProxy, value: Any, config: Sequence[tuple[int, int, int]]) -> TensorProxy:
    """The gradient of a slice. PyTorch takes no complex number to pad with."""
    is_zero = isinstance(value, complex) and not value.imag
    return (_PAD_COMPLEX if is_zero else pad_prim_impl)(a, value, config)


def _is_complex(x: Any) -> bool:
    return isinstance(x, TensorProxy) and dtypes.is_complex_dtype(x.dtype)
