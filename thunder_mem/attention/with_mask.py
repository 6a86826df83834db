"""Attention with a mask on a GPU, by PyTorch's memory-efficient kernel, called as eager PyTorch calls it.

Thunder calls the same kernel with a mask that it copies for each head, and lets it make a gradient of that mask whether
or not anything reads it: two matrices of (B, H, T, S) in every backward. It refuses masks that broadcast over batches.
Here a mask is shown for all batches and heads without a copy, and its gradient is made only if the program reads it.

After `scaled_dot_product_attention` in PyTorch's `aten/src/ATen/native/transformers/attention.cpp` and
`_efficient_attention_backward` in `cuda/attention_backward.cu`.

Shapes: query and output (B, H, T, D), key and value (B, H, S, D), mask broadcast to (B, H, T, S), log-sums
(B, H, T rounded up to 32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.devices import DeviceType
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad
from thunder.executors import sdpaex
from thunder.executors.utils import SpdaBackend
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_mem.attention.call import AttentionCall, last_dim_dense, value_of
from thunder_mem.kernels.kernel_executor import Mask, is_float, put_asked, register_several
from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.semantics.kernel_scratch import efficient_backward_bytes
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = ["mem_masked_attention_ex"]

mem_masked_attention_ex = OperatorExecutor("mem_masked_attention", version="0.1")
register_executor(mem_masked_attention_ex)

_FORWARD, _BACKWARD = "mem_scaled_dot_product_masked", "mem_scaled_dot_product_masked_backward"
_ALIGNED = 8  # elements: what the kernel reads at once
_GRADIENT_ALIGNED = 16  # elements of a row of the mask's gradient, as the kernel makes it
_aten = torch.ops.aten


# --- the mask that the kernel reads ----------------------------------------------------------------


def _shown(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as numbers to add to the scores, shown as (B, H, T, S); a copy only if the kernel cannot read it."""
    columns = key.shape[2]
    mask = mask.expand(*mask.shape[:-1], columns)
    if mask.dtype is not query.dtype or not _is_aligned(mask):
        held = torch.zeros((*mask.shape[:-1], _up(columns, _ALIGNED)), dtype=query.dtype, device=query.device)
        held = held[..., :columns]
        mask = held.masked_fill_(mask.logical_not(), -math.inf) if mask.dtype is torch.bool else held.copy_(mask)
    return mask.expand(*query.shape[:3], columns)


def _is_aligned(mask: Tensor) -> bool:
    """Whether each row is dense and starts where the kernel can read."""
    strides = (step for n, step in zip(mask.shape[:-1], mask.stride()[:-1], strict=True) if n > 1)
    return mask.stride(-1) == 1 and not any(n % _ALIGNED for n in (*strides, mask.storage_offset()))


def _up(n: int, unit: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // unit) * unit


# --- the operators ---------------------------------------------------------------------------------


def _forward_meta(query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any) -> tuple[TensorProxy, ...]:
    batch, heads, rows, _size = query.shape
    sums = TensorProxy(like=query, shape=(batch, heads, _up(rows, 32)), dtype=dtypes.float32, requires_grad=False)
    seed, offset = (TensorProxy(like=query, shape=(), dtype=dtypes.int64, requires_grad=False) for _ in range(2))
    return TensorProxy(like=query, shape=(batch, heads, rows, value.shape[3])), sums, seed, offset


def _run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    query, key, value = map(last_dim_dense, (query, key, value))
    shown = _shown(mask, query, key)
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, shown, True, dropout_p, is_causal, scale=scale
    )


def _backward_meta(
    grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, mask: TensorProxy, *_: Any
) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=p, requires_grad=False) for p in (query, key, value, mask))


def _run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    out: Tensor,
    log_sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    made: Mask,
) -> tuple[Tensor | None, ...]:
    query, key, value = map(last_dim_dense, (query, key, value))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel does not read its strides
    *grads, of_mask = _aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, _shown(mask, query, key), out, log_sums, seed, offset, dropout_p,
        [True, True, True, made[3]], is_causal, scale=scale,
    )  # fmt: skip
    if not made[3]:
        return *grads, None
    of_mask = of_mask.sum_to_size(mask.shape)  # the gradient of all heads goes before the next copy
    return *grads, of_mask.to(mask.dtype)


_forward = mem_masked_attention_ex.register_operator(
    _FORWARD, meta=_forward_meta, fn=_run_forward, tags=(OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,)
)
_backward = register_several(_BACKWARD, _backward_meta, _run_backward, mem_masked_attention_ex)


# --- the executor ----------------------------------------------------------------------------------


def _is_supported(*args: Any, **kwargs: Any) -> bool:
    """Whether it has a mask, and eager PyTorch runs it by this kernel; if not, Thunder goes on without it."""
    query, key, value, mask, dropout_p, is_causal, scale = AttentionCall(*args, **kwargs)
    tensors = (query, key, value, mask)
    if mask is None or not all(type(t) is TensorProxy and t.device.devicetype is DeviceType.CUDA for t in tensors):
        return False
    if not (isinstance(value_of(dropout_p), Number) and isinstance(value_of(scale), Number | None)):
        return False
    if value_of(is_causal) is not False or not all(is_float(t) and t.ndim == 4 for t in (query, key, value)):
        return False
    if not _fits(mask, query, key):
        return False
    choice = sdpaex._fused_sdp_choice(query, key, value, mask, value_of(dropout_p), False, value_of(scale))
    return choice is SpdaBackend.MEMORY_EFFICIENT


def _fits(mask: TensorProxy, query: TensorProxy, key: TensorProxy) -> bool:
    """Whether it is a mask of known sizes that broadcasts to the scores."""
    if not (dtypes.is_boolean_dtype(mask.dtype) or is_float(mask)) or not 2 <= mask.ndim <= 4:
        return False
    scores = (*query.shape[:3], key.shape[2])
    return all(isinstance(n, int) and n in (1, of) for n, of in zip(mask._shape, scores[-mask.ndim :], strict=True))


def _execute(*args: Any, **kwargs: Any) -> TensorProxy:
    *operands, dropout_p, is_causal, scale = AttentionCall(*args, **kwargs)
    return _forward(*operands, dropout_p, is_causal, scale)[0]


def _differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
    *operands, dropout_p, is_causal, scale = AttentionCall(*args, **kwargs)
    made = (True, True, True, not dtypes.is_boolean_dtype(operands[3].dtype))
    out, *kept = _forward(*operands, dropout_p, is_causal, scale)
    put_asked(operands, made, _backward(get_grad(out), *operands, out, *kept, dropout_p, is_causal, scale, made))
    return out


mem_masked_attention_ex.register_implementation(
    ltorch.scaled_dot_product_attention,
    checker=_is_supported,
    execution_transform=_execute,
    grad_transform=_differentiate,
)


# --- for those who plan ----------------------------------------------------------------------------


def _scratch_bytes(bsym: BoundSymbol) -> int:
    """The bytes of a mask of another dtype as numbers, and in the backward of the kernel and the mask's gradient.

    Results exist while the kernel runs, but not yet while the mask is made, nor the mask's own gradient before its sum.
    """
    backward = bsym.sym.name == _BACKWARD
    query, key, _, mask = bsym.args[backward : backward + 4]
    device, columns = query.device.device_str(), int(key.shape[2])
    mask_bytes = 0 if mask.dtype == query.dtype else _copy_bytes(mask, query, columns)
    negated_bytes = block_bytes(mask.numel, device) if dtypes.is_boolean_dtype(mask.dtype) else 0
    results = [block_bytes(p.numel * p.dtype.bytes, device) for p in bsym.flat_proxy_outs if p.ndim]  # no states
    kernel_bytes = block_bytes(efficient_backward_bytes(query.shape), device) if backward else 0
    after_bytes = 0
    if backward and bsym.args[-1][3] and not _is_gradient_as_made(mask, query, columns):
        made_bytes = math.prod(query.shape[:3]) * _up(columns, _GRADIENT_ALIGNED) * query.dtype.bytes
        not_yet_bytes = block_bytes(made_bytes, device) - results[-1]
        is_sum = not _is_for_each_head(mask, query, columns)
        summed_bytes = block_bytes(mask.numel * query.dtype.bytes, device) if is_sum else results[-1]
        kernel_bytes, after_bytes = kernel_bytes + not_yet_bytes, summed_bytes + not_yet_bytes
    return max(mask_bytes + negated_bytes - sum(results), mask_bytes + kernel_bytes, after_bytes, 0)


def _copy_bytes(mask: TensorProxy, query: TensorProxy, columns: int) -> int:
    rows = math.prod(map(int, mask.shape[:-1]))
    return block_bytes(rows * _up(columns, _ALIGNED) * query.dtype.bytes, query.device.device_str())


def _is_for_each_head(mask: TensorProxy, query: TensorProxy, columns: int) -> bool:
    """Whether the mask has the shape of the scores, so that its gradient is no sum."""
    return tuple(map(int, mask.shape)) == (*map(int, query.shape[:3]), columns)


def _is_gradient_as_made(mask: TensorProxy, query: TensorProxy, columns: int) -> bool:
    """Whether the kernel's own gradient is the mask's."""
    return mask.dtype == query.dtype and _is_for_each_head(mask, query, columns)


def _copies_bytes(bsym: BoundSymbol, layout: Mapping[str, Tensor]) -> int:
    """The bytes of operands, and of a mask of the query's dtype, that do not lie as the kernel reads them."""
    backward = bsym.sym.name == _BACKWARD
    *operands, mask = bsym.args[backward : backward + 4]
    device = mask.device.device_str()
    lying = [layout[p.name] for p in operands]
    copied_bytes = sum(block_bytes(t.numel() * t.element_size(), device) for t in lying if t.stride(-1) != 1)
    query, columns = operands[0], int(operands[1].shape[2])
    shown = layout[mask.name]
    if mask.dtype == query.dtype and not _is_aligned(shown.expand(*shown.shape[:-1], columns)):
        copied_bytes += _copy_bytes(mask, query, columns)
    return copied_bytes


def _result_layouts(bsym: BoundSymbol, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of query, key and value lie as (B, T, H, D); the mask's has longer rows."""
    if bsym.sym.name == _FORWARD:
        return {bsym.output[0].name: _by_rows(bsym.output[0])}
    made: Mask = bsym.args[-1]
    found = {p.name: _by_rows(p) for p in bsym.output[: sum(made[:3])]}
    if not made[3]:
        return found
    query, mask, of_mask = bsym.args[1], bsym.args[4], bsym.output[-1]
    *rows, columns = map(int, mask.shape)
    if _is_gradient_as_made(mask, query, int(bsym.args[2].shape[2])):
        held = torch.empty((*rows, _up(columns, _GRADIENT_ALIGNED)), dtype=to_torch_dtype(mask.dtype), device="meta")
        found[of_mask.name] = held[..., :columns]
    return found


def _by_rows(p: TensorProxy) -> Tensor:
    batch, heads, rows, size = map(int, p.shape)
    return torch.empty((batch, rows, heads, size), dtype=to_torch_dtype(p.dtype), device="meta").transpose(1, 2)


_TRAITS = MemoryTraits(
    result_layouts=_result_layouts, scratch_bytes=_scratch_bytes, copies_bytes=_copies_bytes, products=True
)
declare(mem_masked_attention_ex, lambda name: _TRAITS if name in (_FORWARD, _BACKWARD) else PLAIN)
