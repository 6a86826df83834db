"""Which of a function's programs runs: with all stretches in tiles, with cheaper tiles, or without tiles.

Under a budget, tiles compete with recomputation and offload by price: of the programs that fit, the fastest runs. All
stretches in tiles take more time than some, but buy less. Outside of a checkpoint a tile's backward repeats the
forward, as recomputation does. Studying another program costs as much as planning it. So others are planned only while
the best plan takes longer than the program without tiles that buys nothing.

Without a budget, on a CPU, a program whose tiles are in time and clearly lower is only arranged without tiles, and not
refined. One whose tiles take so long that cheaper ones would probably gain too little is only arranged with tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import inf, isfinite
from operator import attrgetter
from typing import Protocol

from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor

from thunder_mem.decisions.loss_outside import peak_with_loss_outside
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.partition_choice import FreePartitions, TooSlowError
from thunder_mem.decisions.pipeline import checked, drafted, made, planned_trace
from thunder_mem.decisions.program import Planned, device_of
from thunder_mem.decisions.refine import TILES_AGAIN
from thunder_mem.decisions.rows_at_peak import with_fewer_rows_at_peak
from thunder_mem.loop_sizes.tile_choice import room_bytes
from thunder_mem.memory.plan import Decision
from thunder_mem.trace.round_trips import without_round_trips

__all__ = ["TileVariants", "lower_plan"]

# Tiles repeat no work, but every tile reads the weights again and adds to their gradients. By default they may take
# this share of the program's modelled time.
_FREE_TIME = 0.01
# Planning with other tiles takes as long again. Therefore all tiles must lower the peak by this share, counting only
# the part of their time that others may take. In small steps below it others gave at most 1.7 %, above it 2.6 to 13.
_LEAST_GAIN = 0.02
# Under a budget, what other tiles must be able to save of what would make them a percent faster than the best plan.
_WORTH_TRYING = 0.5

Variant = tuple[TraceCtx, tuple[Decision, ...]]
"""A joint trace as Thunder has it, before fusion, and the decisions about it."""


class TileVariants(Protocol):
    """Makes the same program with other tiles. Each takes autograd once more, so it is asked only where it may win."""

    def cheaper(self, share: float, room: Callable[[], Mapping[str, int]]) -> Iterator[Variant]:
        """The program with cheaper tiles, which save a share of the time that all take beyond whole stretches.

        `room` gives the bytes for which there is room while each stretch runs.
        """

    def repeating(self, most_s: float) -> Iterator[Variant]:
        """The program that also has tiles outside of checkpoints, if their repetition takes few enough seconds."""


def lower_plan(
    tiled: TraceCtx,
    whole: Callable[[], TraceCtx] | None,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    others: TileVariants | None = None,
) -> Planned:
    """The plan of a joint trace with tiles if its peak is lower and it takes as good as no time, else without tiles.

    The peak may be in a loss outside, for which only what the forward leaves alive counts. Tiles are no gain there, but
    take time. On a CPU, arrangements without tiles are not refined if tiles are clearly better, nor those with tiles if
    these are too slow. Under a budget the fastest plan that fits is chosen.

    Args:
        tiled: the trace as Thunder has it, before fusion.
        whole: gives the same program with whole stretches, which takes autograd once more. None if `tiled` has no
            tiles, or if there is no choice.
        executors, options: as for `planned_trace`, and so are the errors.
        others: gives the same program with other tiles; None if there is no choice, and then `tiled` is planned.
    """
    tiled = _tidied(tiled, options)
    if options.budget is not None and others is not None:
        plans = _plans_in_budget(tiled, whole, executors, options, others)
        return checked(_best_in_budget(plans, options))
    if whole is None or others is None:
        return planned_trace(tiled, executors, options)
    tiles = drafted(tiled, executors, options)
    untiled, asked = _untiled(whole(), options)
    draft = drafted(untiled, executors, asked)
    if _is_too_slow(tiles.partitions, draft.partitions):
        return checked(draft.made())
    with_tiles = tiles.made()
    if _is_clearly_better(with_tiles, draft.partitions):
        in_time = partial(_in_time, (1 + _FREE_TIME) * draft.partitions.least_seconds)
        return checked(with_fewer_rows_at_peak(with_tiles, in_time))
    return checked(_lower_in_time(tiled, with_tiles, draft.made(), executors, options, others))


def _lower_in_time(
    tiled: TraceCtx,
    with_tiles: Planned,
    without: Planned,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    others: TileVariants,
) -> Planned:
    """The plan of `tiled`, or of a variant with cheaper tiles, if it is lower than the plan without and in time."""
    most_s = (1 + _FREE_TIME) * without.final_seconds
    in_time = partial(_in_time, most_s)
    with_tiles = _once_in_time(tiled, with_tiles, executors, options, most_s)
    excess_s = with_tiles.final_seconds - most_s
    if excess_s <= 0:
        with_tiles = with_fewer_rows_at_peak(with_tiles, in_time)
    if not _is_lower(with_tiles, without):
        return without
    if excess_s <= 0:
        return with_tiles
    share = excess_s / (with_tiles.final_seconds - without.final_seconds)
    if _gains_too_little(share, peak_with_loss_outside(with_tiles), peak_with_loss_outside(without)):
        return without
    assert without.arranged_seconds is not None
    # Arrangements compare well with each other; the second limit is for those that the first would refuse too early.
    limits_s = without.arranged_seconds + _FREE_TIME * without.final_seconds, most_s
    timed = replace(options, limits_s=limits_s)
    for variant in others.cheaper(share, partial(_room, with_tiles)):
        trace, asked = _asked(variant, timed)
        try:
            other = _once_in_time(trace, made(trace, executors, asked), executors, asked, most_s)
        except TooSlowError:
            continue
        if in_time(other) and _is_lower(other, without):
            return with_fewer_rows_at_peak(other, in_time)
    return without


def _untiled(trace: TraceCtx, options: PlanningOptions) -> tuple[TraceCtx, PlanningOptions]:
    """The trace of the program with whole stretches to plan, and the options with the decisions about it."""
    return _asked((trace, tuple(d for d in options.decisions if d.what not in ("tiles", "heads"))), options)


def _is_too_slow(with_tiles: FreePartitions, without: FreePartitions) -> bool:
    """Whether tiles on a CPU take so long, as arranged, that cheaper ones would probably gain too little."""
    if device_of(with_tiles.program.source).type != "cpu":
        return False
    tiles, whole = with_tiles.lowest, without.lowest
    excess_s = tiles.seconds - (1 + _FREE_TIME) * whole.seconds
    if excess_s <= 0:
        return False
    share = excess_s / (tiles.seconds - whole.seconds)
    return _gains_too_little(share, tiles.least_likely_bytes, whole.least_likely_bytes)


def _gains_too_little(share: float, tiles_bytes: int, whole_bytes: int) -> bool:
    """Whether cheaper tiles gain too little.

    Args:
        share: of the time that all tiles take beyond whole stretches, what cheaper ones must save.
        tiles_bytes, whole_bytes: the peak with all tiles, and without.
    """
    return (1 - share) * (whole_bytes - tiles_bytes) < _LEAST_GAIN * whole_bytes


def _is_clearly_better(with_tiles: Planned, without: FreePartitions) -> bool:
    """Whether a plan on a CPU is in time and lower than what refinement is likely to make of the others.

    On a GPU the final trace takes up to 0.63 % less time than its arrangement, because regions merge and launches are
    hidden. That is too much beside `_FREE_TIME`. Tiles that run once more need not, so they are compared with the whole
    plan.
    """
    if device_of(with_tiles.source).type != "cpu" or _repeats_tiles(with_tiles):
        return False
    in_time = _in_time((1 + _FREE_TIME) * without.least_seconds, with_tiles)
    return in_time and peak_with_loss_outside(with_tiles) < without.least_likely_bytes


def _in_time(most_s: float, planned: Planned) -> bool:
    return planned.final_seconds <= most_s


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


def _once_in_time(
    trace: TraceCtx, planned: Planned, executors: Sequence[FusionExecutor], options: PlanningOptions, most_s: float
) -> Planned:
    """The plan of a trace; if it takes too long and runs some tiles once more, the plan that does not."""
    if not _repeats_tiles(planned) or planned.final_seconds <= most_s:
        return planned
    return made(trace, executors, replace(options, repeat_tiles=False))


def _room(planned: Planned) -> Mapping[str, int]:
    """For each stretch in tiles, by name, the bytes for which a plan has room within its peak or its budget."""
    return room_bytes(planned.final_source, 0 if planned.plan.budget is None else planned.plan.budget.budget_bytes)


def _repeats_tiles(planned: Planned) -> bool:
    return any(d.what == TILES_AGAIN for d in planned.plan.decisions)


def _plans_in_budget(
    tiled: TraceCtx,
    whole: Callable[[], TraceCtx] | None,
    executors: Sequence[FusionExecutor],
    options: PlanningOptions,
    others: TileVariants,
) -> list[Planned]:
    """The plans of a function's programs among which a budget chooses."""

    def once(trace: TraceCtx, planned: Planned, asked: PlanningOptions) -> Iterator[Planned]:
        """The plan that runs no tiles once more, if the given one does, and if it fits."""
        if _repeats_tiles(planned):
            found = made(trace, executors, replace(asked, repeat_tiles=False))
            yield from (found,) if found.fits else ()

    def faster(with_tiles: Planned, share: float) -> Iterator[Planned]:
        yield from once(tiled, with_tiles, in_time)
        for variant in others.cheaper(share, partial(_room, with_tiles)):
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
    untiled, asked = _untiled(tiled if whole is None else whole(), options)
    without = made(untiled, executors, asked)
    return plans_in_budget(without, with_tiles, faster, repeating)


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


def plans_in_budget(
    without: Planned,
    with_tiles: Planned | None,
    faster: Callable[[Planned, float], Iterable[Planned]],
    repeating: Callable[[float], Iterable[Planned]],
) -> list[Planned]:
    """The plans of one function among which a budget chooses.

    Args:
        without: without tiles.
        with_tiles: with all stretches in tiles that repeat nothing; None if there are none.
        faster: makes others that may take less time than `with_tiles`, for the share of the time of its tiles that is
            to be saved; those with most in tiles come first.
        repeating: makes others that also have stretches in tiles which repeat work, for the seconds that this may take.
    """
    plans = [without] if with_tiles is None else [without, with_tiles]
    enough_s = (1 + _FREE_TIME) * _free_seconds(without) if without.fits else 0.0
    if with_tiles is not None and with_tiles.fits and (best_s := _best_seconds(plans)) > enough_s:
        tiles_s = _free_seconds(with_tiles) - _free_seconds(without)
        excess_s = with_tiles.final_seconds - best_s / (1 + _FREE_TIME)
        for other in faster(with_tiles, _WORTH_TRYING * excess_s / max(tiles_s, excess_s)):
            if not other.fits:
                continue
            plans.append(other)
            if other.final_seconds <= enough_s:
                break
    best_s = _best_seconds(plans)
    room_s = best_s - _free_seconds(with_tiles or without)
    if best_s > enough_s and room_s > 0:
        plans += repeating(room_s)
    return plans


def _best_seconds(plans: Iterable[Planned]) -> float:
    """The time of the fastest plan that fits; infinite if none does."""
    return min((plan.final_seconds for plan in plans if plan.fits), default=inf)


def _free_seconds(planned: Planned) -> float:
    """The time of a plan without what it bought."""
    assert planned.plan.budget is not None
    return planned.final_seconds - planned.plan.budget.cost_ms / 1e3
