"""`memory_time_frontier`: the time that every amount of memory costs, from no recomputation to the smallest peak.

A budget asks for one plan; the frontier has all useful plans, each with a lower peak and a longer time than the one
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thunder_mem.analysis.frontier_points import Frontier, Point
from thunder_mem.analysis.partition_problem import AMPLE, Study, check_program, compared_programs
from thunder_mem.costs.plan_time import trace_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.memory.device_bytes import host_bytes
from thunder_mem.memory.graph import Storage
from thunder_mem.partition.budget_search import PartitionChoice, sweep
from thunder_mem.partition.min_cut_partition import min_cut_partition, saved_storages
from thunder_mem.partition.offload_search import sweep_with_offload
from thunder_mem.planning.program import device_of
from thunder_mem.user_choices.offload import OffloadOption, moves_for, parse_offload

__all__ = ["memory_time_frontier"]


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
        points: the number of equal steps of the range of peaks; each costs a search and a plan. Plans that
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
    studies = compared_programs(fn, args, dict(kwargs or {}), executors)
    chosen = studies[0]
    if chosen.sizes_chunks:  # under a budget loss heads are built in smaller chunks
        studies = compared_programs(fn, args, dict(kwargs or {}), executors, AMPLE)
    return _Survey(chosen, option).frontier(studies, points)


class _Survey:
    def __init__(self, study: Study, option: OffloadOption | None) -> None:
        self.study, self.option = study, option
        self.device = device_of(study.source)
        self.model = device_model_of(self.device)

    def frontier(self, studies: Sequence[Study], points: int) -> Frontier:
        """The plan of the own study without costly recomputation, then those of the studies for budgets, downwards.

        The last plans have the smallest loss heads.
        """
        free = self._point(self.study, PartitionChoice(self.study.free, 0, 0.0, 0.0, "free"))
        found = [point for study in studies for point in self._downwards(study, free, points)]
        for study in studies:
            if study.sizes_chunks and (leanest := study.with_smallest_heads()) is not None:
                *_, smallest = self._fits(leanest, 1)
                found.append(self._point(leanest, smallest))
        return Frontier(
            nothing_recomputed=self._point(self.study, PartitionChoice(frozenset(), 0, 0.0, 0.0, "free")),
            points=(free, *_undominated(free, found)),
            device=self.model.name,
        )

    def _downwards(self, study: Study, free: Point, points: int) -> Iterator[Point]:
        lowest_bytes = free.peak_bytes
        saved_bytes = 0  # by what follows the trial that a fit is priced by
        for fit in self._fits(study, points):
            if fit.peak_bytes - saved_bytes < lowest_bytes:
                point = self._point(study, fit)
                saved_bytes, lowest_bytes = fit.peak_bytes - point.peak_bytes, point.peak_bytes
                yield point

    def _fits(self, study: Study, points: int) -> Iterator[PartitionChoice]:
        problem = study.problem
        if self.option is None:
            return sweep(problem, points)
        free, device = min_cut_partition(problem.graph, problem.fuse, problem.choices), str(self.device)
        moves = moves_for(self.option, study.source, problem.fuse, problem.choices, free, self.model, device)
        return sweep_with_offload(replace(problem, moves=moves), points)

    def _point(self, study: Study, fit: PartitionChoice) -> Point:
        planned = study.plan(fit.rebuilt, fit.offloaded)
        graph = study.problem.graph
        candidate = planned.plan.candidate
        received = saved_storages(graph, fit.rebuilt)
        assert planned.final is not None
        seconds = trace_seconds(planned.final, self.model) + fit.exposed_seconds
        return Point(
            peak_bytes=planned.peak_bytes,
            forward_peak_bytes=candidate.forward_peak_bytes,
            backward_peak_bytes=candidate.backward_peak_bytes,
            saved_bytes=sum(graph.storages[s].nbytes for s in received - fit.offloaded),
            recompute_ms=(fit.seconds - fit.exposed_seconds) * 1e3,
            bound_ms=fit.bound_seconds * 1e3,
            step_ms=seconds * 1e3,
            offload="" if not fit.offloaded else str(self.option),
            host_bytes=sum(_on_host(graph.storages[s]) for s in received & fit.offloaded),
            exposed_ms=fit.exposed_seconds * 1e3,
            free=fit.method == "free",
        )


def _undominated(free: Point, points: Sequence[Point]) -> Iterator[Point]:
    """The plans by falling peak, below the free one's; without those that a faster one undercuts in memory."""
    lowest_bytes = free.peak_bytes
    for point in sorted(points, key=lambda p: (p.step_ms, p.peak_bytes)):
        if point.peak_bytes < lowest_bytes:
            lowest_bytes = point.peak_bytes
            yield point


def _on_host(storage: Storage) -> int:
    return host_bytes(storage.nbytes, storage.device)
