"""Matrix products into buffers that exist, with temporaries of a stated size and no larger.

On CUDA the products of a chunk are single calls. On a CPU without 16-bit matrix units oneDNN
computes a 16-bit product into a float32 scratch as large as the result (measured: 49 MB for a 25 MB
gradient), and there is no call that adds a 16-bit product to a float32 sum. Tiles converted to
float32 take a fixed scratch instead, sum up in float32, and run three times as fast.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["gemm", "needs_scratch", "scratch_bytes_of"]


def gemm(out: Tensor, a: Tensor, b: Tensor, *, add: bool, scratch_bytes: int) -> None:
    """out (m, n) = a (m, k) @ b (k, n), or out += a @ b.

    Args:
        out: of the operands' dtype, or float32 for 16-bit operands.
        a, b: of one dtype.
        add: add to what `out` holds.
        scratch_bytes: temporaries take at most this much (where single calls are not possible).
    """
    if isinstance(out, FakeTensor):
        if needs_scratch(a.device.type, out.dtype, a.dtype):
            torch.empty(scratch_bytes, dtype=torch.uint8, device=a.device)
    elif _tiled(a.device.type, a.dtype):
        _gemm_tiles(out, a, b, add, scratch_bytes)
    elif out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif _mixed_addmm(a.device.type, a.dtype):
        torch.addmm(out, a, b, beta=int(add), out_dtype=out.dtype, out=out)
    else:
        _gemm_tiles(out, a, b, add, scratch_bytes)


def scratch_bytes_of(chunk_logits_bytes: int) -> int:
    """The tiles' share: a twentieth of a chunk's logits, but no tiles too small to be worth a call."""
    return max(1 << 18, chunk_logits_bytes // 20)


def needs_scratch(device: str, out_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `gemm` goes tile by tile for these operands."""
    kind = device.split(":")[0]
    return _tiled(kind, dtype) or (out_dtype != dtype and not _mixed_addmm(kind, dtype))


def _tiled(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype.itemsize < 4


def _gemm_tiles(out: Tensor, a: Tensor, b: Tensor, add: bool, scratch_bytes: int) -> None:
    (m, k), n = a.shape, b.shape[1]
    mb, nb, kb = _tile_shape(m, n, k, scratch_bytes // 4)
    direct = out.dtype == torch.float32
    for i in range(0, m, mb):
        for j in range(0, n, nb):
            target = out[i : i + mb, j : j + nb]
            # Adding two dtypes would convert one of them in a temporary, so the sum starts from what is there.
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
    """Tile sizes with mb kb + kb nb + mb nb <= floats, as near a cube as the matrix lets them be."""
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


@cache
def _mixed_addmm(device: str, dtype: torch.dtype) -> bool:
    """The device adds a 16-bit product to a float32 sum in one call (CUDA from torch 2.8 on)."""
    if device != "cuda":
        return False
    with unset_fake_temporarily():  # a GPU that is only simulated cannot be asked
        if not torch._C._cuda_getDeviceCount():
            return True
        a = torch.ones(16, 16, dtype=dtype, device=device)
        out = torch.ones(16, 16, dtype=torch.float32, device=device)
        try:
            torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
        except (RuntimeError, TypeError):
            return False
        return bool((out == 17).all())
