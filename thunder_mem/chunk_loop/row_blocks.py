"""Rows of a tensor over any dims: as views, or gathered if strides forbid a single view."""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_mem.sharding.propagation import Sharding, local_shape

__all__ = ["block_count", "block_sizes", "read_rows", "row_views", "write_rows"]


def block_sizes(n: int, chunk_rows: int, block_rows: int) -> tuple[int, ...]:
    """The distinct numbers of rows of blocks, largest first.

    >>> block_sizes(1000, 300, 128)
    (128, 100, 44)
    """
    sizes = set()
    for chunk in {min(chunk_rows, n), n % chunk_rows or chunk_rows}:
        sizes.update({min(block_rows, chunk), chunk % block_rows or min(block_rows, chunk)})
    return tuple(sorted(sizes, reverse=True))


def block_count(n: int, chunk_rows: int, block_rows: int) -> int:
    """The number of blocks in all chunks.

    >>> block_count(1000, 300, 128)
    10
    """
    chunks, rest = divmod(n, chunk_rows)
    return chunks * -(-chunk_rows // block_rows) + -(-rest // block_rows)


def row_views(t: Tensor, sharding: Sharding, start: int, stop: int) -> list[Tensor]:
    """Views of rows [start, stop) of `t`, in order, each with the shape that a block expects.

    One view if the row dims are evenly strided in memory, several otherwise (a slice of a sequence), never a
    copy.
    """
    dims = [d for d, row in enumerate(sharding.dims) if row is not None]
    *outer, last = dims
    if not outer:
        return [t.narrow(last, start, stop - start)]
    inner = t.shape[last]
    span = inner
    for d in reversed(outer):
        if t.shape[d] != 1 and t.stride(d) != span * t.stride(last):
            break
        span *= t.shape[d]
    views = []
    while start < stop:
        end = min(stop, (start // span + 1) * span)
        offset, rest = t.storage_offset(), start
        for d in dims:
            row = sharding.dims[d]
            assert row is not None
            offset += (rest // row.stride) * t.stride(d)
            rest %= row.stride
        shape = local_shape(t.shape, sharding, end - start)
        views.append(t.as_strided(shape, t.stride(), offset))
        start = end
    return views


def read_rows(t: Tensor, sharding: Sharding, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of `t`: a view where possible."""
    views = row_views(t, sharding, start, stop)
    return views[0] if len(views) == 1 else torch.cat(views, dim=_row_dim(sharding))


def write_rows(t: Tensor, sharding: Sharding, start: int, stop: int, value: Tensor) -> None:
    """Copy `value`, with as many rows or none, over rows [start, stop) of `t`."""
    views = row_views(t, sharding, start, stop)
    if len(views) == 1 or not value.ndim:
        for view in views:
            view.copy_(value)
        return
    dim, at = _row_dim(sharding), 0
    for view in views:
        view.copy_(value.narrow(dim, at, view.shape[dim]))
        at += view.shape[dim]


def _row_dim(sharding: Sharding) -> int:
    return max(d for d, row in enumerate(sharding.dims) if row is not None)
