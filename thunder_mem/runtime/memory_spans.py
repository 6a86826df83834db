"""The memory that tensors span in their storages, and tensors that share some of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

__all__ = ["extent", "overlapping"]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last, with those between that it does not show.

    Example:
        >>> extent((2, 3), (8, 1)), extent((4,), (0,)), extent((0, 3), (3, 1))
        (11, 1, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(shape, strides, strict=True))


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The `id` of each tensor whose memory overlaps with another's.

    Flat parameters side by side on one storage do not overlap. Columns between another's columns count as if they did.
    """
    on_storage = defaultdict[int, dict[int, torch.Tensor]](dict)
    for t in tensors:
        if t.numel():
            on_storage[t.untyped_storage()._cdata][id(t)] = t
    found: set[int] = set()
    for together in on_storage.values():
        if len(together) > 1:
            found |= _overlapping_on_one_storage(together.values())
    return found


def _overlapping_on_one_storage(tensors: Iterable[torch.Tensor]) -> set[int]:
    found: set[int] = set()
    longest, reached = 0, 0  # the tensor that reaches furthest so far, and the first byte behind it
    for t in sorted(tensors, key=lambda t: t.storage_offset() * t.itemsize):
        if t.storage_offset() * t.itemsize < reached:
            found |= {longest, id(t)}
        end = _end(t)
        if end > reached:
            longest, reached = id(t), end
    return found


def _end(t: torch.Tensor) -> int:
    """The first byte behind a tensor in its storage."""
    return (int(t.storage_offset()) + extent(t.shape, t.stride())) * t.itemsize
