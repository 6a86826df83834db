"""Attention on the CPU by PyTorch's own flash kernel, forward and backward.

Without it Thunder decomposes `scaled_dot_product_attention` on a CPU into matrices of shape (B, H, T, S), so figures
measured there would not apply to a GPU. `mem_attention_ex` claims the operation if the kernel supports it, and leaves
other calls to Thunder. The backward keeps query, key, value, output and the log-sum-exp, as PyTorch does. The kernels
are `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, and the checks follow
`aten/src/ATen/native/transformers/sdp_utils_cpp.cpp`.

Shapes: query and output (B, H, T, D), key and value (B, H, S, D), log-sum-exp (B, H, T).
"""

from __future__ import annotations

from numbers import Number
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.devices import DeviceType
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.extend import OperatorExecutor, register_executor

from thunder_mem.attention.call import AttentionCall, backward_meta, forward_meta, last_dim_dense, value_of

__all__ = ["mem_attention_ex"]

mem_attention_ex = OperatorExecutor("mem_attention", version="0.1")
register_executor(mem_attention_ex)

_DTYPES = (dtypes.float64, dtypes.float32, dtypes.bfloat16, dtypes.float16)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(last_dim_dense, (query, key, value)),
        0.0,
        is_causal,
        attn_mask=None if attn_mask is None else last_dim_dense(attn_mask),
        scale=scale,
    )
    # PyTorch's meta function says float32 even for float64, where the kernel gives float64: this does
    # nothing on a real tensor and tells a fake one the truth.
    return out, logsumexp.to(torch.float64) if query.dtype == torch.float64 else logsumexp


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(last_dim_dense, (grad_out, query, key, value, out)),
        logsumexp,
        0.0,
        is_causal,
        attn_mask=None if attn_mask is None else last_dim_dense(attn_mask),
        scale=scale,
    )


def _mask_grad(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    attn_mask: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """The gradient of an additive mask, P * (dO V' - rowsum(dO * O)), summed to the mask's shape.

    The kernel does not give it, and it is as large as the mask, so this may hold (B, H, T, S) matrices.
    """
    wide = logsumexp.dtype
    grad_out, query, key, value, out = (t.to(wide) for t in (grad_out, query, key, value, out))
    scores = (query * (scale if scale is not None else query.shape[-1] ** -0.5)) @ key.mT + attn_mask
    # A row that is masked out entirely has no finite log-sum-exp and no weights.
    weights = torch.where(logsumexp.isfinite()[..., None], (scores - logsumexp[..., None]).exp(), 0)
    grad = weights * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return grad.sum_to_size(attn_mask.shape).to(attn_mask.dtype)


attention_forward = mem_attention_ex.register_operator(
    "mem_attention_forward",
    meta=forward_meta,
    fn=_forward,
    tags=(OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,),  # a symbol is hashed: no list
)
attention_backward = mem_attention_ex.register_operator("mem_attention_backward", meta=backward_meta, fn=_backward)
attention_mask_grad = mem_attention_ex.register_operator(
    "mem_attention_mask_grad",
    meta=lambda grad_out, query, key, value, out, logsumexp, attn_mask, scale: TensorProxy(like=attn_mask),
    fn=_mask_grad,
)


def _is_supported(*args: Any, **kwargs: Any) -> bool:
    """Whether the kernel computes exactly this call; if not, Thunder continues without this executor."""
    query, key, value, attn_mask, dropout_p, is_causal, scale = AttentionCall(*args, **kwargs)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(isinstance(t, TensorProxy) and t.device.devicetype is DeviceType.CPU for t in tensors):
        return False
    # `shape` would record an operation where sizes are symbolic; the kernel takes no symbols.
    if not all(isinstance(n, int) for t in tensors for n in t._shape):
        return False
    if not all(t.ndim == 4 and t.numel > 0 for t in (query, key, value)):
        return False
    if not all(t.shape[:2] == query.shape[:2] and t.shape[3] == query.shape[3] for t in (key, value)):
        return False
    if key.shape != value.shape or dtypes.to_strong_dtype(query.dtype) not in _DTYPES:
        return False
    if any(dtypes.to_strong_dtype(t.dtype) != dtypes.to_strong_dtype(query.dtype) for t in (key, value)):
        return False
    if value_of(dropout_p) != 0 or not (scale is None or isinstance(value_of(scale), Number)):
        return False
    if attn_mask is None:
        return True
    if value_of(is_causal) or attn_mask.ndim > 4:
        return False
    if not (dtypes.is_boolean_dtype(attn_mask.dtype) or dtypes.is_float_dtype(attn_mask.dtype)):
        return False
    full_shape = (*query.shape[:3], key.shape[2])
    return all(m in (1, n) for m, n in zip(reversed(attn_mask.shape), reversed(full_shape), strict=False))


def _additive_mask(attn_mask: TensorProxy | None, query: TensorProxy) -> TensorProxy | None:
    """The mask in the kernel's form: 4-d, additive, in query's dtype.

    It is part of the trace, not hidden in the operator, so that a plan may keep a boolean mask and recompute it.
    """
    if attn_mask is None:
        return None
    if dtypes.is_boolean_dtype(attn_mask.dtype):
        kept = ltorch.zeros((), dtype=query.dtype, device=query.device)
        mask = ltorch.where(attn_mask, kept, -float("inf"))
    else:
        mask = ltorch.to(attn_mask, query.dtype)
    return ltorch.reshape(mask, (1,) * (4 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 4 else mask


def _execute(*args: Any, **kwargs: Any) -> TensorProxy:
    query, key, value, attn_mask, _, is_causal, scale = AttentionCall(*args, **kwargs)
    out, _ = attention_forward(query, key, value, _additive_mask(attn_mask, query), is_causal, scale)
    return out


def _differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
    query, key, value, attn_mask, _, is_causal, scale = AttentionCall(*args, **kwargs)
    mask = _additive_mask(attn_mask, query)
    out, logsumexp = attention_forward(query, key, value, mask, is_causal, scale)
    grad_out = get_grad(out)
    grads = attention_backward(grad_out, query, key, value, out, logsumexp, mask, is_causal, scale)
    put_grads((query, key, value), grads)
    if attn_mask is not None and dtypes.is_float_dtype(attn_mask.dtype):
        # A separate operator: if nobody needs this gradient, it is dead code and disappears.
        grad_mask = attention_mask_grad(grad_out, query, key, value, out, logsumexp, mask, scale)
        put_grad(attn_mask, ltorch.to(ltorch.reshape(grad_mask, attn_mask.shape), attn_mask.dtype))
    return out


mem_attention_ex.register_implementation(
    ltorch.scaled_dot_product_attention,
    checker=_is_supported,
    execution_transform=_execute,
    grad_transform=_differentiate,
)
