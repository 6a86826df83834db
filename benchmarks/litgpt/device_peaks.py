"""Peaks of a run on a GPU: those of its warm-up, in which compilers and their trials allocate, and those after it."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

__all__ = ["DevicePeaks", "attention_backend"]

_FIGURES = {
    "peak_bytes": "allocated_bytes.all.peak",
    "requested_peak_bytes": "requested_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
}


class DevicePeaks:
    """The peaks of PyTorch's allocator on the current GPU, before and after the end of the warm-up."""

    def __init__(self) -> None:
        self._warm_up: dict[str, int] = {}

    def end_warm_up(self) -> None:
        """Keep the peaks so far, and count anew from what is there; what the allocator reserved, it keeps."""
        self._warm_up = _peaks()
        torch.cuda.reset_peak_memory_stats()

    def found(self) -> dict[str, int]:
        """The peaks since the warm-up ended, and its own as "warmup_..."; without a warm-up, those of the whole run."""
        return {**_peaks(), **{f"warmup_{name}": nbytes for name, nbytes in self._warm_up.items()}}


def _peaks() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: stats[key] for name, key in _FIGURES.items()}


def attention_backend(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str | torch.device) -> str:
    """Which kernel eager's causal attention takes, such as "FLASH_ATTENTION" or "CUDNN_ATTENTION".

    Backends differ in what they keep for the backward, and a prediction has one of them in mind.

    Args:
        shape: of query, key and value, (B, H, T, D).
        dtype: theirs.
        device: theirs.

    Example:
        >>> attention_backend((1, 4, 128, 64), torch.bfloat16, "cpu")
        'FLASH_ATTENTION'
    """
    q, k, v = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
