"""Gradients that Thunder 0.2.6 lacks or confuses, registered when a program is compiled.

Those that it lacks are as in PyTorch's `derivatives.yaml`; that of `addmm` makes no product twice. Of functions that
Thunder passes to PyTorch whole, it keeps the gradients by name, so that `torch.norm` silently gets those of
`torch.linalg.norm`, and `torch.cross`, `torch.svd` and others those of their namesakes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Number
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.clang import maybe_convert_to_dtype
from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import _grad_fn_map, nondifferentiable_vjp_symbols, register_grad
from thunder.executors.torchex import _always_executable
from thunder.executors.torchex import ex as torch_ex
from thunder.executors.torchex import zeros as torch_zeros
from thunder.torch.default_torch_ops import torch_auto_registered_ops
from thunder.transforms.autocast import disable_autocast

from thunder_mem.torch_functions.complex_gradients import register_complex
from thunder_mem.torch_functions.finite_gradients import register_finite
from thunder_mem.torch_functions.steps import wide_dtype
from thunder_mem.torch_functions.whole_gradients import give_gradient

__all__ = ["register_missing"]


def _minimum_grad(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """As in torch: the smaller argument gets the gradient, equal ones get half each, and both get it beside a NaN."""
    fwd = prims.minimum(a, b)
    g = prims.get_grad(fwd)
    shared = ltorch.where(ltorch.eq(a, b), ltorch.true_divide(g, 2.0), g)
    prims.put_grad(a, ltorch.where(ltorch.gt(a, b), 0.0, shared))
    prims.put_grad(b, ltorch.where(ltorch.gt(b, a), 0.0, shared))
    return fwd


def _flip_grad(a: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    fwd = prims.flip(a, dims)
    prims.put_grad(a, prims.flip(prims.get_grad(fwd), dims))
    return fwd


def _round_grad(a: TensorProxy) -> TensorProxy:
    fwd = prims.round(a)
    prims.put_grad(a, ltorch.zeros_like(prims.get_grad(fwd)))
    return fwd


def _trunc_grad(a: TensorProxy) -> TensorProxy:
    fwd = prims.trunc(a)
    prims.put_grad(a, ltorch.zeros_like(prims.get_grad(fwd)))
    return fwd


def _remainder_grad(a: TensorProxy | Number, b: TensorProxy | Number) -> TensorProxy:
    fwd = prims.remainder(a, b)
    g = prims.get_grad(fwd)
    if isinstance(a, TensorProxy):
        prims.put_grad(a, g)
    if isinstance(b, TensorProxy):
        prims.put_grad(b, ltorch.neg(ltorch.mul(g, ltorch.floor(ltorch.true_divide(a, b)))))
    return fwd


def _index_add_grad(a: TensorProxy, index: TensorProxy, value: TensorProxy, dim: int) -> TensorProxy:
    fwd = prims.index_add(a, index, value, dim)
    g = prims.get_grad(fwd)
    prims.put_grad(a, g)
    prims.put_grad(value, ltorch.index_select(g, dim, index))
    return fwd


def _logsumexp_grad(a: TensorProxy, dim: int | Sequence[int], keepdim: bool = False) -> TensorProxy:
    """By the argument and the result, as in PyTorch. Thunder's own saves the exponentials, too."""
    fwd = ltorch.logsumexp(a, dim, keepdim)
    g, result, wide = prims.get_grad(fwd), fwd, wide_dtype(a)
    dims = (dim,) if isinstance(dim, int) else dim
    for d in () if keepdim else sorted(d % a.ndim for d in dims):
        g, result = ltorch.unsqueeze(g, d), ltorch.unsqueeze(result, d)
    share = ltorch.exp(ltorch.sub(maybe_convert_to_dtype(a, wide), maybe_convert_to_dtype(result, wide)))
    prims.put_grad(a, maybe_convert_to_dtype(ltorch.mul(g, share), a.dtype))
    return fwd


def _index_put_grad(
    a: TensorProxy, indices: Sequence[TensorProxy], values: TensorProxy, accumulate: bool = False
) -> TensorProxy:
    """Thunder gives the gradient of the values to the indices."""
    fwd = ltorch.index_put(a, indices, values, accumulate)
    g = prims.get_grad(fwd)
    prims.put_grad(a, g if accumulate else ltorch.index_put(g, indices, ltorch.zeros_like(values)))
    prims.put_grad(values, _summed_to(g[tuple(indices)], values.shape))
    return fwd


def _addmm_grad(bias: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1) -> TensorProxy:
    """By two products. Thunder's own runs the whole function once more."""
    fwd = _ADDMM(bias, a, b, beta=beta, alpha=alpha)
    g = maybe_convert_to_dtype(prims.get_grad(fwd), a.dtype)  # under autocast the result counts as 16 bits
    of_product = g if alpha == 1 else ltorch.mul(g, alpha)
    left, right = (ltorch.transpose(x, 0, 1) for x in (a, b))
    prims.put_grad(a, ltorch.matmul(of_product, right))
    prims.put_grad(b, ltorch.matmul(left, of_product))
    of_bias = _summed_to(g, bias.shape)
    prims.put_grad(bias, of_bias if beta == 1 else ltorch.mul(of_bias, beta))
    return fwd


def _summed_to(g: TensorProxy, shape: Sequence[int]) -> TensorProxy:
    """The gradient of what was broadcast from a shape."""
    missing = g.ndim - len(shape)
    repeated = [d for d in range(g.ndim) if d < missing or (shape[d - missing] == 1 and g.shape[d] != 1)]
    return ltorch.reshape(ltorch.sum(g, repeated), shape) if repeated else g


_ADDMM: Any = ltorch._torch_to_thunder_function_map[torch.addmm]

_MISSING = {
    _ADDMM: _addmm_grad,
    ltorch.index_put: _index_put_grad,
    ltorch.logsumexp: _logsumexp_grad,
    prims.minimum: _minimum_grad,
    prims.flip: _flip_grad,
    prims.remainder: _remainder_grad,
    prims.round: _round_grad,
    prims.trunc: _trunc_grad,
    prims.index_add: _index_add_grad,
}


_WITHOUT_GRADIENT = (PrimIDs.ARGMIN, PrimIDs.ISFINITE, PrimIDs.MULTINOMIAL)
"""Operations that Thunder refuses where an argument has a gradient, though their results have none."""


@cache
def register_missing() -> None:
    """Register gradients that Thunder lacks, once, and give functions of the same name each its own."""
    nondifferentiable_vjp_symbols.update(_WITHOUT_GRADIENT)
    for prim, gradient in _MISSING.items():
        if prim.id not in _grad_fn_map:
            register_grad(prim, gradient)
    register_finite()
    register_complex()
    for symbol in (PrimIDs.LINEAR, PrimIDs.MATMUL, _ADDMM.id):
        register_grad(symbol, disable_autocast()(_grad_fn_map[symbol]))  # the traced program has its casts already
    torch_ex.register_implementation(ltorch.zeros, checker=_always_executable, execution_transform=_zeros)
    _tell_namesakes_apart()


def _zeros(*shape: Any, device: Any = None, dtype: Any = None) -> TensorProxy:
    """Thunder's own of no dims, the gradient of a number that nobody reads, calls `torch.zeros` without a shape."""
    return torch_zeros(*(shape or ((),)), device=to_torch_device(device), dtype=to_torch_dtype(dtype))


def _tell_namesakes_apart() -> None:
    named: dict[str, dict[Symbol, Callable[..., Any]]] = defaultdict(dict)
    for function in (fn for functions in torch_auto_registered_ops.values() for fn in functions):
        symbol: Any = ltorch._torch_to_thunder_function_map[function]
        named[symbol.name].setdefault(symbol, function)  # a method's symbol is the function's
    for symbol, function in (pair for same in named.values() if len(same) > 1 for pair in same.items()):
        give_gradient(symbol, function, f"{str(symbol.id).replace('.', '_')}_vjp")
