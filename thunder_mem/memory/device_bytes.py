"""What a block takes of its device's memory: the one rule that plans, predictions and budgets count by.

A peak is a sum of blocks: what the caller holds, what is computed, and the scratch of the operation that runs.
PyTorch's CUDA allocator gives each a multiple of 512 bytes (`c10/cuda/CUDACachingAllocator.cpp`); on a CPU a block
takes its own bytes, which is what `measure_peak` counts there.
"""

from __future__ import annotations

__all__ = ["block_bytes", "host_bytes", "rounded"]

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


def host_bytes(nbytes: int, device: str) -> int:
    """What the host takes for a value of `nbytes` on a device such as "cuda:0" or "cpu".

    PyTorch's pinned memory comes in powers of two: `CachingHostAllocatorImpl::allocate` in
    `ATen/core/CachingHostAllocator.h` of PyTorch 2.11.

    Example:
        >>> host_bytes(5000, "cuda:0"), host_bytes(4096, "cuda:0"), host_bytes(5000, "cpu")
        (8192, 4096, 5000)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes and device.startswith("cuda") else nbytes
