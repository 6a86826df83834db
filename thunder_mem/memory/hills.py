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
    from scipy.signal import find_peaks, peak_prominences  # which take half a second to import

    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"hills takes a count from 1 up and a share in 0..1, not {count!r} and {share!r}")
    if not live_bytes:
        return ()
    least = max(1, share * (max(live_bytes) - min(live_bytes)))
    # Both ends are lower than all by more than the whole range, so that a top at an end counts as any other.
    padded = np.pad(np.asarray(live_bytes, dtype=float), 1, constant_values=2 * min(live_bytes) - max(live_bytes) - 1)
    tops = find_peaks(padded, plateau_size=1)[1]["left_edges"].tolist()
    found: list[int] = []
    before, height = 0, None  # of the last prominent top, which may be a ripple beside one of the same height
    for top in sorted(tops, key=lambda top: (-padded[top], top)):
        if len(found) == count:
            break
        if peak_prominences(padded, [top])[0][0] < least:
            continue
        if padded[top] != height or height - padded[before:top].min() >= least:
            found.append(top - 1)
        before, height = top, padded[top]
    return tuple(found)
