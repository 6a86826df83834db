"""The rows of a chunk, from the head alone; `chunk_resizing.py` later considers the whole program."""

from __future__ import annotations

from math import log2

import torch

from thunder_mem.chunk_loop.matmul import multiplies_in_tiles
from thunder_mem.chunk_loop.plan import Head
from thunder_mem.costs.roofline import device_model_of

__all__ = [
    "AUTO_MIN_BYTES",
    "allowed_block_rows",
    "default_rows",
    "equal_rows",
    "even_part",
    "even_rows",
    "floor_rows",
    "lean_rows",
    "leanest_rows",
    "most_rows",
]

AUTO_MIN_BYTES = 1 << 20
"""In automatic mode smaller results are left alone, unless a budget is small, too."""

_CPU_ROWS, _AMX_ROWS, _OTHER_ROWS = 192, 256, 1024
"""Measured: on a CPU 192 rows take 1.05 times as long as 256, and 128 rows 1.2 times, in bfloat16. With AMX a head of
192 rows takes 1.18 times as long as of 256, and 1.28 times as of 512, whose logits are twice as large."""

_VECTOR_ROWS = 16
"""Rows that a CPU's product computes at once."""

_TILE_ROWS, _ENOUGH_ROWS, _MOST_ROWS = 128, 2048, 4096
"""Of a GPU's product a tile has 128 rows. Measured: on an H200 256 rows take 1.5 times as long as 4096, in bfloat16,
and 2048 rows 1.07 times. By the roofline more than 4096 rows save nothing."""


def floor_rows(device: str, dtype: torch.dtype) -> int:
    """Rows that keep the matrix products of a device efficient: fewer starve them.

    Every chunk adds to a sum of the weight's gradient, which reads and writes 8 bytes for 2 operations a row. Twice
    the rows for which both take equally long keep a GPU busy. That is 2,048 in bfloat16 on an H100, but 128 in
    float32, whose products are 15 times as slow.

    Args:
        device: as torch prints it.
        dtype: of the products.
    """
    kind = device.split(":")[0]
    if kind == "cpu":
        return _AMX_ROWS if multiplies_in_tiles(kind, dtype) else _CPU_ROWS
    if kind != "cuda":
        return _OTHER_ROWS
    model = device_model_of(torch.device(device))
    flops = model.matmul_flops(str(dtype).removeprefix("torch."))
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":  # TF32 runs at half of 16 bits
        flops = max(flops, model.matmul_flops("float16") / 2)
    busy = round(log2(8 * flops / model.bandwidth_bytes_per_s))
    return min(_ENOUGH_ROWS, max(_TILE_ROWS, 1 << max(0, busy)))


def equal_rows(n: int, rows: int) -> int:
    """The fewest rows, from `rows` to half as many more, that cut `n` into equal chunks; `rows` if none do.

    Equal chunks are one program: a shorter last one would be compiled apart.

    >>> equal_rows(1024, 192), equal_rows(1021, 192), equal_rows(250, 192)
    (256, 192, 192)
    """
    return next((m for m in range(rows, min(n // 2, rows + rows // 2) + 1) if n % m == 0), rows)


def allowed_block_rows(device: str, n: int, chunk_rows: int, row_bytes: int, row_scratch: int, *, asked: bool) -> int:
    """Rows of a block on a CPU whose temporaries take at most a tenth of the chunk's logits, between the products.

    They may always take 128 KiB, and a 16th of all logits up to 512 KiB, because smaller blocks work no longer than the
    calls themselves take. The 16th does not apply to chunks that the user set, which are most of the peak.

    Args:
        device: as torch prints it.
        n: all rows.
        chunk_rows: rows of a chunk.
        row_bytes: of the logits.
        row_scratch: bytes of the temporaries.
        asked: whether the user set the rows of a chunk.
    """
    share_bytes = 0 if asked or not device.startswith("cpu") else n * row_bytes // 16
    allowed_bytes = max(1 << 17, chunk_rows * row_bytes // 10, min(1 << 19, share_bytes))
    return allowed_bytes // max(1, row_scratch)


def even_part(rows: int, most: int) -> int:
    """The largest divisor of `rows` from `most` down to more than half as many; `most` if there is none.

    >>> even_part(256, 100), even_part(251, 100)
    (64, 100)
    """
    return next((part for part in range(most, max(1, most // 2), -1) if rows % part == 0), most)


def even_rows(n: int, chunk_rows: int) -> int:
    """Rows that keep the number of chunks and make them equal, or nearly so if their number does not divide `n`.

    >>> even_rows(1024, 288), even_rows(1021, 288), even_rows(1024, 192)
    (256, 256, 176)
    """
    chunks = -(-n // chunk_rows)
    rows = -(-n // chunks)
    return rows if n % chunks == 0 else min(chunk_rows, -(-rows // _VECTOR_ROWS) * _VECTOR_ROWS)


def most_rows(device: str, n: int) -> int:
    """Rows up to which a chunk of `n` may grow where this costs no memory: more save no time, but raise a half's peak.

    A CPU adds every chunk to the sums of gradients after its products, so there all rows save time.

    Args:
        device: as torch prints it.
        n: all rows.
    """
    return min(n, _MOST_ROWS) if device.startswith("cuda") else n


_TOO_FEW_ROWS = 4
"""How often the logits must go into the gradients for one chunk to cost more than it saves: its gradients wait
for the backward. Measured over 416 heads of 128 to 2048 rows; frozen weights have small gradients."""


def lean_rows(head: Head) -> int | None:
    """The rows with the lowest peak among those that keep the matrix products efficient; None to leave it whole.

    The answer is the floor, or all rows if a wider sum of gradients would take more than the smaller logits
    save. For example, 4096 rows before a weight of (128256, 4096) in bfloat16 need 1002 MiB for their logits.
    A float32 sum over two chunks needs 1002 MiB more than one product.
    """
    return _unless_whole_is_less(head, max(floor_rows(head.device, head.dtype), head.busy_rows))


def leanest_rows(head: Head) -> int | None:
    """A quarter of `lean_rows`, for a program under a budget; the chunks grow again where there is room.

    On a GPU at least the rows of a tile, because the rest of a tile would be wasted: recomputation costs less. A small
    head of fewer than two such chunks stays whole there, because its sums take as much as its logits.
    """
    rows = floor_rows(head.device, head.dtype)
    if not head.device.startswith("cuda"):
        return _unless_whole_is_less(head, max(rows // 4, 1))
    least = max(rows // 4, min(rows, _TILE_ROWS))
    if head.n < 2 * least and head.n * head.row_bytes < AUTO_MIN_BYTES:
        return None
    return _unless_whole_is_less(head, least)


def default_rows(head: Head) -> int:
    """Rows per chunk without knowledge of the rest of the program: one chunk's logits add a sixteenth to the
    head's other memory, but the rows suffice for efficient matrix products.
    """
    enough = max(head.busy_rows, head.fixed_bytes // (16 * max(1, head.row_bytes)))
    return _unless_one_is_less(head, max(floor_rows(head.device, head.dtype), enough))


def _unless_one_is_less(head: Head, rows: int) -> int:
    one_chunk = head.n * head.row_bytes + head.single_bytes
    return head.n if one_chunk <= rows * head.row_bytes + head.fixed_bytes else rows


def _unless_whole_is_less(head: Head, rows: int) -> int | None:
    rows = _unless_one_is_less(head, rows)
    return None if rows >= head.n and head.single_bytes > _TOO_FEW_ROWS * head.n * head.row_bytes else rows
