"""All decisions about a joint trace, as one list from Thunder's trace to the trace that runs.

    read the trace                         what may be saved, recomputed, fused
    arrange each free partition            the user's checkpoints, the least cut, and between;
                                           duplicate, regions, order, merge
    refine the lowest                      and those that may become lower (`partition_choice.py`)
    within a budget                        recompute the cheapest, until the final trace fits
    carry the best one out                 emit, reuse buffers, overlap, schedule copies, fit chunks
    spare repetitions                      keep values of checkpoints where the peak has room
    even out loss heads                    equal chunks in few blocks
    verify it                              the same program, without asking the planner

Free partitions come first: the user's checkpoints, those plus all values that fused code can recompute, and the
minimum cut; with tiles also one that keeps inputs of stretches. Costly recomputation needs a budget that none of these
fits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter

from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.budget_loop import with_nothing_bought, within_budget
from thunder_mem.decisions.collective_stages import buckets_not_built, prepared
from thunder_mem.decisions.kept_results import with_kept_results
from thunder_mem.decisions.loss_outside import bytes_at_loss_outside, peak_with_loss_outside
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.partition_choice import FreePartitions, arranged_partitions, plan_partition
from thunder_mem.decisions.peak_parts import peak_in_words
from thunder_mem.decisions.program import (
    Planned,
    Program,
    device_of,
    free_partitions,
    partition_problem,
    read_program,
)
from thunder_mem.decisions.split_gradients import with_joined_pieces
from thunder_mem.decisions.stages import carried_out, with_even_loops, with_kernels, with_updates_beside
from thunder_mem.kernels.registered import without_unread_gradients
from thunder_mem.loop_sizes.chunk_narrowing import narrow_sums
from thunder_mem.loop_sizes.chunk_resizing import leanest_loops
from thunder_mem.partition.budget import BudgetError, parse_budget
from thunder_mem.rendering.progress import stage
from thunder_mem.rewrites.gradients_over_operands import is_written_over_operands
from thunder_mem.rewrites.projection_in_groups import with_projections_in_groups
from thunder_mem.rewrites.updates import about_states, with_updates
from thunder_mem.runtime.device_memory import device_memory_bytes, share_in_words
from thunder_mem.runtime.scratch_cache import save_tables
from thunder_mem.torch_functions.whole_gradients import with_lean_gradients
from thunder_mem.trace.dead_halves import without_dead_halves
from thunder_mem.trace.equal_views import without_equal_views_in_backward
from thunder_mem.trace.verification import is_verified, verify_final, verify_rewrite
from thunder_mem.user_choices.offload import moves_for

__all__ = ["Draft", "checked", "drafted", "made", "plan_joint_trace", "planned_trace"]

Finish = Callable[[Planned], Planned]


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
    return checked(made(given, executors, options))


def made(given: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The plan of a joint trace, carried out, whether or not it fits; arguments as for `planned_trace`.

    Raises:
        TooSlowError: no partition is within `options.limits_s`.
    """
    start = time.perf_counter_ns()
    return _fitting(_prepared(given, executors, options), executors, options, given, start)


def drafted(given: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Draft:
    """A joint trace without a budget, with its free partitions; arguments and errors as for `made`."""
    assert options.budget is None
    start = time.perf_counter_ns()
    program = read_program(_prepared(given, executors, options), tuple(executors), options, given)
    with stage("planning: what to save"):
        return Draft(arranged_partitions(program), start)


@dataclass(frozen=True)
class Draft:
    """A program without a budget before one of its partitions is refined and carried out.

    Attributes:
        partitions: its free partitions.
        start: the start of planning, by `time.perf_counter_ns`.
    """

    partitions: FreePartitions
    start: int

    def made(self) -> Planned:
        """The plan, carried out, as `made` gives it."""
        return plan_program(self.partitions.program, partial(carried_out, start=self.start), self.partitions)


def _prepared(given: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> TraceCtx:
    """The trace to plan."""
    if any(type(executor).__name__ == "nvFuserExecutor" for executor in executors):
        from thunder.core.rematerialization import replace_uniform

        given = replace_uniform(given)
    optimized = given if options.optimized is None else with_updates(given, options.optimized)
    read = with_joined_pieces(with_lean_gradients(without_unread_gradients(optimized)))
    once = without_equal_views_in_backward(without_dead_halves(read))
    return prepared(with_projections_in_groups(once))


def checked(planned: Planned) -> Planned:
    """The plan, verified, with what is known of the trace that runs.

    Raises:
        BudgetError: it exceeds its budget, and `options.on_infeasible` is "error".
        VerificationError: the planned trace is another program.
    """
    _told(planned)
    planned = with_kept_results(with_updates_beside(planned))
    with stage("planning: blocks of loss heads"):
        planned = with_even_loops(planned)
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
    return replace(planned, plan=plan)


def _fitting(
    trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions, given: TraceCtx, start: int
) -> Planned:
    """The plan; if none fits the budget, a plan of the program with smaller loss heads.

    Smaller chunks cost time and sums of gradients in 16 bits cost digits, but both are better than no plan. If nothing
    fits and the peak is in a loss outside, the lowest peak there counts, and the plan without a budget may have it.
    """
    found: list[Planned] = []
    for variant, narrower_at_peak in chain(
        [(trace, False)], _with_smaller_heads(trace) if options.smaller_heads else ()
    ):
        program = read_program(variant, tuple(executors), options, given)
        planned = plan_program(program, partial(carried_out, start=start, narrower_sums=narrower_at_peak))
        outcome = planned.plan.budget
        if outcome is None or planned.fits:
            return planned
        found.append(planned)
    best = min(found, key=attrgetter("peak_bytes"))
    assert outcome is not None
    compiled = best
    if options.on_infeasible == "warn" and bytes_at_loss_outside(best.source) > best.peak_bytes:
        program = read_program(trace, tuple(executors), replace(options, budget=None), given)
        default = plan_program(program, partial(carried_out, start=start))
        compiled = min(best, *found, with_nothing_bought(default, outcome.budget_bytes), key=peak_with_loss_outside)
    return replace(compiled, over_budget=partial(_over_budget, best, options, outcome.budget_bytes, compiled))


def _told(planned: Planned) -> None:
    """Raise or warn if the plan exceeds its budget.

    The error must not belong to the plan: its traceback holds this frame, and the cycle would keep the program.
    """
    if planned.over_budget is None:
        return
    if planned.program.options.on_infeasible == "error":
        raise planned.over_budget()
    warnings.warn(str(planned.over_budget()), stacklevel=2)


def _over_budget(best: Planned, options: PlanningOptions, budget_bytes: int, compiled: Planned) -> BudgetError:
    """The error that even the smallest plan found exceeds the budget; it names what is `compiled` in its place."""
    assert options.budget is not None and best.final is not None
    share = share_in_words(options.budget, device_of(best.source))
    held = peak_in_words(best.final, best.source)
    other_bytes = None if compiled is best else compiled.peak_bytes
    return BudgetError(budget_bytes, best.peak_bytes, held, share, other_bytes)


def _with_smaller_heads(trace: TraceCtx) -> Iterator[tuple[TraceCtx, bool]]:
    """The joint trace with smaller chunks of loss heads, with narrower sums of gradients, and with both.

    Narrower sums take time. Beside stretches in tiles they are first tried for the loops at the peak alone.

    Args:
        trace: a joint trace before fusion.

    Returns:
        each trace, and whether its loops at the peak are to get narrower sums.
    """
    if (lean := leanest_loops(trace)) is not None:
        yield lean, False
    if (narrow := narrow_sums(trace)) is not None:
        loops = (loop_of(b).plan for b in trace.bound_symbols if is_chunk_loop(b))
        if any(loop.is_stretch and loop.device.startswith("cuda") for loop in loops):
            yield trace, True
        yield narrow, False
        if (lean := leanest_loops(narrow)) is not None:
            yield lean, False


def plan_joint_trace(trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The best plan for a joint trace before it is carried out: its partition, regions and order.

    Arguments and errors are those of `planned_trace`; the plan's own peak decides about a budget.
    """
    return plan_program(read_program(trace, tuple(executors), options), lambda planned: planned)


def plan_program(program: Program, finish: Finish, partitions: FreePartitions | None = None) -> Planned:
    """The best plan of a program within the budget, if there is one; else the smallest plan found.

    Args:
        program: the program to plan.
        finish: gives a plan its final trace and that trace's peaks, which decide about a budget.
        partitions: the arranged partitions of the program, if they are known.
    """
    options, source = program.options, program.source
    with stage("planning: what to save"):
        best, chosen = (partitions or arranged_partitions(program)).chosen()
    if options.budget is None:
        return finish(best)
    device, moves = device_of(source), None
    if options.offload is not None:
        free, *_ = free_partitions(program)
        model = device_model_of(device)
        moves = moves_for(options.offload, source, program.fuse, program.constraints, free, model, str(device))
    budget_bytes = parse_budget(options.budget, device_memory_bytes(device))

    def found(keeping: frozenset[int]) -> Planned:
        problem = replace(partition_problem(program, keeping), moves=moves)
        return within_budget(best, problem, budget_bytes, partial(plan_partition, program), finish)

    kept = program.borders_kept(chosen)
    planned = found(kept)
    if planned.fits or not kept:
        return planned
    return min(planned, found(frozenset()), key=lambda p: (not p.fits, p.peak_bytes))
