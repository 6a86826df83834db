"""What strided tensors show of their storage."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["extent"]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last, with those between that it does not show.

    Example:
        >>> extent((2, 3), (8, 1)), extent((4,), (0,)), extent((0, 3), (3, 1))
        (11, 1, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(shape, strides, strict=True))
