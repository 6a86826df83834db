"""What kernels hold while they run, beyond their inputs and outputs: estimates for planning.

The planner needs to know only where the large ones are, so that it runs them when little else is
alive. `scratch.py` measures (on a CPU) or states what a prediction reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from thunder.core.dtypes import bfloat16, float16
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags

from thunder_mem.chunk_loop import is_chunk_loop, scratch_bytes
from thunder_mem.device_bytes import block_bytes

__all__ = ["estimated_scratch_bytes"]

_GEMMS = {PrimIDs.MATMUL, PrimIDs.LINEAR, PrimIDs.CONVOLUTION}
_FLOAT32_BYTES = 4


def estimated_scratch_bytes(bsym: BoundSymbol) -> int:
    """Bytes that the kernel of `bsym` holds for itself, to the accuracy that planning needs.

    - a chunk loop states its own;
    - a 16-bit matrix product on a CPU adds up in a float32 copy of its result, unless the CPU
      multiplies bfloat16 itself;
    - the backward of fused attention holds two blocks of scores on a CPU, and on a GPU adds up the query's
      gradient in float32.
    """
    outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    if not outs:
        return 0
    return block_bytes(_kernel_bytes(bsym, outs), outs[0].device.device_str())


def _kernel_bytes(bsym: BoundSymbol, outs: Sequence[TensorProxy]) -> int:
    if is_chunk_loop(bsym):
        return scratch_bytes(bsym)
    on_cpu = outs[0].device.type == "cpu"
    is_attention_backward = "attention" in bsym.sym.name and "backward" in bsym.sym.name
    if is_attention_backward and on_cpu:
        return _score_blocks_bytes(*outs[:2])
    if outs[0].dtype not in (bfloat16, float16):
        return 0
    if is_attention_backward:
        return _float32_bytes(outs[0])
    if on_cpu and _is_gemm(bsym) and not (outs[0].dtype is bfloat16 and _multiplies_bfloat16()):
        return _float32_bytes(outs[0])
    return 0


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, and so oneDNN kernels that need no wider copy."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)


def _is_gemm(bsym: BoundSymbol) -> bool:
    return any(b.sym.id in _GEMMS for b in (bsym, *bsym.subsymbols)) or has_tags(bsym, {OpTags.MATMUL_OP})


def _score_blocks_bytes(query_grad: TensorProxy, key_grad: TensorProxy) -> int:
    """What one thread of the CPU kernel holds: scores and their gradient, of a block of rows by one of columns.

    More threads hold more, but a plan is the same for every number of them. Read in PyTorch's
    `aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`, `flash_attention_backward_kernel_impl`.
    """
    rows, columns = int(query_grad.shape[-2]), int(key_grad.shape[-2])
    block_rows = 256 if rows >= 768 else 64 if rows >= 192 else 32
    block = min(block_rows, rows) * min(512, columns)
    of_16_bits = query_grad.dtype in (bfloat16, float16)  # are kept a second time, for the products
    return 2 * block * (_FLOAT32_BYTES + (2 if of_16_bits else 0))


def _float32_bytes(p: TensorProxy) -> int:
    return prod(map(int, p.shape)) * _FLOAT32_BYTES
