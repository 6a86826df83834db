"""PyTorch's kernels of attention without a mask: the flash kernels of a CPU and of a GPU, and cuDNN's.

All keep the log-sums of the rows of scores for the backward, and none keeps scores. On an H200 cuDNN's take half the
time of the flash kernels (`benchmarks/results/gpu-h200.json`), and eager PyTorch prefers them there.

Shapes: query, output and its gradient (B, H, T, D), key and value (B, K, S, D) with H a multiple of K, log-sums
(B, H, T). Gradients lie and are shaped as their operands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_mem.attention.call import last_dim_dense
from thunder_mem.semantics.kernel_scratch import (
    CUDNN_FORWARD_BYTES,
    cudnn_backward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
    score_blocks_bytes,
)

__all__ = ["ATTENTION_KERNELS", "CPU", "CUDNN", "FLASH", "AttentionKernel", "eager_prefers_cudnn"]

CPU, FLASH, CUDNN = "cpu", "flash", "cudnn"
_aten = torch.ops.aten

Shape = Sequence[int]


@dataclass(frozen=True)
class AttentionKernel:
    """How to run the attention of some heads, and what that holds beside operands and results.

    Attributes:
        forward: (query, key, value, is_causal, scale) -> output, log-sums.
        backward: (gradient of the output, query, key, value, output, log-sums, is_causal, scale) -> gradients of
            query, key and value.
        forward_bytes: of the shapes of query and key, and the bytes of an element.
        backward_bytes: the same for the backward.
        copies_parts: the backward makes copies of a gradient and an output that are a part of the heads.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float | None], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    forward_bytes: Callable[[Shape, Shape, int], int]
    backward_bytes: Callable[[Shape, Shape, int], int]
    copies_parts: bool = False


# --- a CPU's ---------------------------------------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, _repeated(k, times), _repeated(v, times), 0.0, is_causal, attn_mask=None, scale=scale
    )


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    times, heads = q.shape[1] // k.shape[1], k.shape[1]
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, _repeated(k, times), _repeated(v, times), out, log_sums, 0.0, is_causal, attn_mask=None, scale=scale
    )
    return dq, _summed(dk, heads), _summed(dv, heads)


def _repeated(t: Tensor, times: int) -> Tensor:
    return t if times == 1 else t.repeat_interleave(times, 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of keys of `heads` heads from that of their repetitions."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _repeated_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    """Bytes of keys that are repeated for all queries; 0 where each query has keys of its own."""
    batch, heads, _, size = query
    return batch * heads * key[2] * size * itemsize if heads > key[1] else 0


def _cpu_forward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    return 2 * _repeated_bytes(query, key, itemsize)


def _cpu_backward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    return 4 * _repeated_bytes(query, key, itemsize) + score_blocks_bytes(query[2], key[2], itemsize)


# --- the flash kernels of a GPU --------------------------------------------------------------------


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty((2,), dtype=torch.uint64, device=q.device)  # of random numbers, which nothing draws
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, log_sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state,
        scale=scale,
    )  # fmt: skip


_STATE_BYTES = 16  # of random numbers


def _flash_forward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    return sum(flash_forward_bytes(query, key)) + _STATE_BYTES + 8


def _flash_backward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    return flash_backward_bytes(query, key, itemsize) + _STATE_BYTES


# --- cuDNN's ---------------------------------------------------------------------------------------

_MARGIN = 8 * 13  # elements: a multiple of the 16 bytes that cuDNN reads at once, and no likely number


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (last_dim_dense(t) for t in (q, k, v))
    found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return found[0], found[1].squeeze(-1)


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch finds cuDNN's plan of a backward by the strides of query, key and value alone.

    A plan that was made for other strides of the output or its gradient reads the wrong memory: an H200 ended such a
    process. So both always lie as (B, T, H, D), and the query has a margin after each row that other programs
    hardly have.
    `MHACacheKeyWrapper` in PyTorch's `aten/src/ATen/native/cudnn/MHA.cpp` is the key.
    """
    state = torch.empty((), dtype=torch.int64, device=q.device)  # of random numbers, which nothing draws
    k, v = last_dim_dense(k), last_dim_dense(v)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        _dense(grad), _with_margin(q), k, v, _dense(out), log_sums.contiguous().unsqueeze(-1), state, state,
        None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
    )  # fmt: skip


def _dense(t: Tensor) -> Tensor:
    """The tensor as (B, T, H, D) in memory, with those strides for dims of size 1 too."""
    lying = t.transpose(1, 2).contiguous()
    return lying.reshape(-1).view(lying.shape).transpose(1, 2)


def _with_margin(q: Tensor) -> Tensor:
    """A copy that lies as (B, T, H, D), with a margin after each row."""
    batch, heads, rows, size = q.shape
    lying = torch.empty((batch, rows, heads * size + _MARGIN), dtype=q.dtype, device=q.device)
    return lying[..., :-_MARGIN].view(batch, rows, heads, size).transpose(1, 2).copy_(q)


def _cudnn_forward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    return CUDNN_FORWARD_BYTES + 2 * 8


def _cudnn_backward_bytes(query: Shape, key: Shape, itemsize: int) -> int:
    batch, heads, rows, size = map(int, query)
    copy_bytes = batch * rows * (heads * size + _MARGIN) * itemsize
    return copy_bytes + cudnn_backward_bytes(query, key, itemsize) + 8


ATTENTION_KERNELS: Mapping[str, AttentionKernel] = {
    CPU: AttentionKernel(_cpu_forward, _cpu_backward, _cpu_forward_bytes, _cpu_backward_bytes),
    FLASH: AttentionKernel(
        _flash_forward, _flash_backward, _flash_forward_bytes, _flash_backward_bytes, copies_parts=True
    ),
    CUDNN: AttentionKernel(
        _cudnn_forward, _cudnn_backward, _cudnn_forward_bytes, _cudnn_backward_bytes, copies_parts=True
    ),
}
"""By the name that a trace has for it."""

_HOPPER = (9, 0)
_CUDNN_SIZE = 128
"""What cuDNN's attention was measured on: its memory on other GPUs is not known."""


def eager_prefers_cudnn(device: torch.device, size: int, columns: int = 2) -> bool:
    """Whether eager PyTorch takes cuDNN's kernel on Hopper where the flash kernel can run, too.

    The order is that of `check_prefer_cudnn_attention` in PyTorch's
    `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, with cuDNN 9.15.1 or newer. On Blackwell and for larger
    heads the answer is no, because what cuDNN holds there is not known.

    Args:
        device: the GPU, or the simulated one.
        size: of a head.
        columns: the number of keys.
    """
    if columns < 2 or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    if device.type != "cuda" or not torch.cuda.is_available() or size > _CUDNN_SIZE:
        return False
    if not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) == _HOPPER
