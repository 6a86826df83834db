"""The hills of a timeline: peaks that are more than a ripple beside a higher one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["hills"]


def hills(live_bytes: Sequence[int], count: int = 5, share: float = 0.05) -> tuple[int, ...]:
    """Positions of the highest hills, including the peak, highest first.

    A hill counts if the timeline falls by at least `share` of its whole range before it rises higher (the hill's
    topographic prominence). Linear time.

    Raises:
        ValueError: `count` below 1, or a share outside of 0..1.

    Example:
        >>> hills([1, 9, 2, 8, 7, 8, 1, 3])
        (1, 3, 5, 7)
        >>> hills([1, 9, 2, 8, 7, 8, 1, 3], share=0.5)
        (1, 3)
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"hills takes a count from 1 up and a share in 0..1, not {count!r} and {share!r}")
    if not live_bytes:
        return ()
    least = max(1, share * (max(live_bytes) - min(live_bytes)))
    before = _valleys(live_bytes, or_equal=True)
    after = _valleys(live_bytes[::-1], or_equal=False)[::-1]
    found = []
    for position, live in enumerate(live_bytes):
        valleys = [v for v in (before[position], after[position]) if v is not None]
        if not valleys or live - max(valleys) >= least:
            found.append(position)
    return tuple(sorted(found, key=lambda p: (-live_bytes[p], p))[:count])


def _valleys(live_bytes: Iterable[int], or_equal: bool) -> list[int | None]:
    """For each position the lowest value since the last higher one (`or_equal`: or equal); None without one."""
    stack: list[tuple[int, int]] = []  # (value, the lowest from behind the entry below up to here), falling
    valleys: list[int | None] = []
    for live in live_bytes:
        lowest = live
        while stack and (stack[-1][0] < live or (stack[-1][0] == live and not or_equal)):
            lowest = min(lowest, stack.pop()[1])
        valleys.append(lowest if stack else None)
        stack.append((live, lowest))
    return valleys
