"""Adds bfloat16 products to float32 sums in one call, on a CPU with AMX.

PyTorch has no function for it on a CPU, but it exports the kernel of oneDNN that its attention uses (`brgemm`). Some
lines of C++ around that kernel are compiled by Inductor's compiler at the first use, and stay in Inductor's cache. The
first use takes 20 seconds on a slow machine, of which Inductor's import and its tests of the processor are the most.
"""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["add_float32", "is_available", "scratch_bytes_of_sum"]

_SOURCE = Path(__file__).with_suffix(".cpp")
_PANEL = 64  # as in the source

_DEPTH, _HEIGHT, _LEAST_HEIGHT = 256, 128, 32
"""Rows of the right operand packed at once, and rows of the left one in a block. Measured on one thread with scratch of
256 and 1,024 KiB, sums of (688, 256) to (32000, 1024), 192 to 1,024 rows: a depth of 512 takes .98 to 1.4 times as
long, and of 128 .96 to 1.5 times."""


def add_float32(out: Tensor, a: Tensor, b: Tensor, *, add: bool, scratch_bytes: int) -> None:
    """out (m, n) = a (m, k) @ b (k, n), or out += a @ b.

    Args:
        out: float32; its rows or its columns are dense and do not overlap.
        a, b: bfloat16, with any strides.
        add: add to the content of `out`.
        scratch_bytes: temporaries take at most this much, from 64 KiB on.

    Raises:
        RuntimeError: oneDNN refuses these sizes; a part of `out` may be written.
    """
    if out.shape[1] > 1 and out.stride(1) != 1:
        out, a, b = out.t(), b.t(), a.t()
    (m, k), n = a.shape, b.shape[1]
    row_stride = out.stride(0) if m > 1 else n  # a single row may have any stride, which oneDNN checks all the same
    assert (n <= 1 or out.stride(1) == 1) and row_stride >= n
    assert out.dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
    if not (m and n and k):
        if not add:
            out.zero_()
        return
    sizes = _sizes(k, n, scratch_bytes)
    packed, blocks = (torch.empty(numbers, dtype=a.dtype, device=a.device) for numbers in (sizes.packed, sizes.blocks))
    done = _library().float32_sum(
        *(out.data_ptr(), row_stride),
        *(a.data_ptr(), *a.stride()),
        *(b.data_ptr(), *b.stride()),
        *(m, n, k, add),
        *(packed.data_ptr(), blocks.data_ptr()),
        *(sizes.depth, sizes.width, sizes.height, sizes.threads),
    )
    if not done:
        raise RuntimeError(f"oneDNN refuses a product of {tuple(a.shape)} and {tuple(b.shape)}")


def scratch_bytes_of_sum(k: int, n: int, scratch_bytes: int) -> int:
    """The bytes of temporaries that `add_float32` takes for a product of depth `k` and width `n`."""
    sizes = _sizes(k, n, scratch_bytes)
    return (sizes.packed + sizes.blocks) * torch.bfloat16.itemsize


@cache
def is_available() -> bool:
    """Whether this CPU has AMX, PyTorch the kernel, and the machine a C++ compiler."""
    try:
        has_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
        return torch.backends.mkldnn.is_available() and has_amx and _adds_right()
    except (RuntimeError, OSError, AttributeError):  # no compiler, or another PyTorch
        return False


@dataclass(frozen=True)
class _Sizes:
    """How a product is cut; the source explains the parts.

    Attributes:
        depth, width, height, threads: as in the source.
        packed, blocks: numbers of bfloat16 in the memory for them.
    """

    depth: int
    width: int
    height: int
    threads: int
    packed: int
    blocks: int


def _sizes(k: int, n: int, scratch_bytes: int) -> _Sizes:
    """Half of the memory is for the packed panels of the right operand, half for blocks of the left one."""
    depth = min(k, _DEPTH)
    even = depth + depth % 2
    half = max(_PANEL * even, scratch_bytes // 2 // torch.bfloat16.itemsize)
    rows = half // even
    width = min(-(-n // _PANEL), rows // _PANEL) * _PANEL
    threads = max(1, min(torch.get_num_threads(), rows // _LEAST_HEIGHT))
    height = min(_HEIGHT, rows // threads // _LEAST_HEIGHT * _LEAST_HEIGHT)
    return _Sizes(depth, width, height, threads, width * even, max(threads * height, _PANEL) * even)


@cache
def _library() -> CDLL:
    from torch._inductor.codecache import CppCodeCache  # imports much, so only where it is needed

    library = CppCodeCache.load(_SOURCE.read_text())
    pointer, size = c_void_p, c_int64
    matrix = (pointer, size, size)
    library.float32_sum.argtypes = (pointer, size, *matrix, *matrix, *[size] * 4, pointer, pointer, *[size] * 4)
    return library


def _adds_right() -> bool:
    """Whether a small sum of whole numbers is exact."""
    with _disable_current_modes():  # a fake product has no numbers
        numbers = torch.arange(5 * 7, device="cpu").remainder(11)
        a, b = numbers.view(5, 7).bfloat16(), numbers.view(7, 5).bfloat16()
        out = torch.ones(5, 5, dtype=torch.float32, device="cpu")
        add_float32(out, a, b, add=True, scratch_bytes=1 << 16)
        return bool((out == 1 + a.float() @ b.float()).all())
