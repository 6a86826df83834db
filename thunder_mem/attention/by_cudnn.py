"""Attention by cuDNN, where eager PyTorch prefers it and Thunder knows PyTorch's flash kernel alone.

An H200 runs it in half the time of the flash kernel. The executor takes calls of 16 bits without a mask or dropout on
Hopper, and leaves all others. The backward keeps query, key, value, output and log-sums, as PyTorch does.

Shapes: query and output (B, H, T, D), key and value (B, H, S, D), log-sums (B, H, T).
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad, put_grads
from thunder.extend import OperatorExecutor, register_executor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_mem.attention.call import AttentionCall, backward_meta, forward_meta, last_dim_dense, value_of
from thunder_mem.attention.kernels import ATTENTION_KERNELS, CUDNN, eager_prefers_cudnn
from thunder_mem.runtime.simulated_device import simulated_device
from thunder_mem.semantics.kernel_scratch import CUDNN_BACKWARD, CUDNN_FORWARD
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = ["mem_cudnn_attention_ex"]

mem_cudnn_attention_ex = OperatorExecutor("mem_cudnn_attention", version="0.1")
register_executor(mem_cudnn_attention_ex)

_FORWARD, _BACKWARD = CUDNN_FORWARD, CUDNN_BACKWARD
_KERNEL = ATTENTION_KERNELS[CUDNN]
_LEAST_VERSION = 91501  # earlier ones fail for some lengths, and eager PyTorch does not prefer them


_forward = mem_cudnn_attention_ex.register_operator(
    _FORWARD,
    meta=forward_meta,
    fn=_KERNEL.forward,
    tags=(OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,),
)
_backward = mem_cudnn_attention_ex.register_operator(_BACKWARD, meta=backward_meta, fn=_KERNEL.backward)


def _is_supported(*args: Any, **kwargs: Any) -> bool:
    """Whether cuDNN computes exactly this call, and eager PyTorch would let it; if not, Thunder goes on without it."""
    query, key, value, attn_mask, dropout_p, is_causal, scale = AttentionCall(*args, **kwargs)
    dropout, causal, factor = map(value_of, (dropout_p, is_causal, scale))
    if attn_mask is not None or dropout != 0 or not isinstance(causal, bool):
        return False
    if not (factor is None or isinstance(factor, Number)):
        return False
    return all(isinstance(t, TensorProxy) for t in (query, key, value)) and _is_accepted(query, key, value, causal)


def _is_accepted(query: TensorProxy, key: TensorProxy, value: TensorProxy, is_causal: bool) -> bool:
    """Whether eager PyTorch runs attention on such tensors by cuDNN, without a mask.

    For a simulated GPU PyTorch's own checks cannot be asked: what they ask of shapes and dtypes is asked here.
    """
    tensors = (query, key, value)
    # `shape` would record an operation where sizes are symbolic.
    if not all(len(t._shape) == 4 and all(isinstance(n, int) and n > 0 for n in t._shape) for t in tensors):
        return False
    if key.shape != value.shape or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        return False
    dtype = dtypes.to_strong_dtype(query.dtype)
    if dtype not in (dtypes.float16, dtypes.bfloat16) or any(dtypes.to_strong_dtype(t.dtype) != dtype for t in tensors):
        return False
    if query.shape[3] % 8 or min(query.shape[2], key.shape[2]) < 2 or (is_causal and query.shape[2] != key.shape[2]):
        return False
    if not eager_prefers_cudnn(torch.device(query.device.device_str()), query.shape[3], key.shape[2]):
        return False
    return simulated_device() is not None or _pytorch_accepts(query, key, value, is_causal)


def _pytorch_accepts(query: TensorProxy, key: TensorProxy, value: TensorProxy, is_causal: bool) -> bool:
    if (torch.backends.cudnn.version() or 0) < _LEAST_VERSION:
        return False
    with FakeTensorMode() as mode:
        operands = [_fake(mode, t) for t in (query, key, value)]
    describe: Any = torch.backends.cuda.SDPAParams
    shared_keys = (False,) if hasattr(describe, "enable_gqa") else ()  # from torch 2.5 on
    return torch.backends.cuda.can_use_cudnn_attention(describe(*operands, None, 0.0, is_causal, *shared_keys), False)


def _fake(mode: FakeTensorMode, p: TensorProxy) -> FakeTensor:
    """As Thunder asks about its kernels."""
    shown = torch.empty(p.shape, dtype=to_torch_dtype(p.dtype), device="meta", requires_grad=p.requires_grad)
    return FakeTensor(mode, shown, device=torch.device(p.device.device_str()))


def _execute(*args: Any, **kwargs: Any) -> TensorProxy:
    query, key, value, _, _, is_causal, scale = AttentionCall(*args, **kwargs)
    out, _ = _forward(query, key, value, is_causal, scale)
    return out


def _differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
    query, key, value, _, _, is_causal, scale = AttentionCall(*args, **kwargs)
    out, log_sums = _forward(query, key, value, is_causal, scale)
    put_grads((query, key, value), _backward(get_grad(out), query, key, value, out, log_sums, is_causal, scale))
    return out


mem_cudnn_attention_ex.register_implementation(
    ltorch.scaled_dot_product_attention,
    checker=_is_supported,
    execution_transform=_execute,
    grad_transform=_differentiate,
)


# --- for those who plan ----------------------------------------------------------------------------


def _scratch_bytes(bsym: BoundSymbol) -> int:
    backward = bsym.sym.name == _BACKWARD
    query, key = bsym.args[backward : backward + 2]
    held_bytes = _KERNEL.backward_bytes if backward else _KERNEL.forward_bytes
    return held_bytes(query.shape, key.shape, query.dtype.bytes)


def _result_layouts(bsym: BoundSymbol, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output lies as the query does, the query's gradient as (B, T, H, D), and the others as their operands."""
    if bsym.sym.name == _FORWARD:
        return {bsym.output[0].name: torch.empty_like(last_dim_dense(arguments[bsym.args[0].name]))}
    query, key, value = (last_dim_dense(arguments[p.name]) for p in bsym.args[1:4])
    of_query = query.transpose(1, 2).new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    found = of_query, torch.empty_like(key), torch.empty_like(value)
    return {p.name: t for p, t in zip(bsym.output, found, strict=True)}


_TRAITS = MemoryTraits(
    result_layouts=_result_layouts,
    scratch_bytes=_scratch_bytes,
    attention_kernel=lambda bsym: CUDNN,
    products=True,
)
declare(mem_cudnn_attention_ex, lambda name: _TRAITS if name in (_FORWARD, _BACKWARD) else PLAIN)
