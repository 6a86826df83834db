"""The hills of a timeline: peaks that are more than a ripple beside a higher one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["hills"]


def hills(live_bytes: Sequence[int], count: int = 5, share: float = 0.05) -> tuple[int, ...]:
    """Positions of the highest hills, including the peak, highest first.

    A hill counts if the timeline falls by at least `share` of its whole range before it rises higher (the hill's
    topographic prominence). Between two tops of one height the timeline must fall as far, else only the first counts.

    Raises:
        ValueError: `count` below 1, or a share outside of 0..1.

    Example:
        >>> hills([1, 9, 2, 8, 7, 8, 1, 3])
        (1, 3, 5, 7)
        >>> hills([1, 9, 2, 8, 7, 8, 1, 3], share=0.5)
        (1, 3)
    """
    from scipy.signal import find_peaks  # takes half a second to import

    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"hills takes a count from 1 up and a share in 0..1, not {count!r} and {share!r}")
    if not live_bytes:
        return ()
    live = np.asarray(live_bytes)
    least = max(1, share * np.ptp(live))
    # Both ends are lower than all by more than the whole range, so that a top at an end counts as any other.
    padded = np.pad(live, 1, constant_values=live.min() - np.ptp(live) - 1)
    _, about = find_peaks(padded, prominence=least, plateau_size=1)
    found, same_height = [], dict[int, int]()
    for position in (about["left_edges"] - 1).tolist():
        before = same_height.get(live_bytes[position])
        if before is None or live_bytes[position] - live[before:position].min() >= least:
            found.append(position)
        same_height[live_bytes[position]] = position
    return tuple(sorted(found, key=lambda p: (-live_bytes[p], p))[:count])
