"""Save or recompute under a budget as a mixed-integer linear program.

For each storage that may be rebuilt, k says that it is kept; for each op that makes such storages, r says
that it is repeated. What the backward needs is kept or rebuilt, an op is repeated only if what it reads is
there, and the time of all repetitions is least. Memory enters by rows "live bytes at this step are at
most the budget" (`memory_rows.py`). There is a row for every step in principle; they are added where a
trial exceeds the budget (cutting planes). Jain et al., "Checkmate: breaking the memory wall with optimal
tensor rematerialization" (MLSys 2020) has the model with a variable for every op at every step; here a
value is rebuilt at most once, just before its first use, and variables say only at the rows' own steps
whether that has happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from thunder_mem.memory_rows import Candidates, MemoryRow

__all__ = ["Solution", "solve"]

# Nodes of the search: a count, not a clock, so that every rank finds the same.
_MOST_NODES = 300
# So that of equal plans the one that repeats least is taken, though cheap work costs nothing.
_EPSILON = 1e-6


@dataclass(frozen=True)
class Solution:
    """What to rebuild, the time it takes, and a lower bound on it under the rows given."""

    rebuilt: frozenset[int]
    seconds: float
    bound_seconds: float


@dataclass
class _Program:
    """Rows of a sparse matrix, one after the other."""

    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    variables: int = 0

    def new(self, count: int) -> range:
        """That many further variables."""
        self.variables += count
        return range(self.variables - count, self.variables)

    def row(self, terms: Mapping[int, float], least: float, most: float = np.inf) -> None:
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.ends.append(len(self.columns))
        self.lower.append(least)
        self.upper.append(most)

    def constraint(self) -> LinearConstraint:
        shape = (len(self.lower), self.variables)
        return LinearConstraint(csr_array((self.values, self.columns, self.ends), shape=shape), self.lower, self.upper)


def solve(candidates: Candidates, rows: Sequence[MemoryRow], budget_bytes: int, gap: float = 0.0) -> Solution | None:
    """The least time within the rows, to a relative `gap`; None if there is none, or none was found in the nodes."""
    graph, storages, ops = candidates.graph, sorted(candidates.storages), candidates.ops
    if not ops:
        return None
    program = _Program()
    k = dict(zip((*storages, *candidates.pinned), program.new(len(storages) + len(candidates.pinned)), strict=True))
    r = dict(zip(ops, program.new(len(ops)), strict=True))
    decisions = program.variables
    for s in storages:
        if s in candidates.needed:
            program.row({k[s]: 1, r[candidates.maker[s]]: 1}, 1)
    for op in ops:
        for a in graph.ops[op].reads:
            if a in candidates.maker:
                program.row({r[op]: -1, k[a]: 1, r[candidates.maker[a]]: 1}, 0)
            elif a in k:
                program.row({r[op]: -1, k[a]: 1}, 0)
    for row in rows:
        _add_memory(program, candidates, row, k, budget_bytes)

    seconds = np.array([candidates.repeat_s[op] for op in ops])
    scale = 1.0 / (seconds.max(initial=0.0) or 1.0)  # the solver's tolerances are absolute
    cost = np.zeros(program.variables)
    cost[list(r.values())] = seconds * scale + _EPSILON
    integer = np.zeros(program.variables)
    integer[:decisions] = 1
    lower, upper = np.zeros(program.variables), np.ones(program.variables)
    forced = sorted(candidates.forced & candidates.storages)
    upper[[k[s] for s in forced]] = 0
    lower[[r[candidates.maker[s]] for s in forced]] = 1
    found = milp(
        cost,
        constraints=program.constraint(),
        integrality=integer,
        bounds=Bounds(lower, upper),
        options={"mip_rel_gap": gap, "node_limit": _MOST_NODES},
    )
    if found.x is None:
        return None
    again = {op for op in ops if found.x[r[op]] > 0.5}
    rebuilt = frozenset(s for s in storages if candidates.maker[s] in again and found.x[k[s]] < 0.5)
    bound = float((found.mip_dual_bound or 0.0) / scale)
    return Solution(rebuilt, sum(candidates.repeat_s[op] for op in again), bound)


def _add_memory(
    program: _Program, candidates: Candidates, row: MemoryRow, k: Mapping[int, int], budget_bytes: int
) -> None:
    """Live bytes at one step: what is kept, and what was computed again by then."""
    by_then = dict(zip(row.started, program.new(len(row.started)), strict=True))
    terms: dict[int, float] = {}
    for op, used in row.started.items():
        for s in used:
            program.row({by_then[op]: 1, k[s]: 1}, 1)
        for s in candidates.made(op):
            for reader in candidates.readers.get(s, ()):
                if reader in by_then:
                    program.row({by_then[op]: 1, k[s]: 1, by_then[reader]: -1}, 0)
    for s, nbytes in row.bytes_of.items():
        maker = by_then.get(candidates.maker[s]) if s in row.again else None
        if maker is None:
            terms[k[s]] = nbytes / budget_bytes
        else:
            (alive,) = program.new(1)
            program.row({alive: 1, k[s]: -1}, 0)
            program.row({alive: 1, maker: -1}, 0)
            terms[alive] = nbytes / budget_bytes
    program.row(terms, -np.inf, (budget_bytes - row.fixed_bytes) / budget_bytes)
