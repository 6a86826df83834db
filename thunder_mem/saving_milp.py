"""Save or recompute under a budget as a mixed-integer linear program.

For each storage that may be rebuilt, k says that it is kept; for each op that makes such storages, r says
that it is repeated. What the backward needs is kept or rebuilt, an op is repeated only if what it reads is
there, and the time of all repetitions is least. Memory enters by rows "live bytes at this step are at
most the budget". There is a row for every step in principle; they are added where a trial exceeds the
budget (cutting planes), each exact for the trial that it comes from. Jain et al., "Checkmate: breaking
the memory wall with optimal tensor rematerialization" (MLSys 2020) has the model, with time-indexed
variables; here every value is rebuilt at most once, just before its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from thunder_mem.graph import Graph
from thunder_mem.saving import saved_storages
from thunder_mem.trial import Trial

__all__ = ["Candidates", "MemoryRow", "Solution", "memory_rows", "solve"]

# Relative optimality gap and nodes of the search: counts, not clocks, so that every rank finds the same.
_GAP = 0.01
_MOST_NODES = 300
# So that of equal plans the one that repeats least is taken, though cheap work costs nothing.
_EPSILON_S = 1e-9


@dataclass(frozen=True)
class MemoryRow:
    """At one step: `fixed_bytes` are alive whatever is decided, and each kept storage of `bytes_of` its bytes.

    `key` names the step across trials: the op of the original graph that stands there.
    """

    key: int
    fixed_bytes: int
    bytes_of: dict[int, int]


@dataclass(frozen=True)
class Candidates:
    """What a program decides: `storages` may be rebuilt, each op that makes them costs `repeat_s`."""

    graph: Graph
    storages: frozenset[int]
    repeat_s: Sequence[float]


@dataclass(frozen=True)
class Solution:
    """What to rebuild, the time it takes, and a lower bound on it under the rows given."""

    rebuilt: frozenset[int]
    seconds: float
    bound_seconds: float


def memory_rows(candidates: Candidates, trial: Trial, count: int = 16) -> list[MemoryRow]:
    """The rows of a trial's highest local peaks and of the end of its forward."""
    graph, timeline = candidates.graph, trial.timeline
    steps = list(timeline.top_peaks(count))
    forward = sum(not op.backward for op in timeline.graph.ops)
    if 0 < forward < len(timeline.order):
        steps.append(forward)
    kept = saved_storages(graph, trial.rebuilt)
    spans = {s: _saved_span(graph, trial, s) for s in sorted(candidates.storages)}
    first_op: dict[int, int] = {}
    for op, step in enumerate(trial.step_of):
        if step is not None:
            first_op.setdefault(step, op)
    rows = []
    for step in dict.fromkeys(steps):
        bytes_of = {s: graph.storages[s].nbytes for s, (start, end) in spans.items() if start < step < end}
        alive = sum(nbytes for s, nbytes in bytes_of.items() if s in kept)
        rows.append(MemoryRow(first_op.get(step, -1 - step), timeline.live_bytes[step] - alive, bytes_of))
    return rows


def _saved_span(graph: Graph, trial: Trial, s: int) -> tuple[int, int]:
    """The steps between which `s` is alive only if it is kept: after its last use in the forward (or
    its making, if it is made inside a region) and before its first use in the backward."""
    maker = graph.allocator[s]
    forward = [trial.step_of[op] for op in graph.users[s] if not graph.ops[op].backward]
    backward = [trial.step_of[op] for op in graph.users[s] if graph.ops[op].backward]
    ends = [step for step in backward if step is not None]
    starts = [step for step in (*forward, trial.step_of[maker] if maker is not None else None) if step is not None]
    return max(starts, default=-1), min(ends, default=len(trial.timeline.order))


def solve(candidates: Candidates, rows: Sequence[MemoryRow], budget_bytes: int) -> Solution | None:
    """The least time within the rows; None if there is no solution, or none was found in the search limit."""
    graph = candidates.graph
    storages = sorted(candidates.storages)
    if not storages:
        return None
    maker = {s: op for s in storages if (op := graph.allocator[s]) is not None}
    makers = sorted(set(maker.values()))
    k = {s: i for i, s in enumerate(storages)}
    r = {op: len(storages) + i for i, op in enumerate(makers)}
    needed = {s for op in graph.ops if op.backward for s in op.touches}
    columns: list[int] = []
    values: list[float] = []
    ends = [0]
    lower: list[float] = []
    upper: list[float] = []

    def row(terms: dict[int, float], least: float, most: float) -> None:
        columns.extend(terms)
        values.extend(terms.values())
        ends.append(len(columns))
        lower.append(least)
        upper.append(most)

    for s in storages:
        if s in needed:
            row({k[s]: 1, r[maker[s]]: 1}, 1, np.inf)
    for op in makers:
        for a in graph.ops[op].reads:
            if a in k:
                row({r[op]: -1, k[a]: 1, r[maker[a]]: 1}, 0, np.inf)
    for memory in rows:
        room = (budget_bytes - memory.fixed_bytes) / budget_bytes
        row({k[s]: nbytes / budget_bytes for s, nbytes in memory.bytes_of.items()}, -np.inf, room)
    cost = np.zeros(len(storages) + len(makers))
    for op in makers:
        cost[r[op]] = candidates.repeat_s[op] + _EPSILON_S
    matrix = csr_array((values, columns, ends), shape=(len(lower), len(cost)))
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": _GAP, "node_limit": _MOST_NODES},
    )
    if found.x is None:
        return None
    again = {op for op in makers if found.x[r[op]] > 0.5}
    rebuilt = frozenset(s for s in storages if maker[s] in again and found.x[k[s]] < 0.5)
    seconds = sum(candidates.repeat_s[op] for op in again)
    return Solution(rebuilt, seconds, float(found.mip_dual_bound or 0.0))
