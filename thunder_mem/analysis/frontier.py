"""`memory_time_frontier`: the time that every amount of memory costs, from no recomputation to the smallest peak.

A budget asks for one plan; the frontier has all useful plans, each with a lower peak and a longer time than the one
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from thunder_mem.analysis.frontier_points import Frontier, Point
from thunder_mem.analysis.partition_problem import Study, check_program, study_call
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.program import Planned, device_of
from thunder_mem.partition.budget import BudgetError
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.planning.record import Studied
from thunder_mem.user_choices.offload import OffloadOption, parse_offload

__all__ = ["memory_time_frontier"]

_AMPLE = 1 << 62  # bytes, which every plan keeps


def memory_time_frontier(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    executors: Sequence[Any] | None = None,
    points: int = 8,
    offload: bool | str = False,
) -> Frontier:
    """Plan a program at budgets from its peak without recomputation down to the smallest that fits.

    Args:
        fn: a function, a module, or a result of `thunder.jit`, whose executors and `MemEfficient` then count.
            Nothing runs.
        args: arguments of a call (real, or under `simulate` fake) that asks for a gradient.
        kwargs: keyword arguments of the call.
        executors: as for `thunder.jit`, where `fn` is not jitted yet.
        points: the number of equal steps of the range of peaks; each costs the planning for a budget. Plans that
            save nothing over a faster one are omitted.
        offload: True, False or "only:PATTERN", as for `MemEfficient`: values may also wait in the host's memory.

    Raises:
        ValueError: the call needs no gradient, `points` is below 1, or `offload` is a string other than
            "only:PATTERN".
        PredictionError: the program cannot be traced.
        TypeError: `fn` is none of the above.

    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Softmax(-1))
        >>> frontier = memory_time_frontier(mlp, torch.zeros(512, 64), executors=[])
        >>> frontier.points[0].recompute_ms, frontier.points[-1].peak_bytes <= frontier.points[0].peak_bytes
        (0.0, True)
    """
    check_program(fn, "memory_time_frontier")
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ValueError(f"points is a number from 1 up, not {points!r}")
    option = parse_offload(offload)
    asked = fn, args, dict(kwargs or {}), executors
    chosen = study_call(*asked)
    # Under a budget loss heads are built in smaller chunks.
    study = study_call(*asked, budget=_AMPLE) if _sizes_heads(chosen.planned) else chosen
    free = _point(chosen.planned)
    found = _downwards(study, free, points, option)
    return Frontier(
        nothing_recomputed=_point(Study.of(chosen.planned.program).plan(frozenset())),
        points=(free, *_undominated(free, tuple(found))),
        device=device_model_of(device_of(chosen.planned.source)).name,
    )


def _sizes_heads(planned: Planned) -> bool:
    """Whether there is a loss head whose chunks the user did not set, so that a budget makes them smaller."""
    loops = (loop_of(bsym).plan for bsym in planned.source.bsyms if is_chunk_loop(bsym))
    return any(plan.sized != "asked" and not plan.is_stretch for plan in loops)


def _downwards(study: Studied, free: Point, points: int, option: OffloadOption | None) -> Iterator[Point]:
    """The plans for budgets from just below a peak down to the smallest peak; equal ones only once."""
    smallest_bytes, most_bytes = _smallest_peak_bytes(study, option), free.peak_bytes - 1
    peak_bytes = free.peak_bytes
    for i in range(points, -1, -1):
        budget_bytes = smallest_bytes + (most_bytes - smallest_bytes) * i // points
        if smallest_bytes <= budget_bytes < peak_bytes:
            with suppress(BudgetError):
                point = _point(study.within(budget_bytes, option), option)
                peak_bytes = point.peak_bytes
                yield point


def _smallest_peak_bytes(study: Studied, option: OffloadOption | None) -> int:
    try:
        return study.within(1, option).peak_bytes
    except BudgetError as error:
        return error.smallest_peak_bytes


def _point(planned: Planned, option: OffloadOption | None = None) -> Point:
    """What a plan costs; `option` says what a budget could offload."""
    candidate, bought, graph = planned.plan.candidate, planned.plan.budget, planned.final_source.graph
    device = str(device_of(planned.program.source))
    received = (graph.storages[s] for s in saved_storages(graph))
    return Point(
        peak_bytes=planned.peak_bytes,
        forward_peak_bytes=candidate.forward_peak_bytes,
        backward_peak_bytes=candidate.backward_peak_bytes,
        saved_bytes=sum(storage.nbytes for storage in received if storage.device == device),
        recompute_ms=bought.recompute_ms if bought else 0.0,
        bound_ms=bought.bound_ms if bought else 0.0,
        step_ms=planned.final_seconds * 1e3,
        offload=str(option) if bought and bought.offloaded else "",
        host_bytes=bought.host_bytes if bought else 0,
        exposed_ms=bought.exposed_ms if bought else 0.0,
        free=bought is None,
    )


def _undominated(free: Point, points: Sequence[Point]) -> Iterator[Point]:
    """The plans by falling peak, below the free one's; without those that a faster one undercuts in memory."""
    lowest_bytes = free.peak_bytes
    for point in sorted(points, key=lambda p: (p.step_ms, p.peak_bytes)):
        if point.peak_bytes < lowest_bytes:
            lowest_bytes = point.peak_bytes
            yield point
