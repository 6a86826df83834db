"""Under a budget, tiles compete with recomputation and offload by price: of the programs that fit, the fastest runs.

All stretches in tiles take more time than some, but buy less. Studying another program costs as much as planning it. So
cheaper tiles are planned only while the best plan takes longer than the program without tiles that buys nothing. They
end with the first that does not fit: the next leave less in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from thunder_mem.partition.budget import BudgetError
from thunder_mem.planning.program import Planned

__all__ = ["Found", "plans_in_budget"]

Found = Planned | BudgetError
"""A plan, or why there is none."""


def plans_in_budget(
    with_tiles: Found,
    without: Found,
    faster: Callable[[Planned, float], Iterable[Found]],
    seconds: Callable[[Planned], float],
    free_share: float,
) -> list[Planned]:
    """The plans of one function among which the budget chooses.

    Args:
        with_tiles, without: with all stretches in tiles, and with none.
        faster: makes others that may take less time than `with_tiles`, for the seconds by which it takes too long;
            those with most in tiles come first.
        seconds: the modelled time of a plan, with what it bought.
        free_share: of the time; a plan that takes so much more is as good as the faster one.

    Raises:
        BudgetError: there is no plan; it names the smallest peak of all.
    """
    plans = [found for found in (without, with_tiles) if isinstance(found, Planned)]
    if not plans:
        raise min((e for e in (without, with_tiles) if isinstance(e, BudgetError)), key=lambda e: e.smallest_peak_bytes)
    if isinstance(with_tiles, BudgetError) or not with_tiles.fits:
        return plans
    best_s = min(seconds(plan) for plan in plans if plan.fits)
    enough_s = (1 + free_share) * _free_seconds(without, seconds)
    excess_s = seconds(with_tiles) - best_s / (1 + free_share)
    for other in faster(with_tiles, excess_s) if best_s > enough_s else ():
        if isinstance(other, BudgetError):
            break
        plans.append(other)
        if seconds(other) <= enough_s:
            break
    return plans


def _free_seconds(without: Found, seconds: Callable[[Planned], float]) -> float:
    """The time of a plan that fits, without what it bought; 0 if it does not fit, for then its time is no measure."""
    if isinstance(without, BudgetError) or not without.fits:
        return 0.0
    assert without.plan.budget is not None
    return seconds(without) - without.plan.budget.cost_ms / 1e3
