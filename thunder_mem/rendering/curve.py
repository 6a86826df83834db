"""The timeline at the level of detail that a picture can show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["columns", "labelled", "ticks", "whole_numbers"]


def columns(live_bytes: Sequence[int], most: int) -> tuple[int, ...]:
    """At most `most` positions, in order, that represent the timeline: the highest of each stretch.

    So a narrow peak is never lost, and the picture has the timeline's highest point.

    Raises:
        ValueError: `most` below 1.

    Example:
        >>> columns([1, 5, 2, 2, 9, 3], 3)
        (1, 2, 4)
    """
    if most < 1:
        raise ValueError(f"a picture has at least 1 column, not {most!r}")
    count = len(live_bytes)
    most = min(most, count)
    edges = [count * i // most for i in range(most + 1)] if most else [0]
    return tuple(max(range(a, b), key=lambda p: (live_bytes[p], -p)) for a, b in pairwise(edges))


def labelled(loops: Sequence[tuple[int, str]], room: float) -> tuple[tuple[int, str], ...]:
    """The loops with room for a label: those that begin at least `room` operations after the last label.

    Example:
        >>> labelled([(3, "8 tiles"), (4, "2 tiles"), (9, "8 tiles")], 5)
        ((3, '8 tiles'), (9, '8 tiles'))
    """
    found: list[tuple[int, str]] = []
    for position, parts in loops:
        if not found or position - found[-1][0] >= room:
            found.append((position, parts))
    return tuple(found)


def ticks(peak_bytes: int) -> tuple[int, ...]:
    """Round numbers of bytes from 0 to the peak, for an axis: multiples of a power of two.

    Example:
        >>> ticks(700)
        (0, 128, 256, 384, 512, 640)
    """
    if peak_bytes <= 0:
        return (0,)
    step = 1 << max(0, peak_bytes.bit_length() - 3)
    return tuple(range(0, peak_bytes + 1, step))


def whole_numbers(count: int, most: int = 12) -> tuple[int, ...]:
    """Numbers from 0 to below `count`, for an axis: at most `most`, in steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> whole_numbers(4), whole_numbers(65)
        ((0, 1, 2, 3), (0, 10, 20, 30, 40, 50, 60))
    """
    steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(step for step in steps if count <= most * step)
    return tuple(range(0, count, step))
