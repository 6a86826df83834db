"""Which kernel runs an attention: that of the first executor that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import thunder.torch as ltorch
from thunder.core.symbol import BoundSymbol
from thunder.executors import sdpaex
from thunder.executors.utils import SpdaBackend

from thunder_mem.attention.by_cudnn import mem_cudnn_attention_ex
from thunder_mem.attention.kernels import CPU, CUDNN, FLASH
from thunder_mem.attention.on_cpu import mem_attention_ex

__all__ = ["kernel_for", "plain_call"]

_OPERANDS = ("query", "key", "value")
_ARGUMENTS = (*_OPERANDS, "attn_mask", "dropout_p", "is_causal")


def plain_call(bsym: BoundSymbol) -> dict[str, Any] | None:
    """The arguments of an attention of known sizes, without a mask or dropout; None for anything else."""
    if bsym.sym != ltorch.scaled_dot_product_attention:
        return None
    call = dict(zip(_ARGUMENTS, bsym.args, strict=False)) | dict(bsym.kwargs)
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    call = defaults | call
    tensors = [call[name] for name in _OPERANDS]
    plain = isinstance(call["is_causal"], bool) and (call["scale"] is None or isinstance(call["scale"], Number))
    if call["attn_mask"] is not None or call["dropout_p"] != 0.0 or not plain or set(call) - {*_ARGUMENTS, "scale"}:
        return None
    if not all(t.ndim == 4 and all(isinstance(n, int) for n in t.shape) for t in tensors):
        return None
    return call if len({t.shape[-1] for t in tensors}) == 1 else None


def kernel_for(bsym: BoundSymbol, call: Mapping[str, Any], executors: Sequence[Any]) -> str | None:
    """The kernel that runs an attention, a key of `ATTENTION_KERNELS`; None if another kernel does.

    Args:
        bsym: the attention.
        call: its arguments, see `plain_call`.
        executors: the user's, in order of preference.
    """
    first = next((e for e in executors if _can_execute(e, bsym)), None)
    if first is mem_attention_ex:
        return CPU
    if first is mem_cudnn_attention_ex:
        return CUDNN
    return FLASH if first is sdpaex.sdpa_ex and _is_flash(call) else None


def _can_execute(executor: Any, bsym: BoundSymbol) -> bool:
    try:
        return bool(executor.can_execute(bsym))
    except NotImplementedError:  # of fusion executors that take no single operation
        return False


def _is_flash(call: Mapping[str, Any]) -> bool:
    query, key, value = (call[name] for name in _OPERANDS)
    choice = sdpaex._fused_sdp_choice(query, key, value, None, 0.0, call["is_causal"], call["scale"])
    return choice == SpdaBackend.FLASH_ATTENTION and query.shape[-1] % 8 == 0
