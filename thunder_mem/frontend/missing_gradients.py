"""Gradients that Thunder 0.2.6 lacks and that losses need, registered when a program is compiled."""

from __future__ import annotations

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


def register_missing() -> None:
    """Register gradients that Thunder lacks."""
    if prims.minimum.id not in _grad_fn_map:
        register_grad(prims.minimum, _minimum_grad)
