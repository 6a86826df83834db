"""Find the cheapest recomputation and offloading whose peak fits a budget.

The integer program (`milp.py`) proposes, with memory rows from the trials so far. A trial by the exact timeline
disposes, until a proposal fits. The result is compared with recomputation alone (`budget_search.py`): offloading is
chosen only if it is really cheaper.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from thunder_mem.partition.budget_search import PartitionChoice, PartitionProblem, fit_budget
from thunder_mem.partition.milp import solve
from thunder_mem.partition.milp_memory_rows import memory_rows
from thunder_mem.partition.min_cut_partition import saved_storages

__all__ = ["fit_with_offload"]

# Rounds of cutting planes; each costs a solution and a trial.
_ROUNDS = 8
# The relative optimality gap that ends the search.
_GAP = 0.002


def fit_with_offload(problem: PartitionProblem, budget_bytes: int) -> PartitionChoice:
    """`fit_budget` for a problem with storages that may be offloaded."""
    spacings = itertools.takewhile(lambda spacing: spacing.low_bytes > budget_bytes, problem.spacings())
    too_high = [problem.fit(spacing.points[-1].rebuilt, 0.0, "curve") for spacing in spacings]
    reachable = len(too_high) < sum(1 for _ in problem.spacings())
    alone = fit_budget(problem, budget_bytes) if reachable else min(too_high, key=lambda f: f.peak_bytes)
    fits = alone.peak_bytes <= budget_bytes
    found = [alone, *_proposals(problem, budget_bytes)]
    if fitting := [fit for fit in found if fit.peak_bytes <= budget_bytes]:
        best = min(fitting, key=lambda f: (f.seconds, len(f.offloaded), f.peak_bytes))
    else:
        best = min(found, key=lambda f: (f.peak_bytes, f.seconds))
    return replace(best, without_seconds=alone.seconds if fits else None)


def _proposals(problem: PartitionProblem, budget_bytes: int) -> Iterator[PartitionChoice]:
    """Choices that offload: all movable storages, with little and with much recomputed, and the program's solution."""
    moves = problem.moves
    if moves is None or not moves.movable:
        return
    spacing = next(problem.spacings())
    candidates = replace(spacing.candidates, movable=moves.movable - spacing.candidates.forced)
    most, least = spacing.points[-1].rebuilt, spacing.points[0].rebuilt
    rows = {row.key: row for row in memory_rows(candidates, problem.trial(least))}
    for rebuilt in (most, least):
        offloaded = saved_storages(problem.graph, rebuilt) & candidates.movable
        yield problem.fit(rebuilt, 0.0, "milp", offloaded)
        rows |= {row.key: row for row in memory_rows(candidates, problem.trial(rebuilt, offloaded))}
    for _ in range(_ROUNDS):
        solution = solve(candidates, list(rows.values()), budget_bytes, _GAP, moves)
        if solution is None:
            return
        yield problem.fit(solution.rebuilt, solution.bound_seconds, "milp", solution.offloaded)
        trial = problem.trial(solution.rebuilt, solution.offloaded)
        if trial.peak_bytes <= budget_bytes:
            return
        rows |= {row.key: row for row in memory_rows(candidates, trial)}
