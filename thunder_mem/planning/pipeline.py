"""All decisions about a joint trace, as one list from Thunder's trace to the trace that runs.

    read the trace                         what may be saved, recomputed, fused
    for each free partition                the user's checkpoints, the least cut, and between
        arrange it                         duplicate, regions, order, merge; refine
    within a budget                        recompute the cheapest, until the final trace fits
    carry the best one out                 emit, reuse buffers, overlap, schedule copies, fit chunks
    verify it                              the same program, without asking the planner

Free partitions come first: the user's checkpoints, those plus all values that fused code can recompute, and the
minimum cut; with tiles also one that keeps inputs of stretches. Costly recomputation needs a budget that none of these
fits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from operator import attrgetter

from thunder.core import prims
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor

from thunder_mem.costs.plan_time import overlapped_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.fusion.arrangement import arrange, between_halves, cannot_beat
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.kernels.registered import without_unread_gradients
from thunder_mem.loop_sizes.chunk_narrowing import narrow_sums
from thunder_mem.loop_sizes.chunk_resizing import leanest_loops
from thunder_mem.memory.plan import Decision
from thunder_mem.partition.budget import BudgetError, parse_budget
from thunder_mem.partition.min_cut_partition import about_saving
from thunder_mem.planning.budget_loop import with_nothing_bought, within_budget
from thunder_mem.planning.collective_stages import buckets_not_built, prepared
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.peak_parts import peak_in_words
from thunder_mem.planning.plan_kernels import with_kernels
from thunder_mem.planning.program import (
    Planned,
    Program,
    device_of,
    free_partitions,
    partition_problem,
    read_program,
)
from thunder_mem.planning.refine import TILES_AGAIN, refined
from thunder_mem.planning.rows_at_peak import with_fewer_rows_at_peak
from thunder_mem.planning.stages import carried_out
from thunder_mem.planning.tiles_in_budget import Found, plans_in_budget
from thunder_mem.rendering.progress import stage
from thunder_mem.rewrites.gradients_over_operands import is_written_over_operands
from thunder_mem.rewrites.updates import about_states, with_updates
from thunder_mem.runtime.device_memory import device_memory_bytes, share_in_words
from thunder_mem.runtime.scratch_cache import save_tables
from thunder_mem.trace.dead_halves import without_dead_halves
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.round_trips import without_round_trips
from thunder_mem.trace.verification import is_verified, verify_final, verify_rewrite
from thunder_mem.user_choices.offload import moves_for

__all__ = [
    "choose_partition",
    "lower_plan",
    "plan_joint_trace",
    "plan_partition",
    "planned_trace",
    "with_smaller_heads",
]

# While the caller computes a loss and its gradient, so many times the gradient's bytes are alive.
_LOSS_COPIES = 3

# Tiles repeat no work, but every tile reads the weights again and adds to their gradients. By default they may take
# this share of the program's modelled time.
_FREE_TIME = 0.01

Finish = Callable[[Planned], Planned]
Cheaper = Callable[[float], Iterable[tuple[TraceCtx, tuple[Decision, ...]]]]


def planned_trace(given: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The plan of a joint trace, carried out and verified.

    Args:
        given: the trace as Thunder has it, before fusion.
        executors: the fusion executors.
        options: of planning.

    Raises:
        BudgetError: no plan fits, and `options.on_infeasible` is "error".
        RecomputeError: `options.recompute` does not fit this program.
        VerificationError: the planned trace is another program.
    """
    return _checked(_made(given, executors, options))


def _made(given: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The plan, carried out."""
    start = time.perf_counter_ns()
    if any(type(executor).__name__ == "nvFuserExecutor" for executor in executors):
        from thunder.core.rematerialization import replace_uniform

        given = replace_uniform(given)
    optimized = given if options.optimized is None else with_updates(given, options.optimized)
    trace = prepared(without_dead_halves(without_unread_gradients(optimized)))
    return _fitting(trace, executors, options, given, start)


def _checked(planned: Planned, *others: Planned) -> Planned:
    """The plan, verified, with what is known of the trace that runs, and the programs of the others."""
    assert planned.arranged is not None and planned.final is not None
    program, options = planned.program, planned.program.options
    over = options.verify is None and any(map(is_written_over_operands, planned.arranged.bound_symbols))
    if over or is_verified(program.trace, planned.plan.fingerprint, options.verify):
        with stage("planning: verification"):
            verify_rewrite(program.trace, planned.arranged)
    elif options.verify is not False:  # cheap for traces of any length
        verify_final(planned.arranged)
    plan = replace(
        planned.plan,
        refused=(*options.refused, *buckets_not_built(), *planned.plan.refused),
        decisions=(*planned.plan.decisions, *about_states(planned.final)),
    )
    with stage("planning: kernels of regions"):
        plan = with_kernels(plan, planned.final_source)
    save_tables()
    return replace(planned, plan=plan, others=tuple(other.program for other in others))


def lower_plan(
    tiled: TraceCtx,
    whole: Callable[[], TraceCtx] | None,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    cheaper: Cheaper | None = None,
) -> Planned:
    """The plan of a joint trace with tiles if its peak is lower and it takes as good as no time, else without tiles.

    The peak may be in a loss outside, for which only what the forward leaves alive counts. Tiles are no gain there, but
    take time. Under a budget the fastest plan that fits is chosen (`tiles_in_budget.py`).

    Args:
        tiled: the trace as Thunder has it, before fusion.
        whole: gives the same program with whole stretches, which takes autograd once more. None if there is no choice.
        executors, options: as for `planned_trace`, and so are the errors.
        cheaper: gives the same program with cheaper tiles and the decisions about it, for the seconds by which the
            plan with tiles takes too long. Each takes autograd once more, so it is asked only then.
    """
    tiled = _tidied(tiled, options)
    if whole is None:
        return planned_trace(tiled, executors, options)
    untiled = replace(options, decisions=tuple(d for d in options.decisions if d.what not in ("tiles", "heads")))
    with_tiles = _made_or_error(tiled, executors, options)
    without = _made_or_error(_tidied(whole(), untiled), executors, untiled)
    if options.budget is not None:
        faster = _faster_in_budget(tiled, executors, options, cheaper)
        plans = plans_in_budget(with_tiles, without, faster, final_seconds, _FREE_TIME)
        chosen = _best_in_budget(plans)
        return _checked(chosen, *(plan for plan in plans if plan is not chosen))
    assert isinstance(with_tiles, Planned) and isinstance(without, Planned)  # errors are about budgets
    most_s = (1 + _FREE_TIME) * final_seconds(without)
    with_tiles, tiled_s = _in_time(tiled, with_tiles, executors, options, most_s)
    excess_s = tiled_s - most_s
    if excess_s <= 0:
        with_tiles = with_fewer_rows_at_peak(with_tiles, final_seconds, most_s)
    if not _is_lower(with_tiles, without):
        return _checked(without, with_tiles)
    if excess_s <= 0:
        return _checked(with_tiles, without)
    for trace, decisions in () if cheaper is None else cheaper(excess_s):
        asked = replace(options, decisions=decisions)
        trace = _tidied(trace, asked)
        other, other_s = _in_time(trace, _made(trace, executors, asked), executors, asked, most_s)
        if other_s <= most_s and _is_lower(other, without):
            return _checked(with_fewer_rows_at_peak(other, final_seconds, most_s), with_tiles, without)
    return _checked(without, with_tiles)


def _tidied(trace: TraceCtx, options: PlanningOptions) -> TraceCtx:
    """The trace without casts back and forth, which remain where a loop took in what stood between them."""
    if not any(d.what in ("tiles", "loss head") for d in options.decisions):
        return trace
    tidied = without_round_trips(trace)
    return trace if tidied is trace else dce(tidied)


def _in_time(
    trace: TraceCtx, planned: Planned, executors: Sequence[FusionExecutor], options: PlanningOptions, most_s: float
) -> tuple[Planned, float]:
    """The plan of a trace and its time; if it takes too long and runs some tiles once more, the plan that does not."""
    seconds = final_seconds(planned)
    if not _repeats_tiles(planned) or seconds <= most_s:
        return planned, seconds
    planned = _made(trace, executors, replace(options, repeat_tiles=False))
    return planned, final_seconds(planned)


def _repeats_tiles(planned: Planned) -> bool:
    return any(d.what == TILES_AGAIN for d in planned.plan.decisions)


def _made_or_error(trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Found:
    try:
        return _made(trace, executors, options)
    except BudgetError as error:
        return error.with_traceback(None)  # which holds frames with the program


def _faster_in_budget(
    tiled: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions, cheaper: Cheaper | None
) -> Callable[[Planned, float], Iterator[Found]]:
    """Makes plans that may be faster than the one of all tiles, for the seconds by which that takes too long.

    A few percent of time are not worth the digits that smaller loss heads may cost.
    """
    options = replace(options, on_infeasible="error", smaller_heads=False)

    def once(trace: TraceCtx, planned: Found, options: PlanningOptions) -> Iterator[Planned]:
        """The plan that runs no tiles once more, if the given one does, and if it fits."""
        if isinstance(planned, Planned) and _repeats_tiles(planned):
            found = _made_or_error(trace, executors, replace(options, repeat_tiles=False))
            yield from (found,) if isinstance(found, Planned) else ()

    def made(with_tiles: Planned, excess_s: float) -> Iterator[Found]:
        yield from once(tiled, with_tiles, options)
        for trace, decisions in () if cheaper is None else cheaper(excess_s):
            asked = replace(options, decisions=decisions)
            trace = _tidied(trace, asked)
            yield (planned := _made_or_error(trace, executors, asked))
            yield from once(trace, planned, asked)

    return made


def _best_in_budget(plans: Sequence[Planned]) -> Planned:
    """The fastest plan of those that fit; if none does, the lowest."""
    if fitting := [planned for planned in plans if planned.fits]:
        return min(fitting, key=final_seconds)
    return reduce(lambda best, planned: planned if _is_lower(planned, best) else best, plans)


def _is_lower(planned: Planned, other: Planned) -> bool:
    """Whether a plan is lower with a loss outside, and no higher without one."""
    lower = _peak_with_loss_outside(planned) < _peak_with_loss_outside(other)
    return lower and planned.peak_bytes <= other.peak_bytes


def final_seconds(planned: Planned) -> float:
    """The modelled seconds of a plan that was carried out, with what waits for copies to the host and back."""
    outcome = planned.plan.budget
    exposed_s = outcome.exposed_ms / 1e3 if outcome is not None else 0.0
    return overlapped_seconds(planned.final_source, device_model_of(device_of(planned.source))) + exposed_s


def _peak_with_loss_outside(planned: Planned) -> int:
    return max(planned.peak_bytes, _outside_bytes(planned.source))


def _fitting(
    trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions, given: TraceCtx, start: int
) -> Planned:
    """The plan; if none fits the budget, a plan of the program with smaller loss heads.

    Smaller chunks cost time and sums of gradients in 16 bits cost digits, but both are better than no plan. If nothing
    fits and the peak is in a loss outside, the lowest peak there counts, and the plan without a budget may have it.
    """
    found: list[Planned] = []
    for variant in chain((trace,), with_smaller_heads(trace) if options.smaller_heads else ()):
        program = read_program(variant, tuple(executors), options, given)
        found.append(plan_program(program, partial(carried_out, start=start)))
        outcome = found[-1].plan.budget
        if outcome is None or found[-1].fits:
            return found[-1]
    best = min(found, key=attrgetter("peak_bytes"))
    assert outcome is not None
    if best.fits:
        return best
    # Without a local name for the error: its traceback holds this frame, and the cycle would keep the program.
    if options.on_infeasible == "error":
        raise _over_budget(best, options, outcome.budget_bytes)
    compiled = best
    if _outside_bytes(best.source) > best.peak_bytes:
        program = read_program(trace, tuple(executors), replace(options, budget=None), given)
        default = plan_program(program, partial(carried_out, start=start))
        compiled = min(best, *found, with_nothing_bought(default, outcome.budget_bytes), key=_peak_with_loss_outside)
    warnings.warn(str(_over_budget(best, options, outcome.budget_bytes, compiled)), stacklevel=2)
    return compiled


def _over_budget(
    best: Planned, options: PlanningOptions, budget_bytes: int, compiled: Planned | None = None
) -> BudgetError:
    """The error that even the smallest plan found exceeds the budget; it names what is `compiled` in its place."""
    assert options.budget is not None and best.final is not None
    share = share_in_words(options.budget, device_of(best.source))
    held = peak_in_words(best.final, best.source)
    other_bytes = None if compiled is None or compiled is best else compiled.peak_bytes
    return BudgetError(budget_bytes, best.peak_bytes, held, share, other_bytes)


def with_smaller_heads(trace: TraceCtx) -> Iterator[TraceCtx]:
    """The joint trace with smaller loss heads: smaller chunks, narrower sums, and both."""
    if (lean := leanest_loops(trace)) is not None:
        yield lean
    if (narrow := narrow_sums(trace)) is not None:
        yield narrow
        if (lean := leanest_loops(narrow)) is not None:
            yield lean


def plan_joint_trace(trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The best plan for a joint trace before it is carried out: its partition, regions and order.

    Arguments and errors are those of `planned_trace`; the plan's own peak decides about a budget.
    """
    return plan_program(read_program(trace, tuple(executors), options), lambda planned: planned)


def plan_program(program: Program, finish: Finish) -> Planned:
    """The best plan of a program within the budget, if there is one; else the smallest plan found.

    Args:
        program: the program to plan.
        finish: gives a plan its final trace and that trace's peaks, which decide about a budget.
    """
    options, source = program.options, program.source
    with stage("planning: what to save"):
        best, _ = choose_partition(program)
    if options.budget is None:
        return finish(best)
    problem, device = partition_problem(program), device_of(source)
    if options.offload is not None:
        free, *_ = free_partitions(program)
        model = device_model_of(device)
        moves = moves_for(options.offload, source, program.fuse, program.constraints, free, model, str(device))
        problem = replace(problem, moves=moves)
    budget_bytes = parse_budget(options.budget, device_memory_bytes(device))
    return within_budget(best, problem, budget_bytes, partial(plan_partition, program), finish)


def choose_partition(program: Program) -> tuple[Planned, frozenset[int]]:
    """The best plan without costly recomputation, and the storages that its backward recomputes."""
    options = program.options
    # A budget limits only the two halves, so under a budget only their peaks decide among free plans.
    rank = with_loss_outside(options.reuse) if options.budget is None else attrgetter("peak_bytes")
    free, *others = free_partitions(program)
    best, chosen = plan_partition(program, free), free
    for other in others:
        trace, read, fuse = program.recomputing(other)
        if cannot_beat(read.graph, fuse, best.peak_bytes):
            continue
        found = _arranged(program, trace, read, fuse)
        if rank(found) < rank(best):
            best, chosen = found, other
    return best, chosen


def plan_partition(program: Program, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Planned:
    """The plan for given storages to recompute and to offload: its regions and their order."""
    return _arranged(program, *program.recomputing(rebuilt, offloaded))


def _arranged(program: Program, trace: TraceCtx, read: TraceGraph, fuse: FusionCapabilities) -> Planned:
    names = [str(e.name) for e in program.executors]
    made = arrange(read.graph, fuse, names, sort=program.options.sort)
    planned = refined(
        Planned(program, made, read, fuse, trace),
        program.executors,
        program.options.sort,
        program.options.repeat_tiles,
    )
    decisions = (*program.asked, about_saving(program.source.graph, read.graph), *planned.plan.decisions)
    return replace(planned, plan=replace(planned.plan, decisions=decisions))


def with_loss_outside(reuse: bool) -> Callable[[Planned], tuple[int, int]]:
    """The larger of the peak and the bytes alive while the caller computes a loss of the outputs; then the peak.

    The caller's loss is unknown. The usual loss, a cross entropy of logits, holds a normalised copy, and in its
    backward the gradients of the copy and of the logits: three times the bytes of the outputs' gradient. With
    `reuse` the peak is the one with all results written over dying values.
    """

    def rank(planned: Planned) -> tuple[int, int]:
        peak_bytes = planned.plan.overwritten_peak_bytes if reuse else planned.peak_bytes
        return max(peak_bytes, _outside_bytes(planned.source)), planned.peak_bytes

    return rank


def _outside_bytes(source: TraceGraph) -> int:
    given = (b for b in source.bsyms if b.sym == prims.get_grad)
    tangents = {source.storage_of[p.name] for b in given for p in b.flat_proxy_outs}
    tangent_bytes = sum(source.graph.storages[s].nbytes for s in tangents)
    return between_halves(source.graph) + _LOSS_COPIES * tangent_bytes
