"""Which of a function's programs runs: with all stretches in tiles, with cheaper tiles, or without tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from math import isfinite
from operator import attrgetter
from typing import Protocol

from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor

from thunder_mem.memory.plan import Decision
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.pipeline import checked, made, peak_with_loss_outside, planned_trace
from thunder_mem.planning.program import Planned
from thunder_mem.planning.refine import TILES_AGAIN
from thunder_mem.planning.rows_at_peak import with_fewer_rows_at_peak
from thunder_mem.planning.tiles_in_budget import plans_in_budget
from thunder_mem.trace.round_trips import without_round_trips

__all__ = ["OtherTiles", "lower_plan"]

# Tiles repeat no work, but every tile reads the weights again and adds to their gradients. By default they may take
# this share of the program's modelled time.
_FREE_TIME = 0.01

Variant = tuple[TraceCtx, tuple[Decision, ...]]
"""A joint trace as Thunder has it, before fusion, and the decisions about it."""


class OtherTiles(Protocol):
    """Makes the same program with other tiles. Each takes autograd once more, so it is asked only where it may win."""

    def cheaper(self, excess_s: float) -> Iterator[Variant]:
        """The program with cheaper tiles, for the seconds by which all stretches in tiles take too long."""

    def repeating(self, most_s: float) -> Iterator[Variant]:
        """The program that also has tiles outside of checkpoints, if their repetition takes few enough seconds."""


def lower_plan(
    tiled: TraceCtx,
    whole: Callable[[], TraceCtx] | None,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    others: OtherTiles | None = None,
) -> Planned:
    """The plan of a joint trace with tiles if its peak is lower and it takes as good as no time, else without tiles.

    The peak may be in a loss outside, for which only what the forward leaves alive counts. Tiles are no gain there, but
    take time. Under a budget the fastest plan that fits is chosen (`tiles_in_budget.py`).

    Args:
        tiled: the trace as Thunder has it, before fusion.
        whole: gives the same program with whole stretches, which takes autograd once more. None if `tiled` has no
            tiles, or if there is no choice.
        executors, options: as for `planned_trace`, and so are the errors.
        others: gives the same program with other tiles; None if there is no choice.
    """
    tiled = _tidied(tiled, options)
    if options.budget is not None and others is not None:
        plans = _plans_in_budget(tiled, whole, executors, options, others)
        return checked(_best_in_budget(plans, options))
    if whole is None:
        return planned_trace(tiled, executors, options)
    with_tiles = made(tiled, executors, options)
    without = _untiled(whole(), executors, options)
    most_s = (1 + _FREE_TIME) * without.final_seconds

    def in_time(planned: Planned) -> bool:
        return planned.final_seconds <= most_s

    with_tiles, tiled_s = _in_time(tiled, with_tiles, executors, options, most_s)
    excess_s = tiled_s - most_s
    if excess_s <= 0:
        with_tiles = with_fewer_rows_at_peak(with_tiles, in_time)
    if not _is_lower(with_tiles, without):
        return checked(without)
    if excess_s <= 0:
        return checked(with_tiles)
    for variant in () if others is None else others.cheaper(excess_s):
        trace, asked = _asked(variant, options)
        other, other_s = _in_time(trace, made(trace, executors, asked), executors, asked, most_s)
        if other_s <= most_s and _is_lower(other, without):
            return checked(with_fewer_rows_at_peak(other, in_time))
    return checked(without)


def _untiled(trace: TraceCtx, executors: Sequence[FusionExecutor], options: PlanningOptions) -> Planned:
    """The plan of the program with whole stretches."""
    options = replace(options, decisions=tuple(d for d in options.decisions if d.what not in ("tiles", "heads")))
    return made(_tidied(trace, options), executors, options)


def _asked(variant: Variant, options: PlanningOptions) -> tuple[TraceCtx, PlanningOptions]:
    """The trace of a variant to plan, and the options with the decisions about it."""
    trace, decisions = variant
    options = replace(options, decisions=decisions)
    return _tidied(trace, options), options


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
    seconds = planned.final_seconds
    if not _repeats_tiles(planned) or seconds <= most_s:
        return planned, seconds
    planned = made(trace, executors, replace(options, repeat_tiles=False))
    return planned, planned.final_seconds


def _repeats_tiles(planned: Planned) -> bool:
    return any(d.what == TILES_AGAIN for d in planned.plan.decisions)


def _plans_in_budget(
    tiled: TraceCtx,
    whole: Callable[[], TraceCtx] | None,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    others: OtherTiles,
) -> list[Planned]:
    """The plans of a function's programs among which a budget chooses."""

    def once(trace: TraceCtx, planned: Planned, asked: PlanningOptions) -> Iterator[Planned]:
        """The plan that runs no tiles once more, if the given one does, and if it fits."""
        if _repeats_tiles(planned):
            found = made(trace, executors, replace(asked, repeat_tiles=False))
            yield from (found,) if found.fits else ()

    def faster(with_tiles: Planned, excess_s: float) -> Iterator[Planned]:
        yield from once(tiled, with_tiles, in_time)
        for variant in others.cheaper(excess_s):
            trace, asked = _asked(variant, in_time)
            yield (planned := made(trace, executors, asked))
            yield from once(trace, planned, asked)

    def repeating(most_s: float) -> Iterator[Planned]:
        for variant in others.repeating(most_s):
            trace, asked = _asked(variant, in_time if isfinite(most_s) else options)
            yield made(trace, executors, asked)

    # A few percent of time are not worth the digits that smaller loss heads may cost.
    in_time = replace(options, smaller_heads=False)
    with_tiles = None if whole is None else made(tiled, executors, options)
    without = _untiled(tiled if whole is None else whole(), executors, options)
    return plans_in_budget(without, with_tiles, faster, repeating, attrgetter("final_seconds"), _FREE_TIME)


def _best_in_budget(plans: Sequence[Planned], options: PlanningOptions) -> Planned:
    """The fastest plan of those that fit; if none does, the lowest."""
    if fitting := [planned for planned in plans if planned.fits]:
        return min(fitting, key=attrgetter("final_seconds"))
    if options.on_infeasible == "error":  # which is about peaks without a loss outside
        return min(plans, key=attrgetter("peak_bytes"))
    return reduce(lambda best, planned: planned if _is_lower(planned, best) else best, plans)


def _is_lower(planned: Planned, other: Planned) -> bool:
    """Whether a plan is lower with a loss outside, and no higher without one."""
    lower = peak_with_loss_outside(planned) < peak_with_loss_outside(other)
    return lower and planned.peak_bytes <= other.peak_bytes
