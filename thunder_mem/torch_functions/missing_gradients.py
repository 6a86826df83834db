"""Gradients that Thunder 0.2.6 lacks, as in PyTorch's `derivatives.yaml`, registered when a program is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import _grad_fn_map, register_grad

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


def _index_add_grad(a: TensorProxy, index: TensorProxy, value: TensorProxy, dim: int) -> TensorProxy:
    fwd = prims.index_add(a, index, value, dim)
    g = prims.get_grad(fwd)
    prims.put_grad(a, g)
    prims.put_grad(value, ltorch.index_select(g, dim, index))
    return fwd


_MISSING = {
    prims.minimum: _minimum_grad,
    prims.flip: _flip_grad,
    prims.round: _round_grad,
    prims.trunc: _trunc_grad,
    prims.index_add: _index_add_grad,
}


def register_missing() -> None:
    """Register gradients that Thunder lacks."""
    for prim, gradient in _MISSING.items():
        if prim.id not in _grad_fn_map:
            register_grad(prim, gradient)
