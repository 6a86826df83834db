"""Whether an optimizer's states are on the device or on the host: one more choice of a budget.

`StepInBackward(states="auto")` leaves the choice open, and the budget counts the states, too. Beside states on the
device the program gets what they leave of the budget. It may fit by itself, or buy recomputation, offloading and tiles.
With states on the host it has the whole budget, and pays for the copies that nothing hides. The faster plan runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from thunder_mem.memory.plan import Decision
from thunder_mem.memory.units import size
from thunder_mem.optimizer.host_states import stays_on_device
from thunder_mem.optimizer.update import is_update, update_of
from thunder_mem.partition.budget import BudgetError, parse_budget
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.program import Planned
from thunder_mem.rewrites.updates import Optimized
from thunder_mem.runtime.device_memory import device_memory_bytes

__all__ = ["with_states_placed"]


def with_states_placed(plan: Callable[[PlanningOptions], Planned], options: PlanningOptions) -> Planned:
    """The plan with the optimizer's states in their best place, if that is open.

    Args:
        plan: makes a plan, and raises a `BudgetError` where none fits and `on_infeasible` is "error".
        options: of the plan.
    """
    optimized = options.optimized
    if optimized is None or not optimized.optimizer.undecided or options.budget is None:
        return plan(options)
    on_device = _beside_states(plan, options, optimized)
    if on_device is not None and _is_free(on_device):
        return on_device
    if stays_on_device(optimized.optimizer.wrapped) is not None:
        return plan(options) if on_device is None else on_device
    away = replace(options, optimized=replace(optimized, states="host"))
    if on_device is None:
        return plan(away)
    try:
        on_host = plan(replace(away, on_infeasible="error"))
    except BudgetError:
        return on_device
    return min(on_device, on_host, key=_seconds)


def _beside_states(
    plan: Callable[[PlanningOptions], Planned], options: PlanningOptions, optimized: Optimized
) -> Planned | None:
    """The plan within what states on the device leave of the budget; None if nothing fits."""
    assert options.budget is not None
    device = next(iter(optimized.parameters.values())).device
    budget_bytes, state_bytes = parse_budget(options.budget, device_memory_bytes(device)), optimized.state_bytes
    if state_bytes >= budget_bytes:
        return None
    left_bytes = budget_bytes - state_bytes
    try:
        planned = plan(replace(options, budget=left_bytes, on_infeasible="error"))
    except BudgetError:
        return None
    how = f"{size(state_bytes)} of a budget of {size(budget_bytes)} on the device"
    decision = Decision("optimizer states", how, "budget", budget_bytes, left_bytes)
    return replace(planned, plan=replace(planned.plan, decisions=(*planned.plan.decisions, decision)))


def _is_free(planned: Planned) -> bool:
    """Whether the plan has bought nothing to fit."""
    return planned.plan.budget is not None and planned.plan.budget.method == "free"


def _seconds(planned: Planned) -> float:
    """The modelled seconds of a plan, with the copies of states that nothing hides."""
    assert planned.final is not None
    moved = (update_of(b).transfers for b in planned.final.bound_symbols if is_update(b))
    return planned.final_seconds + sum(m.exposed_s for m in moved if m is not None)
