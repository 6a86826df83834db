"""Gradients that are numbers where Thunder's rules give NaN: quotients of infinities, or infinities times 0.

A mask that adds -1e9 before a sigmoid, an ELU of 100, or a product of which a factor is 0 is enough for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import thunder.torch as ltorch
from thunder.clang import maybe_convert_to_dtype
from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, pyval
from thunder.core.transforms import _grad_fn_map, register_grad

from thunder_mem.torch_functions.steps import wide_dtype

__all__ = ["register_finite"]

Rule = Callable[..., Any]


def register_finite() -> None:
    """Register them in Thunder's table."""
    register_grad(prims.pow, _pow_grad(_grad_fn_map[PrimIDs.POW]))
    for symbol, rule in _RULES.items():
        register_grad(symbol, rule)


def _pow_grad(for_numbers: Rule) -> Rule:
    """That of the exponent is 0 where 0 is raised to it, as in PyTorch; that of the base is 0 for an exponent of 0."""

    def rule(a: TensorProxy | Number, b: TensorProxy | Number) -> Any:
        if not (isinstance(a, TensorProxy) and isinstance(b, TensorProxy)):
            return for_numbers(a, b) if isinstance(b, TensorProxy) or pyval(b) != 0 else _constant_power(a, b)
        result = prims.pow(a, b)
        g = prims.get_grad(result)
        slope = ltorch.mul(b, ltorch.pow(a, ltorch.sub(b, 1)))
        prims.put_grad(a, ltorch.mul(g, ltorch.where(ltorch.eq(b, 0), 0, slope)))
        is_zero = ltorch.eq(a, 0)
        if dtypes.is_complex_dtype(a.dtype):
            is_flat = ltorch.logical_and(ltorch.ge(ltorch.real(b), 0), ltorch.eq(ltorch.imag(b), 0))
        else:
            is_flat = ltorch.ge(b, 0)
        slope = ltorch.mul(result, ltorch.log(a))
        prims.put_grad(b, ltorch.mul(g, ltorch.where(ltorch.logical_and(is_zero, is_flat), 0, slope)))
        return result

    return rule


def _constant_power(a: TensorProxy, b: Number) -> TensorProxy:
    result = prims.pow(a, b)
    prims.put_grad(a, ltorch.zeros_like(prims.get_grad(result)))
    return result


def _prod_grad(a: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """Beside zeros, by which Thunder's own divides, the product of all others; 0 if another one is 0."""
    result = prims.prod(a, dims)
    g = prims.get_grad(result)
    is_zero = ltorch.eq(a, 0)
    factors = ltorch.where(is_zero, 1, a)
    product, zeros = prims.prod(factors, dims), ltorch.sum(is_zero, dims)
    for d in sorted(dims):
        g, product, zeros = (ltorch.unsqueeze(x, d) for x in (g, product, zeros))
    others = ltorch.where(is_zero, ltorch.sub(zeros, 1), zeros)
    slope = ltorch.true_divide(product, factors)  # times 0 below, so that what is no number stays so
    prims.put_grad(a, ltorch.mul(g, ltorch.where(ltorch.eq(others, 0), slope, ltorch.mul(slope, 0))))
    return result


def _sigmoid_grad(a: TensorProxy) -> TensorProxy:
    """By the result. Thunder's own divides the square of an exponential by another."""
    result = ltorch.sigmoid(a)
    shown = maybe_convert_to_dtype(result, wide_dtype(result))
    slope = ltorch.mul(shown, ltorch.sub(1, shown))
    return _with_slope(a, result, slope)


def _mish_grad(a: TensorProxy, inplace: bool = False) -> TensorProxy:
    result = ltorch.mish(a, inplace)
    wide = maybe_convert_to_dtype(a, wide_dtype(a))
    shown = ltorch.tanh(ltorch.softplus(wide))
    slope = ltorch.add(
        shown, ltorch.mul(ltorch.mul(wide, ltorch.sigmoid(wide)), ltorch.sub(1, ltorch.mul(shown, shown)))
    )
    return _with_slope(a, result, slope)


def _elu_grad(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> TensorProxy:
    return _linear_above_0(a, ltorch.elu(a, alpha, inplace), 1.0, lambda x: ltorch.mul(ltorch.exp(x), alpha))


def _celu_grad(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> TensorProxy:
    return _linear_above_0(a, ltorch.celu(a, alpha, inplace), 1.0, lambda x: ltorch.exp(ltorch.true_divide(x, alpha)))


def _selu_grad(a: TensorProxy, inplace: bool = False) -> TensorProxy:
    """With the constants of Klambauer et al. (2017)."""
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return _linear_above_0(a, ltorch.selu(a, inplace), scale, lambda x: ltorch.mul(ltorch.exp(x), scale * alpha))


def _linear_above_0(a: TensorProxy, result: TensorProxy, slope: float, below: Rule) -> TensorProxy:
    """The gradient of an activation, whose slope is constant above 0, and `below` of its argument elsewhere."""
    wide = maybe_convert_to_dtype(a, wide_dtype(a))
    slopes = ltorch.where(ltorch.gt(wide, 0), slope, below(wide))
    return _with_slope(a, result, slopes)


def _with_slope(a: TensorProxy, result: TensorProxy, slope: TensorProxy) -> TensorProxy:
    prims.put_grad(a, maybe_convert_to_dtype(ltorch.mul(prims.get_grad(result), slope), a.dtype))
    return result


_RULES: dict[Any, Rule] = {
    prims.prod: _prod_grad,
    ltorch.sigmoid: _sigmoid_grad,
    ltorch.mish: _mish_grad,
    ltorch.elu: _elu_grad,
    ltorch.celu: _celu_grad,
    ltorch.selu: _selu_grad,
}
