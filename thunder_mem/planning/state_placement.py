"""Whether an optimizer's states are on the device or on the host: one more choice of a budget.

`StepInBackward(states="auto")` leaves the choice open, and the budget counts the states, too. Beside states on the
device the program gets what they leave of the budget. It may fit by itself, or buy recomputation, offloading and tiles.
With states on the host it has the whole budget, and pays for the copies that nothing hides. The faster plan runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.program import Planned
from thunder_mem.memory.plan import Decision
from thunder_mem.memory.units import size
from thunder_mem.optimizer.figures import large_state_bytes
from thunder_mem.optimizer.host_states import stays_on_device
from thunder_mem.optimizer.update import is_update, update_of
from thunder_mem.partition.budget import BudgetError, parse_budget
from thunder_mem.rewrites.updates import Optimized
from thunder_mem.runtime.device_memory import device_memory_bytes

__all__ = ["place_states", "with_states_placed"]


def with_states_placed(plan: Callable[[PlanningOptions], Planned], options: PlanningOptions) -> Planned:
    """The plan with the optimizer's states in their best place, if that is open, and within what they leave.

    Args:
        plan: makes a plan, and raises a `BudgetError` where none fits and `on_infeasible` is "error".
        options: of the plan.
    """
    optimized = options.optimized
    if optimized is None or options.budget is None or not optimized.optimizer.counted or not optimized.parameters:
        return plan(options)
    if optimized.place == "host":
        return plan(options)
    if not optimized.optimizer.undecided or stays_on_device(optimized.optimizer.wrapped) is not None:
        return _beside_states(plan, options, optimized)
    try:
        on_device = _beside_states(plan, replace(options, on_infeasible="error"), optimized)
    except BudgetError:
        return plan(replace(options, optimized=replace(optimized, states="host")))
    if _is_free(on_device):
        return on_device
    try:
        on_host = plan(replace(options, on_infeasible="error", optimized=replace(optimized, states="host")))
    except BudgetError:
        return on_device
    return min(on_device, on_host, key=_seconds)


def place_states(planned: Planned) -> None:
    """Tell the optimizer where a plan with updates and a budget has its states, if that was open."""
    optimized, options = planned.program.options.optimized, planned.program.options
    assert planned.final is not None
    if optimized is not None and options.budget is not None and any(map(is_update, planned.final.bound_symbols)):
        optimized.optimizer.place_states(optimized.place)


def _beside_states(
    plan: Callable[[PlanningOptions], Planned], options: PlanningOptions, optimized: Optimized
) -> Planned:
    """The plan within what states on the device leave of the budget."""
    assert options.budget is not None
    device = next(iter(optimized.parameters.values())).device
    budget_bytes = parse_budget(options.budget, device_memory_bytes(device))
    state_bytes = large_state_bytes(optimized.optimizer.wrapped)
    left_bytes = max(1, budget_bytes - state_bytes)
    how = f"{size(state_bytes)} of a budget of {size(budget_bytes)} on the device"
    try:
        planned = plan(replace(options, budget=left_bytes))
    except BudgetError as error:
        error.args = (f"{error} This is what the optimizer's states leave: {how}.",)
        raise
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
