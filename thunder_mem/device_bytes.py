"""What a block takes of its device's memory: the one rule that plans, predictions and budgets count by.

A peak is a sum of blocks: what the caller holds, what is computed, and the scratch of the operation that runs.
PyTorch's CUDA allocator gives each a multiple of 512 bytes (`c10/cuda/CUDACachingAllocator.cpp`); on a CPU a block
takes its own bytes, which is what `measure_peak` counts there.
"""

from __future__ import annotations

__all__ = ["block_bytes", "rounded"]

_UNIT = 512


def block_bytes(nbytes: int, device: str) -> int:
    """Bytes that a block of so many takes on a device, named as torch prints it.

    Example:
        >>> block_bytes(513, "cuda:0"), block_bytes(513, "cpu")
        (1024, 513)
    """
    return rounded(nbytes) if device.startswith("cuda") else nbytes


def rounded(nbytes: int) -> int:
    """What the CUDA allocator gives for a request: a multiple of 512 bytes.

    Example:
        >>> rounded(0), rounded(1), rounded(512), rounded(513)
        (0, 512, 512, 1024)
    """
    return -(-nbytes // _UNIT) * _UNIT
