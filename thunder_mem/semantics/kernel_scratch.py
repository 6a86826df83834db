"""Estimates of the scratch of kernels, for planning.

The planner only needs to know the large ones, so that it runs them when little else is alive. A prediction reports the
scratch that `fake_execution/scratch.py` measures (on a CPU) or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, prod

import torch
from thunder.core.dtypes import bfloat16, float16
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags

from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.memory.kernel_figures import KernelFigures
from thunder_mem.semantics.layout import Layout
from thunder_mem.semantics.op_traits import traits_of

__all__ = [
    "FLASH_BACKWARD",
    "empty_outputs",
    "estimated_scratch_bytes",
    "flash_backward_bytes",
    "region_scratch_bytes",
    "score_blocks_bytes",
]

FLASH_BACKWARD = "sdpafx_scaled_dot_product_efficient_attention_backward"
"""Thunder's name for the backward of flash attention on a GPU."""

_FLASH_FORWARD = "sdpafx_grad_forward_scaled_dot_product_efficient_attention"

_GEMMS = {PrimIDs.MATMUL, PrimIDs.LINEAR, PrimIDs.CONVOLUTION}
_FLOAT32_BYTES = 4


def estimated_scratch_bytes(bsym: BoundSymbol) -> int:
    """The scratch bytes of the kernel of `bsym`, to the accuracy that planning needs.

    - a chunk loop and a parameter's update state their own;
    - a 16-bit matrix product on a CPU adds up in a float32 copy of its result, unless the CPU
      multiplies bfloat16 itself;
    - the backward of fused attention holds two blocks of scores on a CPU;
    - on a GPU it adds up the query's gradient in float32, for flash attention with the padding that
      `fake_execution/operator_scratch.py` also states.
    """
    outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    tensor = next((p for p in (*outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy)), None)
    return 0 if tensor is None else block_bytes(_kernel_bytes(bsym, outs), tensor.device.device_str())


def _kernel_bytes(bsym: BoundSymbol, outs: Sequence[TensorProxy]) -> int:
    if (declared := traits_of(bsym).scratch_bytes) is not None:
        return declared(bsym)
    if not outs:
        return 0
    if bsym.sym.name == FLASH_BACKWARD:
        _, query, key, *_ = (p for p in bsym.flat_args if isinstance(p, TensorProxy))
        return flash_backward_bytes(query.shape, key.shape, key.dtype.bytes)
    on_cpu = outs[0].device.type == "cpu"
    is_attention_backward = "attention" in bsym.sym.name and "backward" in bsym.sym.name
    if is_attention_backward and on_cpu:
        query_grad, key_grad = outs[:2]
        return score_blocks_bytes(query_grad.shape[-2], key_grad.shape[-2], query_grad.dtype.bytes)
    if outs[0].dtype not in (bfloat16, float16):
        return 0
    if is_attention_backward:
        return _float32_bytes(outs[0])
    if on_cpu and _is_gemm(bsym) and not (outs[0].dtype is bfloat16 and _multiplies_bfloat16()):
        return _float32_bytes(outs[0])
    return 0


def region_scratch_bytes(bsym: BoundSymbol, layout: Layout) -> int:
    """Bytes kept between the kernels of a `mem_pointwise` region on a GPU; 0 for all other bound symbols.

    `layout` has the region's arguments.
    """
    figures = traits_of(bsym).kernels(bsym, layout)
    return figures.scratch_bytes if isinstance(figures, KernelFigures) else 0


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, and so oneDNN kernels that need no wider copy."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)


def _is_gemm(bsym: BoundSymbol) -> bool:
    return any(b.sym.id in _GEMMS for b in (bsym, *bsym.subsymbols)) or has_tags(bsym, {OpTags.MATMUL_OP})


def score_blocks_bytes(rows: int, columns: int, element_bytes: int) -> int:
    """The scratch of one thread of the CPU kernel: scores and their gradient, a block of rows by a block of columns.

    More threads hold more, but a plan must not depend on their number. The source is PyTorch's
    `aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`, `flash_attention_backward_kernel_impl`.

    Args:
        rows, columns: of the scores of one head.
        element_bytes: of a query.
    """
    rows, columns = int(rows), int(columns)
    block_rows = 256 if rows >= 768 else 64 if rows >= 192 else 32
    block = min(block_rows, rows) * min(512, columns)
    # Values of 16 bits are kept a second time, for the products.
    return 2 * block * (_FLOAT32_BYTES + (2 if element_bytes == 2 else 0))


def empty_outputs(bsym: BoundSymbol) -> Sequence[TensorProxy]:
    """The results of flash attention's forward in Thunder's trace that the kernel does not make.

    Batches without padding have no sequence offsets, and no mask for debugging.
    """
    if bsym.sym.name != _FLASH_FORWARD:
        return ()
    _, _, query_offsets, key_offsets, *_, mask = bsym.output
    return tuple(p for p in (query_offsets, key_offsets, mask) if isinstance(p, TensorProxy))


def flash_backward_bytes(query: Sequence[int], key: Sequence[int], element_bytes: int) -> int:
    """float32 accumulator of dQ and the row sums, with rows padded to 128 and heads to 32.

    If several heads share keys and values, each head first has its own gradients. The source is PyTorch's
    `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`, `mha_bwd`.

    Args:
        query: shape (B, H, T, D).
        key: shape (B, H or fewer, S, D).
        element_bytes: of a key.
    """
    batch, heads, rows, size = map(int, query)
    rows = ceil(rows / 128) * 128
    accumulated_bytes = _FLOAT32_BYTES * batch * heads * rows * ((ceil(size / 32) * 32 if size <= 192 else 256) + 1)
    if int(key[1]) == heads:
        return accumulated_bytes
    return accumulated_bytes + 2 * batch * heads * int(key[2]) * size * element_bytes


def _float32_bytes(p: TensorProxy) -> int:
    return prod(map(int, p.shape)) * _FLOAT32_BYTES
