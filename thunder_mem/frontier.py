"""`memory_time_frontier`: what every amount of memory costs in time, from no recomputation to the smallest peak.

A budget asks for one plan; here are all that are worth having, each with a lower peak and a longer time
than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from thunder_mem.cost import device_model_of
from thunder_mem.fit_budget import sweep
from thunder_mem.frontier_table import Frontier, Point
from thunder_mem.joint_plan import Planned, device_of
from thunder_mem.plan_time import plan_seconds
from thunder_mem.saving import saved_storages, storages_to_rebuild
from thunder_mem.study import Study, study_program

__all__ = ["memory_time_frontier"]


def memory_time_frontier(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    executors: Sequence[Any] | None = None,
    points: int = 8,
) -> Frontier:
    """Plan a program at budgets from what it needs without recomputation down to the smallest that fits.

    Args:
        fn: a function, a module, or what `thunder.jit` made of one: then its executors and its own
            `MemEfficient` count. Nothing is run.
        args: arguments of a call (real, or under `simulate` fake) that asks for a gradient.
        kwargs: keyword arguments of the call.
        executors: as for `thunder.jit`, where `fn` is not jitted yet.
        points: into how many equal steps the range of peaks is cut; each costs a search and a plan. Plans
            that save nothing over a faster one are left out.

    Raises:
        ValueError: the call asks for no gradient, or `points` is below 1.
        PredictionError: the program cannot be traced.

    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Softmax(-1))
        >>> frontier = memory_time_frontier(mlp, torch.zeros(512, 64), executors=[])
        >>> frontier.points[0].recompute_ms, frontier.points[-1].peak_bytes <= frontier.points[0].peak_bytes
        (0.0, True)
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ValueError(f"points is a number from 1 up, not {points!r}")
    return _Survey(study_program(fn, args, dict(kwargs or {}), executors)).frontier(points)


class _Survey:
    def __init__(self, study: Study) -> None:
        self.study = study
        self.model = device_model_of(device_of(study.source))

    def frontier(self, points: int) -> Frontier:
        problem = self.study.problem
        free = self._point(storages_to_rebuild(problem.graph, problem.fuse, problem.choices), 0.0, 0.0)
        found = [free]
        for fit in sweep(problem, points):
            if fit.peak_bytes < found[-1].peak_bytes:
                found.append(self._point(fit.rebuilt, fit.seconds, fit.bound_seconds))
        return Frontier(
            nothing_recomputed=self._point(frozenset(), 0.0, 0.0),
            points=tuple(_undominated(found)),
            device=self.model.name,
        )

    def _point(self, rebuilt: frozenset[int], recompute_s: float, bound_s: float) -> Point:
        planned: Planned = self.study.plan(rebuilt)
        graph = self.study.problem.graph
        candidate = planned.plan.candidate
        return Point(
            peak_bytes=planned.peak_bytes,
            forward_peak_bytes=candidate.forward_peak_bytes,
            backward_peak_bytes=candidate.backward_peak_bytes,
            saved_bytes=sum(graph.storages[s].nbytes for s in saved_storages(graph, rebuilt)),
            recompute_ms=recompute_s * 1e3,
            bound_ms=bound_s * 1e3,
            step_ms=plan_seconds(planned.plan, planned.source, self.model) * 1e3,
        )


def _undominated(points: Sequence[Point]) -> list[Point]:
    """By falling peak; without those that a faster one undercuts in memory, too."""
    ordered = sorted(points, key=lambda p: (p.recompute_ms, p.peak_bytes))
    kept = ordered[:1]
    for _, point in pairwise(ordered):
        if point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return kept
