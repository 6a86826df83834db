"""The device bytes of a block: the one rule by which plans, predictions and budgets count.

A peak is a sum of blocks: the caller's tensors, computed values, and the scratch of the running operation.
PyTorch's CUDA allocator rounds each block to a multiple of 512 bytes (`c10/cuda/CUDACachingAllocator.cpp`). On a CPU a
block takes its own bytes, as `measure_peak` counts them.
"""

from __future__ import annotations

__all__ = ["block_bytes", "host_bytes", "rounded"]

_UNIT = 512


def block_bytes(nbytes: int, device: str) -> int:
    """The device bytes of a block of `nbytes`, with the device as torch prints it.

    Example:
        >>> block_bytes(513, "cuda:0"), block_bytes(513, "cpu")
        (1024, 513)
    """
    return rounded(nbytes) if device.startswith("cuda") else nbytes


def rounded(nbytes: int) -> int:
    """The bytes that the CUDA allocator gives for a request: a multiple of 512.

    Example:
        >>> rounded(0), rounded(1), rounded(512), rounded(513)
        (0, 512, 512, 1024)
    """
    return -(-nbytes // _UNIT) * _UNIT


def host_bytes(nbytes: int, device: str) -> int:
    """The host's bytes for a value of `nbytes` on a device such as "cuda:0" or "cpu".

    PyTorch's pinned memory comes in powers of two: `CachingHostAllocatorImpl::allocate` in
    `ATen/core/CachingHostAllocator.h` of PyTorch 2.11.

    Example:
        >>> host_bytes(5000, "cuda:0"), host_bytes(4096, "cuda:0"), host_bytes(5000, "cpu")
        (8192, 4096, 5000)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes and device.startswith("cuda") else nbytes
