"""How many rows a chunk has, from the head alone; `chunk_fit.py` asks the whole program afterwards."""

from __future__ import annotations

from thunder_mem.chunk_plan import Head

__all__ = ["FLOOR_ROWS", "default_rows", "floor_rows", "lean_rows", "leanest_rows"]

FLOOR_ROWS = {"cuda": 2048, "cpu": 192}
"""Fewer rows than this starve the matrix products (measured: H200, where 256 rows take 1.5 times as long
as 4096; a CPU, where 192 rows take 1.05 times as long as 256, and 128 rows 1.2 times, in bfloat16)."""


def floor_rows(device: str) -> int:
    """Rows that keep the matrix products of a device efficient."""
    return FLOOR_ROWS.get(device.split(":")[0], 1024)


_TOO_FEW_ROWS = 4
"""How often the logits must go into the gradients for one chunk to cost more than it saves: its gradients wait
for the backward. Measured over 416 heads of 128 to 2048 rows; frozen weights have small gradients."""


def lean_rows(head: Head) -> int | None:
    """The rows with the lowest peak among those that keep the matrix products efficient; None to leave it whole.

    That is the floor, or all rows at once where a wider sum of gradients would take more than the
    smaller logits save: 4096 rows before a weight of (128256, 4096) in bfloat16 need 1002 MiB for their
    logits, while summing up in float32 over two chunks needs 1002 MiB more than one product.
    """
    return _unless_whole_is_less(head, max(floor_rows(head.device), head.busy_rows))


def leanest_rows(head: Head) -> int | None:
    """A quarter of `lean_rows`, for a program that has to fit a budget and gets the rest back where it can."""
    return _unless_whole_is_less(head, floor_rows(head.device) // 4)


def default_rows(head: Head) -> int:
    """Rows per chunk when nobody looks at the rest of the program: one chunk's logits add a sixteenth to
    what the head needs anyway, but no fewer rows than keep the matrix products efficient.
    """
    enough = max(head.busy_rows, head.fixed_bytes // (16 * max(1, head.row_bytes)))
    return _unless_one_is_less(head, max(floor_rows(head.device), enough))


def _unless_one_is_less(head: Head, rows: int) -> int:
    one_chunk = head.n * head.row_bytes + head.single_bytes
    return head.n if one_chunk <= rows * head.row_bytes + head.fixed_bytes else rows


def _unless_whole_is_less(head: Head, rows: int) -> int | None:
    rows = _unless_one_is_less(head, rows)
    return None if rows >= head.n and head.single_bytes > _TOO_FEW_ROWS * head.n * head.row_bytes else rows
