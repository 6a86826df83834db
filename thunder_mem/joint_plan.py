"""Decide everything about a joint trace: what its backward rebuilds, and the plan of what results.

Free choices come first: the program as the user's checkpoints have it, that with all rebuilt that fused code
rebuilds from what those keep, and the least cut through both. Only if a budget is given and none fits, costly
work is bought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

import torch
from thunder.core import prims
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_mem.budget import BudgetOutcome, parse_budget
from thunder_mem.checkpoint import checkpointed_storages
from thunder_mem.choices import Choices, Chooser
from thunder_mem.cost import device_model_of
from thunder_mem.cost_measure import costs_of
from thunder_mem.decisions import about_recompute, about_saving
from thunder_mem.fit_budget import Fit, SavingProblem, fit_budget
from thunder_mem.fusibility import fusibility
from thunder_mem.offload import offloading
from thunder_mem.offload_exec import offloaded_names
from thunder_mem.offload_fit import fit_with_offload
from thunder_mem.offload_option import OffloadOption, moves_for
from thunder_mem.old_values import protect_old_values
from thunder_mem.plan import Decision, Plan, Refusal
from thunder_mem.planner import between_halves, cannot_beat, make_plan
from thunder_mem.recompute import draws_once, gathers_of_held, recompute_in_backward, why_not_again
from thunder_mem.refine import Planned, refined
from thunder_mem.regions import Fusibility
from thunder_mem.saving import saved_storages, storages_to_rebuild
from thunder_mem.second_gathers import gathered_twice
from thunder_mem.sorting import SortFunction
from thunder_mem.trace_graph import TraceGraph, read_trace

__all__ = ["Planned", "PlanningOptions", "device_of", "plan_joint_trace", "with_checkpoints"]

# How often the target is moved by what the plan makes of a choice, compared with its trial.
_ATTEMPTS = 4
# How often what the backward is handed is alive while the caller computes a loss and its gradient.
_LOSS_COPIES = 3
# Where a plan stays this share of the budget below its trial, a higher target is tried.
_UNUSED_SHARE = 0.005


@dataclass(frozen=True)
class PlanningOptions:
    """What `MemEfficient` passes on; see there."""

    sort: str | SortFunction = "auto"
    strict: bool = False
    budget: int | str | None = None
    on_infeasible: str = "error"
    costs: str = "roofline"
    recompute: Chooser | None = None
    offload: OffloadOption | None = None
    reuse: bool = True
    redraw: bool = True
    # Is shown what there is to decide, the function that plans a choice of storages to rebuild and to offload, and
    # the choice that costs nothing.
    observe: Callable[[SavingProblem, Callable[..., Planned], frozenset[int]], object] | None = None
    verify: bool | None = None
    refused: tuple[Refusal, ...] = ()  # by what ran before
    decisions: tuple[Decision, ...] = ()  # of what ran before


def _as_it_is(planned: Planned) -> Planned:
    return planned


def plan_joint_trace(
    trace: TraceCtx,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    finish: Callable[[Planned], Planned] = _as_it_is,
) -> Planned:
    """The best plan for a joint trace, within the budget if there is one; the smallest found where nothing fits.

    Args:
        trace: before fusion.
        executors: that fuse.
        options: see there.
        finish: makes the final trace of a plan, and gives the plan the peaks that it has there; by these a
            budget is judged.

    Raises:
        RecomputeError: `options.recompute` makes no sense for this program.
    """
    trace, source = _read(trace if options.redraw else draws_once(trace))
    fuse = fusibility(source, executors)
    gathered = gathers_of_held(source)
    choices, asked = _choices(source, fuse, gathered, options.recompute)
    names = [str(e.name) for e in executors]
    keepers = {source.graph.allocator[s] for s in choices.keep}
    kept_names = {p.name for op in keepers if op is not None for p in source.bsyms[op].flat_proxy_outs}

    def rebuilding(
        rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()
    ) -> tuple[TraceCtx, TraceGraph, Fusibility]:
        new, read = trace, source
        if rebuilt:
            new = recompute_in_backward(source, trace, rebuilt)
            read = read_trace(new, earlier=source)
        if away := offloaded | choices.offload:
            new, read = offloading(source, read, new, away)
        takes = fuse if read is source else fusibility(read, executors)
        kept = frozenset(read.producer_of[name] for name in kept_names if name in read.producer_of)
        return new, read, replace(takes, kept=kept) if kept else takes

    def planned(new: TraceCtx, read: TraceGraph, takes: Fusibility) -> Planned:
        made = make_plan(read.graph, takes, names, sort=options.sort)
        saving = about_saving(source.graph, read.graph)
        planned = refined(Planned(made, read, takes, new, trace), executors, options.sort)
        decisions = (*asked, saving, *planned.plan.decisions)
        return replace(planned, plan=replace(planned.plan, decisions=decisions))

    def plan(rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Planned:
        return planned(*rebuilding(rebuilt, offloaded))

    # A budget limits the halves alone, so there nothing else may decide what is free.
    rank = _with_loss_outside(options.reuse) if options.budget is None else attrgetter("peak_bytes")
    free, *others = _free_choices(source, fuse, choices, gathered)
    best, chosen = plan(free), free
    for other in others:
        new, read, takes = rebuilding(other)
        if not cannot_beat(read.graph, takes, best.peak_bytes) and rank(found := planned(new, read, takes)) < rank(
            best
        ):
            best, chosen = found, other
    if options.budget is None and options.observe is None:
        return finish(best)
    device = device_of(source)
    repeat_s = _repeat_seconds(source, fuse, options.costs, device)
    problem = SavingProblem(source.graph, fuse, repeat_s, choices, options.sort)
    if options.observe is not None:
        options.observe(problem, lambda *choice: finish(plan(*choice)), chosen)
    if options.budget is None:
        return finish(best)
    if options.offload is not None:
        moves = moves_for(options.offload, source, fuse, choices, free, device_model_of(device), str(device))
        problem = replace(problem, moves=moves)
    return _within_budget(best, plan, problem, options, device, finish)


def _with_loss_outside(reuse: bool) -> Callable[[Planned], tuple[int, int]]:
    """The peak, or what is alive while the caller computes a loss of the outputs, if that is more; then the peak.

    What the caller holds then is not known. The usual loss, a cross entropy of logits, holds a normalised copy,
    and in its backward the gradients of that and of its argument: three times what the backward is handed. With
    `reuse` the peak is what it would be if all results went over what dies.
    """

    def rank(planned: Planned) -> tuple[int, int]:
        source, plan = planned.source, planned.plan
        given = (b for b in source.bsyms if b.sym == prims.get_grad)
        tangents = {source.storage_of[p.name] for b in given for p in b.flat_proxy_outs}
        tangent_bytes = sum(source.graph.storages[s].nbytes for s in tangents)
        outside_bytes = between_halves(source.graph) + _LOSS_COPIES * tangent_bytes
        return max(plan.overwritten_peak_bytes if reuse else planned.peak_bytes, outside_bytes), planned.peak_bytes

    return rank


def _choices(
    source: TraceGraph, fuse: Fusibility, gathered: frozenset[int], recompute: Chooser | None
) -> tuple[Choices, tuple[Decision, ...]]:
    """What is not left to the minimum cut: the user's checkpoints, and what `MemEfficient(recompute=...)` asks for."""
    choices = Choices(offered=checkpointed_storages(source) | gathered, there_anyway=gathered_twice(source))
    if recompute is None or not any(op.backward for op in source.graph.ops):
        return choices, ()
    free = storages_to_rebuild(source.graph, fuse, choices)
    choices |= recompute.choose(source, free)
    chosen = storages_to_rebuild(source.graph, fuse, choices)
    return choices, (about_recompute(str(recompute), source.graph, free, chosen),)


def _within_budget(
    free: Planned,
    plan: Callable[..., Planned],
    problem: SavingProblem,
    options: PlanningOptions,
    device: torch.device,
    finish: Callable[[Planned], Planned],
) -> Planned:
    """`free` if it fits, else the cheapest plan that does; the trial proposes, the final trace decides."""
    assert options.budget is not None
    budget_bytes = parse_budget(options.budget, device)

    def finished(planned: Planned, fit: Fit, method: str) -> Planned:
        return finish(_with_outcome(free, planned, _outcome(budget_bytes, planned, fit, method)))

    costless = Fit(frozenset(), free.peak_bytes, 0.0, 0.0, "free")
    if min(free.peak_bytes, free.plan.overwritten_peak_bytes or free.peak_bytes) <= budget_bytes:
        final = finished(free, costless, "free")
        if final.peak_bytes <= budget_bytes:
            return final
    target_bytes = budget_bytes
    tried: dict[tuple[frozenset[int], frozenset[int]], tuple[Planned, Planned, Fit]] = {}
    for _ in range(_ATTEMPTS):
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
    fitting = [(final, fit) for final, _, fit in tried.values() if final.peak_bytes <= budget_bytes]
    if fitting:
        final = min(fitting, key=lambda f: (f[1].seconds, f[0].peak_bytes))[0]
        if _is_dearer_than_recomputing(final.plan):
            return _within_budget(free, plan, replace(problem, moves=None), options, device, finish)
        return final
    final, planned, fit = min(tried.values(), key=lambda t: (t[0].peak_bytes, t[2].seconds))
    costing_nothing = finished(free, costless, "smallest")
    return costing_nothing if costing_nothing.peak_bytes <= final.peak_bytes else finished(planned, fit, "smallest")


def _is_dearer_than_recomputing(plan: Plan) -> bool:
    """Whether copies turn out to hold up more than repetitions would that fit the budget as well."""
    bought = plan.budget
    if bought is None or not bought.offloaded or bought.without_offload_ms is None:
        return False
    return bought.cost_ms > bought.without_offload_ms


def _outcome(budget_bytes: int, planned: Planned, fit: Fit, method: str) -> BudgetOutcome:
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
    plan = replace(planned.plan, budget=outcome, decisions=(*planned.plan.decisions, bought))
    return replace(planned, plan=plan)


def _repeat_seconds(source: TraceGraph, fuse: Fusibility, costs: str, device: torch.device) -> list[float]:
    seconds_of = costs_of(costs, device_model_of(device))
    seconds = []
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        if fuse.cheap[op.index]:
            seconds.append(0.0)
        elif op.backward or why_not_again(source, op.index) is not None:
            seconds.append(inf)
        else:
            seconds.append(seconds_of(bsym))
    return seconds


def device_of(source: TraceGraph) -> torch.device:
    """The device that the program computes on: the one that holds most of what it allocates."""
    nbytes: dict[str, int] = {}
    for s in source.graph.storages:
        nbytes[s.device] = nbytes.get(s.device, 0) + s.nbytes
    return torch.device(max(nbytes, key=lambda d: (nbytes[d], d)) if nbytes else "cpu")


def _read(trace: TraceCtx) -> tuple[TraceCtx, TraceGraph]:
    """The trace with all that its backward needs kept from being overwritten, and its graph."""
    source = read_trace(trace)
    safe = protect_old_values(source, trace)
    return safe, source if safe is trace else read_trace(safe, earlier=source)


def _free_choices(
    source: TraceGraph, fuse: Fusibility, choices: Choices, gathered: frozenset[int]
) -> list[frozenset[int]]:
    """What the backward may rebuild at no price beyond what the user's checkpoints say: the least cut, and others.

    The least cut ignores where checkpoints begin and end: it may run the forward of many again at once, from very
    little. The second keeps what they keep, but for what cheap work makes of that; the third is the user's own.
    """
    graph = source.graph
    cut = storages_to_rebuild(graph, fuse, choices)
    if choices.offered <= gathered and not choices.recompute:
        return [cut]
    offered = _only_offered(source, fuse, choices)
    kept = saved_storages(graph, offered)
    cheap = storages_to_rebuild(graph, fuse, replace(choices, offered=gathered), needed=kept)
    read = {r for s in cheap for r in graph.ops[graph.allocator[s]].reads} - cheap  # type: ignore[index]
    return list(dict.fromkeys([cut, offered - read | cheap, offered]))


def _only_offered(source: TraceGraph, fuse: Fusibility, choices: Choices) -> frozenset[int]:
    """What the user's own checkpoints and wishes make the backward compute again."""
    if not (choices.offered or choices.recompute):
        return frozenset()
    return storages_to_rebuild(source.graph, replace(fuse, cheap=(False,) * len(source.graph)), choices)


def with_checkpoints(trace: TraceCtx) -> TraceCtx:
    """The joint trace, with the user's checkpoints carried out and nothing else planned."""
    trace, source = _read(trace)
    choices = Choices(offered=checkpointed_storages(source), there_anyway=gathered_twice(source))
    rebuilt = _only_offered(source, fusibility(source, ()), choices)
    return recompute_in_backward(source, trace, rebuilt) if rebuilt else trace
