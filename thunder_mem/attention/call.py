"""A call of attention: its arguments, and what the results of all kernels look like."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from thunder.core import dtypes
from thunder.core.proxies import NumberProxy, TensorProxy, pyval

__all__ = ["AttentionCall", "backward_meta", "forward_meta", "last_dim_dense", "log_sums_like", "value_of"]


def value_of(x: Any) -> Any:
    """The number of a proxy of one; anything else as it is."""
    return pyval(x) if isinstance(x, NumberProxy) else x


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None


def last_dim_dense(a: torch.Tensor) -> torch.Tensor:
    """Make the last dim dense, because the kernels ignore its stride."""
    return a if a.stride(-1) == 1 else a.contiguous()


def forward_meta(query: TensorProxy, *_: Any) -> tuple[TensorProxy, TensorProxy]:
    """The output and its log-sums, in both kernels' forward."""
    log_sums = log_sums_like(query)
    return TensorProxy(like=query), log_sums


def log_sums_like(query: TensorProxy) -> TensorProxy:
    """The logarithm of each row's sum of weights: (B, H, T), at least float32."""
    wide = dtypes.float64 if dtypes.to_strong_dtype(query.dtype) is dtypes.float64 else dtypes.float32
    return TensorProxy(shape=query.shape[:3], dtype=wide, device=query.device, requires_grad=False)


def backward_meta(
    grad_out: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """The gradients of query, key and value."""
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)
