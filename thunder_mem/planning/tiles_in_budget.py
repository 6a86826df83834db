"""Under a budget, tiles compete with recomputation and offload by price: of the programs that fit, the fastest runs.

All stretches in tiles take more time than some, but buy less. Outside of a checkpoint a tile's backward repeats the
forward, as recomputation does. Studying another program costs as much as planning it. So others are planned only while
the best plan takes longer than the program without tiles that buys nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from thunder_mem.planning.program import Planned

__all__ = ["plans_in_budget"]

Seconds = Callable[[Planned], float]


def plans_in_budget(
    without: Planned,
    with_tiles: Planned | None,
    faster: Callable[[Planned, float], Iterable[Planned]],
    repeating: Callable[[float], Iterable[Planned]],
    seconds: Seconds,
    free_share: float,
) -> list[Planned]:
    """The plans of one function among which a budget chooses.

    Args:
        without: without tiles.
        with_tiles: with all stretches in tiles that repeat nothing; None if there are none.
        faster: makes others that may take less time than `with_tiles`, for the seconds by which it takes too long;
            those with most in tiles come first.
        repeating: makes others that also have stretches in tiles which repeat work, for the seconds that this may take.
        seconds: the modelled time of a plan, with what it bought.
        free_share: of the time; a plan that takes so much more is as good as the faster one.
    """
    plans = [without] if with_tiles is None else [without, with_tiles]
    enough_s = (1 + free_share) * _free_seconds(without, seconds) if without.fits else 0.0
    if with_tiles is not None and with_tiles.fits and (best_s := _best_seconds(plans, seconds)) > enough_s:
        for other in faster(with_tiles, seconds(with_tiles) - best_s / (1 + free_share)):
            if not other.fits:
                break  # the next leave less in tiles
            plans.append(other)
            if seconds(other) <= enough_s:
                break
    best_s = _best_seconds(plans, seconds)
    room_s = best_s - _free_seconds(with_tiles or without, seconds)
    if best_s > enough_s and room_s > 0:
        plans += repeating(room_s)
    return plans


def _best_seconds(plans: Iterable[Planned], seconds: Seconds) -> float:
    """The time of the fastest plan that fits; infinite if none does."""
    return min((seconds(plan) for plan in plans if plan.fits), default=inf)


def _free_seconds(planned: Planned, seconds: Seconds) -> float:
    """The time of a plan without what it bought."""
    assert planned.plan.budget is not None
    return seconds(planned) - planned.plan.budget.cost_ms / 1e3
