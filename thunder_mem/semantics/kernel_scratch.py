"""Estimates of the scratch of kernels, for planning.

The planner only needs to know the large ones, so that it runs them when little else is alive. A prediction reports the
scratch that `fake_execution/scratch.py` measures (on a CPU) or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, prod

import torch
from thunder.core.dtypes import bfloat16, bool8, float16
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags

from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.layout import Layout, dense_bytes, padded_head
from thunder_mem.semantics.op_traits import traits_of

__all__ = [
    "CUDNN_BACKWARD",
    "CUDNN_FORWARD",
    "CUDNN_FORWARD_BYTES",
    "FLASH_BACKWARD",
    "FLASH_FORWARD",
    "attention_copies_bytes",
    "cudnn_backward_bytes",
    "efficient_backward_bytes",
    "empty_outputs",
    "estimated_scratch_bytes",
    "flash_backward_bytes",
    "flash_forward_bytes",
    "region_scratch_bytes",
    "score_blocks_bytes",
    "scratch_follows_layout",
]

FLASH_BACKWARD = "sdpafx_scaled_dot_product_efficient_attention_backward"
"""Thunder's name for the backward of flash attention on a GPU."""

CUDNN_FORWARD, CUDNN_BACKWARD = "mem_attention_cudnn_forward", "mem_attention_cudnn_backward"
"""Our names for attention by cuDNN."""
CUDNN_FORWARD_BYTES = 256
"""What cuDNN's forward asks for; an H200 did so for 38 shapes."""
FLASH_FORWARD = "sdpafx_grad_forward_scaled_dot_product_efficient_attention"
"""Thunder's name for its forward, whether a gradient is needed or not."""

_BACKWARDS = (FLASH_BACKWARD, CUDNN_BACKWARD)
# The arguments whose last dim has to be dense. The query of cuDNN's backward is copied anyway.
_READ_BY_ROWS = {
    FLASH_FORWARD: slice(0, 3),
    CUDNN_FORWARD: slice(0, 3),
    FLASH_BACKWARD: slice(1, 4),
    CUDNN_BACKWARD: slice(2, 4),
}
_GEMMS = {PrimIDs.MATMUL, PrimIDs.LINEAR, PrimIDs.CONVOLUTION}
_EFFICIENT = (
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention",
    "sdpaex_scaled_dot_product_efficient_attention_backward",
)
_FLOAT32_BYTES = 4


def estimated_scratch_bytes(bsym: BoundSymbol) -> int:
    """The scratch bytes of the kernel of `bsym`, to the accuracy that planning needs.

    - a chunk loop and a parameter's update state their own;
    - a 16-bit matrix product on a CPU adds up in a float32 copy of its result, unless the CPU
      multiplies bfloat16 itself;
    - a binary cross entropy of logits holds two tensors of their size;
    - the backward of fused attention holds two blocks of scores on a CPU;
    - on a GPU it adds up the query's gradient in float32, for flash attention with the padding that
      `fake_execution/operator_scratch.py` also states;
    - the forward of flash attention on a GPU divides the keys among its multiprocessors if it has few rows, and
      adds up the parts.
    """
    outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    tensor = next((p for p in (*outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy)), None)
    return 0 if tensor is None else block_bytes(_kernel_bytes(bsym, outs), tensor.device.device_str())


def _kernel_bytes(bsym: BoundSymbol, outs: Sequence[TensorProxy]) -> int:
    if (declared := traits_of(bsym).scratch_bytes) is not None:
        return declared(bsym)
    if not outs:
        return 0
    if bsym.sym.name == FLASH_FORWARD:
        query, key, _, dropout, *_ = bsym.args
        return 0 if dropout else sum(flash_forward_bytes(query.shape, key.shape))
    if bsym.sym.name == FLASH_BACKWARD:
        _, query, key, *_ = (p for p in bsym.flat_args if isinstance(p, TensorProxy))
        return flash_backward_bytes(query.shape, key.shape, key.dtype.bytes)
    if bsym.sym.name in _EFFICIENT:
        return _efficient_bytes(bsym, outs)
    if bsym.sym.name == "binary_cross_entropy_with_logits":
        return _binary_loss_bytes(bsym, outs[0])
    on_cpu = outs[0].device.type == "cpu"
    is_attention_backward = "attention" in bsym.sym.name and "backward" in bsym.sym.name
    if is_attention_backward and on_cpu:
        query_grad, key_grad = outs[:2]
        return score_blocks_bytes(query_grad.shape[-2], key_grad.shape[-2], query_grad.dtype.bytes)
    if outs[0].dtype not in (bfloat16, float16):
        return 0
    if on_cpu and _is_gemm(bsym) and not (outs[0].dtype is bfloat16 and _multiplies_bfloat16()):
        return prod(map(int, outs[0].shape)) * _FLOAT32_BYTES
    return 0


def _binary_loss_bytes(bsym: BoundSymbol, out: TensorProxy) -> int:
    """Of PyTorch's forward: two tensors as large as the logits, of which an unreduced result is one."""
    given = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    whole_bytes = dense_bytes(given[0])
    return whole_bytes if out.shape == given[0].shape else 2 * whole_bytes


def scratch_follows_layout(bsym: BoundSymbol) -> bool:
    """Whether the scratch depends on how the arguments lie in memory."""
    known = bsym.sym.is_fusion or bsym.sym.name in _READ_BY_ROWS or _in_one_group(bsym)
    return known or traits_of(bsym).copies_bytes is not None


def _in_one_group(bsym: BoundSymbol) -> bool:
    """Whether attention's backward on a GPU runs for all heads at once, and its gradient exists."""
    if not bsym.sym.name.startswith("mem_attention_groups_backward"):
        return False
    *_, groups, kernel, weight, _ = bsym.args
    return groups == 1 and kernel != "cpu" and weight is None


def attention_copies_bytes(bsym: BoundSymbol, layout: Layout) -> int:
    """Copies that attention on a GPU makes of operands that do not lie as its kernel reads them.

    A backward copies its output and that output's gradient, unless they lie as (B, T, H, D). The last dim of query, key
    and value has to be dense. For the flash kernel Thunder pads heads to a multiple of eight, in copies that lie as
    (B, H, T, D).

    The source is `_flash_attention_backward` in PyTorch's
    `aten/src/ATen/native/transformers/cuda/attention_backward.cu`.
    """
    if (declared := traits_of(bsym).copies_bytes) is not None:
        return declared(bsym, layout)
    name, tensors = bsym.sym.name, [layout[a.name] if isinstance(a, TensorProxy) else None for a in bsym.args]
    copied: list[torch.Tensor | None] = []
    if name in (FLASH_FORWARD, FLASH_BACKWARD) and (size := int(bsym.args[0].shape[-1])) % 8:
        _, heads, rows, _ = map(int, bsym.args[0].shape)
        # Of one head, or one row, a padded copy lies as (B, T, H, D), too.
        padded = (0, 1, 2) if name == FLASH_FORWARD else (0, 1, 2, 3, 4) + ((0, 4) if heads > 1 and rows > 1 else ())
        device, found = bsym.args[0].device.device_str(), [t for i in padded if (t := tensors[i]) is not None]
        return sum(block_bytes(t.numel() // size * padded_head(size) * t.element_size(), device) for t in found)
    if name in _BACKWARDS:
        copied += [t for t in (tensors[0], tensors[4]) if not t.transpose(1, 2).is_contiguous()]  # type: ignore[union-attr]
    elif _in_one_group(bsym):
        copied += [t for t in tensors[:1] if not t.is_contiguous()]  # type: ignore[union-attr]
    if (operands := _READ_BY_ROWS.get(name)) is not None:
        copied += [t for t in tensors[operands] if t.stride(-1) != 1]  # type: ignore[union-attr]
    device = bsym.args[0].device.device_str() if copied else ""
    return sum(block_bytes(t.numel() * t.element_size(), device) for t in copied if t is not None)


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
    if bsym.sym.name != FLASH_FORWARD:
        return ()
    _, _, query_offsets, key_offsets, *_, mask = bsym.output
    return tuple(p for p in (query_offsets, key_offsets, mask) if isinstance(p, TensorProxy))


def flash_forward_bytes(query: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """float32 parts of the output and of its log-sums, where the kernel divides the keys; none where it does not.

    With few blocks of rows the kernel would leave multiprocessors idle. So it takes the least number of parts of the
    keys that keeps them within 85 % as busy as any number. The parts can be many times the output. The source is
    PyTorch's `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`, `num_splits_heuristic` and
    `set_params_splitkv`; an H200 allocated these bytes for 38 shapes.

    Args:
        query: shape (B, H, T, D).
        key: shape (B, H or fewer, S, D).

    Returns:
        The bytes of each allocation, for the GPU that is here or is simulated.
    """
    batch, heads, rows, size = map(int, query)
    columns = 256 if size <= 64 else 128 if size <= 128 else 64
    parts = _flash_parts(batch * heads * ceil(rows / 64), ceil(int(key[2]) / columns), _multiprocessors())
    if parts <= 1:
        return ()
    sums_bytes = _FLOAT32_BYTES * parts * batch * heads * rows
    return sums_bytes, sums_bytes * _padded_size(size)


@cache
def _flash_parts(row_blocks: int, column_blocks: int, multiprocessors: int) -> int:
    """The number of parts in which the flash kernel takes the keys."""
    places = 2 * multiprocessors
    if row_blocks >= 0.8 * places:
        return 1
    busy = {}
    for parts in range(1, min(128, places, column_blocks) + 1):
        if parts == 1 or ceil(column_blocks / parts) != ceil(column_blocks / (parts - 1)):
            waves = row_blocks * parts / places
            busy[parts] = waves / ceil(waves)
    most = max(busy.values(), default=0.0)
    return next((parts for parts, share in busy.items() if share >= 0.85 * most), 1)


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0


def _padded_size(size: int) -> int:
    return ceil(size / 32) * 32 if size <= 192 else 256


def cudnn_backward_bytes(query: Sequence[int], key: Sequence[int], element_bytes: int) -> int:
    """float32 sums of dQ and of the rows; if heads share keys, the gradients of each head's own as well.

    cuDNN's source is closed: an H200 with cuDNN 9.19 asked for exactly this for 38 shapes
    (`benchmarks/results/gpu-h200.json`).

    Args:
        query: shape (B, H, T, D).
        key: shape (B, H or fewer, S, D).
        element_bytes: of a key.
    """
    batch, heads, rows, size = map(int, query)
    summed_bytes = _FLOAT32_BYTES * batch * heads * rows * (size + 1) + 256
    if int(key[1]) == heads:
        return summed_bytes
    return summed_bytes + 2 * batch * heads * int(key[2]) * size * element_bytes


def _efficient_bytes(bsym: BoundSymbol, outs: Sequence[TensorProxy]) -> int:
    """Of memory-efficient attention in Thunder, which expands and pads a mask for each call.

    Results exist while the kernel runs, but not yet while the mask is made. The kernel makes a gradient of the expanded
    mask, whether or not it is asked for.
    """
    backward = bsym.sym.name == _EFFICIENT[1]
    query, key, _, mask = bsym.args[backward : backward + 4]
    kernel_bytes = efficient_backward_bytes(query.shape) if backward else 0
    if mask is None:
        return kernel_bytes
    (batch, heads, rows, size), columns, itemsize = map(int, query.shape), int(key.shape[2]), query.dtype.bytes
    whole = batch * heads * rows * columns
    given = prod(map(int, mask.shape))
    given_bytes = 0 if mask.dtype is not bool8 else given * itemsize  # as numbers
    # Thunder compares the columns with the size of a head, and makes no other copy of a whole mask where they agree.
    copied = 0 if size == columns and given == whole else padded_head(columns) if size != columns else columns
    copy_bytes = whole // columns * copied * itemsize
    results_bytes = sum(map(dense_bytes, outs))
    making_bytes = max(2 * given_bytes + given if given_bytes else 0, given_bytes + copy_bytes)
    if backward:
        kernel_bytes += whole // columns * ceil(columns / 16) * 16 * itemsize - dense_bytes(bsym.output[3])
    return max(making_bytes - results_bytes, (copy_bytes or given_bytes) + kernel_bytes)


def efficient_backward_bytes(query: Sequence[int]) -> int:
    """A float32 accumulator of dQ, or the product of the output and its gradient, and the row sums.

    After PyTorch's `aten/src/ATen/native/transformers/cuda/attention_backward.cu`, which sizes it by the kernel that
    the shapes choose: an estimate.

    Args:
        query: shape (B, H, T, D).
    """
    batch, heads, rows, size = map(int, query)
    return _FLOAT32_BYTES * batch * heads * (rows * size + ceil(rows / 32) * 32)


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
    accumulated_bytes = _FLOAT32_BYTES * batch * heads * rows * (_padded_size(size) + 1)
    if int(key[1]) == heads:
        return accumulated_bytes
    return accumulated_bytes + 2 * batch * heads * int(key[2]) * size * element_bytes
