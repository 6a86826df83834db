"""The cheapest plan within a budget: a search over the graph proposes, the final trace decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.decisions.program import Planned
from thunder_mem.memory.plan import BudgetOutcome, Decision, Plan
from thunder_mem.partition.budget_search import PartitionChoice, PartitionProblem, fit_budget
from thunder_mem.partition.offload_search import fit_with_offload
from thunder_mem.rendering.progress import stage
from thunder_mem.runtime.host_transfers import offloaded_names

__all__ = ["with_nothing_bought", "within_budget"]

# How often the target is moved by the difference between a plan and its trial.
_ATTEMPTS = 4
# If a plan stays this share of the budget below its trial, a higher target is tried.
_UNUSED_SHARE = 0.005

Finish = Callable[[Planned], Planned]


def within_budget(
    free: Planned, problem: PartitionProblem, budget_bytes: int, plan: Callable[..., Planned], finish: Finish
) -> Planned:
    """`free` if it fits, else the cheapest plan that fits; the trial proposes, the final trace decides.

    Args:
        free: the plan without costly recomputation.
        problem: the storages that may be recomputed or offloaded.
        budget_bytes: the limit.
        plan: makes a plan of the storages to recompute and to offload.
        finish: gives a plan its final trace and that trace's peaks.
    """

    def finished(planned: Planned, fit: PartitionChoice, method: str) -> Planned:
        return finish(_with_outcome(free, planned, _outcome(budget_bytes, planned, fit, method)))

    costless = PartitionChoice(frozenset(), free.peak_bytes, 0.0, 0.0, "free")
    free_bytes = min(free.peak_bytes, free.plan.overwritten_peak_bytes or free.peak_bytes)
    fewer_rows = []  # loops of fewer rows buy nothing, but may take more time than a recomputation
    if free_bytes - _rows_bytes(free) <= budget_bytes:
        final = finished(free, costless, "free")
        if final.fits and free_bytes <= budget_bytes:
            return final
        fewer_rows = [(final, costless)] if final.fits else []
    target_bytes = budget_bytes
    tried: dict[tuple[frozenset[int], frozenset[int]], tuple[Planned, Planned, PartitionChoice]] = {}
    for attempt in range(1, _ATTEMPTS + 1):
        with stage(f"searching within the budget, attempt {attempt} of {_ATTEMPTS} at most"):
            fit = (fit_budget if problem.moves is None else fit_with_offload)(problem, target_bytes)
        choice = fit.rebuilt, fit.offloaded
        if choice in tried:
            break
        planned = plan(*choice)
        final = finished(planned, fit, fit.method)
        tried[choice] = final, planned, fit
        saved_bytes = fit.peak_bytes - final.peak_bytes  # by merges, another arrangement, results over dying values
        if final.peak_bytes <= budget_bytes and saved_bytes <= _UNUSED_SHARE * budget_bytes:
            break
        target_bytes = max(1, budget_bytes + saved_bytes)
    bought = [(final, fit) for final, _, fit in tried.values() if final.peak_bytes <= budget_bytes]
    if fitting := [*fewer_rows, *bought]:
        final = min(fitting, key=partial(_price, with_loops=any(f.lighter is not None for f, _ in fitting)))[0]
        if _is_dearer_than_recomputing(final.plan):
            return within_budget(free, replace(problem, moves=None), budget_bytes, plan, finish)
        return final
    final, planned, fit = min(tried.values(), key=lambda t: (t[0].peak_bytes, t[2].seconds))
    costing_nothing = finished(free, costless, "smallest")
    return costing_nothing if costing_nothing.peak_bytes <= final.peak_bytes else finished(planned, fit, "smallest")


def _rows_bytes(planned: Planned) -> int:
    """The most bytes by which fewer rows can lower a peak: what a loop holds. On a CPU rows stay as they are."""
    ops = zip(planned.source.graph.ops, planned.source.bsyms, strict=True)
    loops = (op for op, bsym in ops if is_chunk_loop(bsym) and loop_of(bsym).plan.device.startswith("cuda"))
    return max((op.scratch_bytes for op in loops), default=0)


def _price(found: tuple[Planned, PartitionChoice], with_loops: bool) -> tuple[float, int]:
    """The seconds that a plan buys; of the whole program if loops at its peak were changed, which takes time too."""
    final, fit = found
    return final.final_seconds if with_loops else fit.seconds, final.peak_bytes


def with_nothing_bought(default: Planned, budget_bytes: int) -> Planned:
    """A final plan that was made without a budget, with its outcome under one that nothing fits."""
    costless = PartitionChoice(frozenset(), default.peak_bytes, 0.0, 0.0, "free")
    outcome = _outcome(budget_bytes, default, costless, "smallest")
    how = "nothing fits, and a smaller plan leaves more alive for a loss outside"
    said = Decision("budget", how, "peak", default.peak_bytes, default.peak_bytes)
    return replace(default, plan=replace(default.plan.after(said), budget=outcome))


def _is_dearer_than_recomputing(plan: Plan) -> bool:
    """Whether copies delay the step more than a recomputation that also fits the budget."""
    bought = plan.budget
    if bought is None or not bought.offloaded or bought.without_offload_ms is None:
        return False
    return bought.cost_ms > bought.without_offload_ms


def _outcome(budget_bytes: int, planned: Planned, fit: PartitionChoice, method: str) -> BudgetOutcome:
    recompute_ms = (fit.seconds - fit.exposed_seconds) * 1e3
    return BudgetOutcome(
        budget_bytes,
        planned.peak_bytes,
        recompute_ms,
        fit.bound_seconds * 1e3,
        method,
        offloaded_names(planned.source.bsyms),
        exposed_ms=fit.exposed_seconds * 1e3,
        without_offload_ms=None if fit.without_seconds is None else fit.without_seconds * 1e3,
    )


def _with_outcome(free: Planned, planned: Planned, outcome: BudgetOutcome) -> Planned:
    if planned is free:
        how = "fits without recomputing anything costly" if outcome.method == "free" else "nothing smaller was found"
    else:
        least = f" (at least {outcome.bound_ms:.3g} ms)" if outcome.bound_ms else ""
        moved = f" and offload {len(outcome.offloaded):,} values" if outcome.offloaded else ""
        how = f"recompute for {outcome.recompute_ms:.3g} ms{moved}{least}, by {outcome.method}"
    bought = Decision("budget", how, "peak", free.peak_bytes, planned.peak_bytes)
    return replace(planned, plan=replace(planned.plan.after(bought), budget=outcome))
