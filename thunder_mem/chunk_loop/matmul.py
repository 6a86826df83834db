"""Matrix products into existing buffers, with temporaries of a limited size.

On CUDA, and in float32 on a CPU, the products of a chunk are single calls. 16-bit products on a CPU have three cases:

- In bfloat16, on a CPU that multiplies it (AVX-512 BF16, AMX), products are also single calls, whose packed operands
  take some hundred KiB a thread.
- There, the package's kernel adds products to float32 sums, if it can be compiled and the CPU has AMX
  (`float32_sums.py`).
- Otherwise oneDNN computes in a float32 scratch as large as the result (measured: 49 MB for a 25 MB gradient), or (in
  float16) at a tenth of the speed. Tiles converted to float32 take a fixed scratch instead, sum up in float32, and run
  three times as fast. Float32 sums take them, too, where there is no kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from thunder_mem.chunk_loop import float32_sums
from thunder_mem.chunk_loop.float32_sums import add_float32, scratch_bytes_of_sum

__all__ = [
    "adds_to_float32",
    "bytes_beside_stretch",
    "gemm",
    "gemm_scratch_bytes",
    "multiplies",
    "multiplies_in_tiles",
    "scratch_bytes_of",
]


def gemm(out: Tensor, a: Tensor, b: Tensor, *, add: bool, scratch_bytes: int) -> None:
    """out (m, n) = a (m, k) @ b (k, n), or out += a @ b.

    Args:
        out: of the operands' dtype, or float32 for 16-bit operands.
        a, b: of one dtype.
        add: add to the content of `out`.
        scratch_bytes: temporaries take at most this much, beyond what a single call packs for itself.
    """
    kind = a.device.type
    if isinstance(out, FakeTensor):
        if nbytes := _bytes_beside(kind, out, a, b, scratch_bytes):
            torch.empty(nbytes, dtype=torch.uint8, device=a.device)
    elif _tiled(kind, out.dtype, a.dtype):
        _gemm_tiles(out, a, b, add, scratch_bytes)
    elif out.dtype != a.dtype and kind == "cpu":
        add_float32(out, a, b, add=add, scratch_bytes=scratch_bytes)
    elif out.dtype != a.dtype:
        torch.addmm(out, a, b, beta=int(add), out_dtype=out.dtype, out=out)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _bytes_beside(kind: str, out: Tensor, a: Tensor, b: Tensor, scratch_bytes: int) -> int:
    """The bytes that `gemm` allocates for such a product."""
    if _tiled(kind, out.dtype, a.dtype):
        return scratch_bytes
    if kind == "cpu" and out.dtype != a.dtype:
        return scratch_bytes_of_sum(a.shape[1], b.shape[1], scratch_bytes)
    return 0


def scratch_bytes_of(chunk_logits_bytes: int) -> int:
    """The least share of tiles: a twelfth of a chunk's logits, but at least tiles that are worth a call."""
    return max(1 << 18, chunk_logits_bytes // 12)


def bytes_beside_stretch(scratch_bytes: int) -> int:
    """Of the bytes in which a product and rows of a finer sum in float32 may be, those of the product."""
    return scratch_bytes * 3 // 7


def gemm_scratch_bytes(
    device: str, dtype: torch.dtype, out_dtypes: Collection[torch.dtype], rows: int, scratch_bytes: int
) -> int:
    """The most bytes that the products of a chunk hold beside their operands and results.

    Args:
        device: as torch prints it.
        dtype: of the operands.
        out_dtypes: of the results.
        rows: rows in the chunk.
        scratch_bytes: the limit for tiles.
    """
    kind = device.split(":")[0]
    apart = any(_tiled(kind, out, dtype) or (kind == "cpu" and out != dtype) for out in out_dtypes)
    packs = kind == "cpu" and dtype.itemsize < 4 and dtype in out_dtypes and multiplies(kind, dtype)
    return max(scratch_bytes if apart else 0, _packed_bytes(rows) if packs else 0)


def _packed_bytes(rows: int) -> int:
    """The bytes that oneDNN packs for a bfloat16 product, a thread (measured on AVX-512, D and V of 64 to 32000)."""
    kib = max(190, rows * 9 // 10) if rows <= 512 else 1700
    return kib * 1024 * torch.get_num_threads()


def multiplies(device: str, dtype: torch.dtype) -> bool:
    """Whether the device has instructions for products of that dtype; else it converts, or worse."""
    if device != "cpu" or dtype.itemsize >= 4:
        return True
    return dtype == torch.bfloat16 and _bfloat16_units() and bool(torch.backends.mkldnn.enabled)


def multiplies_in_tiles(device: str, dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies that dtype by AMX, sixteen times as fast as float32."""
    return device == "cpu" and multiplies(device, dtype) and dtype.itemsize < 4 and torch.cpu._is_amx_tile_supported()


@cache
def _bfloat16_units() -> bool:
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return torch.backends.mkldnn.is_available() and any(getattr(torch.cpu, name, lambda: False)() for name in asked)


def _tiled(device: str, out_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `gemm` goes tile by tile for these operands."""
    return not multiplies(device, dtype) or (out_dtype != dtype and not adds_to_float32(device, dtype))


def _gemm_tiles(out: Tensor, a: Tensor, b: Tensor, add: bool, scratch_bytes: int) -> None:
    (m, k), n = a.shape, b.shape[1]
    mb, nb, kb = _tile_shape(m, n, k, scratch_bytes // 4)
    direct = out.dtype == torch.float32
    for i in range(0, m, mb):
        for j in range(0, n, nb):
            target = out[i : i + mb, j : j + nb]
            # Adding two dtypes would convert one of them in a temporary, so the sum starts from the existing content.
            total = target if direct else target.float() if add else torch.empty_like(target, dtype=torch.float32)
            for p in range(0, k, kb):
                x, y = a[i : i + mb, p : p + kb].float(), b[p : p + kb, j : j + nb].float()
                if p or add:
                    total.addmm_(x, y)
                else:
                    torch.mm(x, y, out=total)
                del x, y
            if not direct:
                target.copy_(total)
            del total  # before the next one is made


def _tile_shape(m: int, n: int, k: int, floats: int) -> tuple[int, int, int]:
    """Tile sizes with mb kb + kb nb + mb nb <= floats, as near a cube as the matrix allows."""
    sizes = {"m": m, "n": n, "k": k}
    tile = dict.fromkeys(sizes, 1)
    side = max(16, int((floats / 3) ** 0.5))
    for name, size in sizes.items():
        tile[name] = min(size, side)

    def used(t: dict[str, int]) -> int:
        return t["m"] * t["k"] + t["k"] * t["n"] + t["m"] * t["n"]

    # A matrix narrower than the cube leaves room for the other sides.
    for name in ("n", "m", "k"):
        while tile[name] < sizes[name]:
            grown = tile | {name: min(sizes[name], tile[name] + max(16, tile[name] // 4))}
            if used(grown) > floats:
                break
            tile = grown
    return tile["m"], tile["n"], tile["k"]


def adds_to_float32(device: str, dtype: torch.dtype) -> bool:
    """Whether the device adds a 16-bit product to a float32 sum in one call (CUDA from torch 2.8 on, a CPU with AMX).

    On a GPU the first call of this function runs a product, and the host waits for it. On a CPU it may compile for
    some seconds. So call it before a loop.
    """
    if device == "cpu":
        return multiplies(device, dtype) and float32_sums.is_available()
    return device == "cuda" and _gpu_adds_to_float32(dtype)


@cache
def _gpu_adds_to_float32(dtype: torch.dtype) -> bool:
    with unset_fake_temporarily():  # a simulated GPU cannot run the product
        if not torch._C._cuda_getDeviceCount():
            return True
        a = torch.ones(16, 16, dtype=dtype, device="cuda")
        out = torch.ones(16, 16, dtype=torch.float32, device="cuda")
        try:
            torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
        except (RuntimeError, TypeError):
            return False
        return bool((out == 17).all())
