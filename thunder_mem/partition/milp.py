"""Save, recompute or offload under a budget, as a mixed-integer linear program.

Three kinds of binary variables: k keeps a storage that may be recomputed, r repeats an op that makes such storages,
and o offloads a storage. Values that the backward needs are kept, recomputed or fetched. An op is repeated only if its
operands are there. The objective is the least time of all repetitions and of copies that no other work hides
(`transfer_windows.py`).

Memory enters by rows "live bytes at this step are at most the budget" (`milp_memory_rows.py`). In principle every step
has a row; rows are added where a trial exceeds the budget (cutting planes). The model follows Jain et al.,
"Checkmate: breaking the memory wall with optimal tensor rematerialization" (MLSys 2020), which has a variable for every
op at every step. Here a value is recomputed at most once, just before its first use. Variables say only at the rows'
own steps whether that has happened.

Equal layers keep separate variables, although the curve (`tradeoff_curve.py`), which knows no steps, decides them
once. A step distinguishes an early layer from a late one. A constraint that later layers keep what an earlier layer
keeps was tried: the 32 layers of a LLaMA took HiGHS up to twice as long, for plans of the same cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from thunder_mem.partition.milp_memory_rows import MemoryRow, MilpVariables
from thunder_mem.partition.transfer_windows import Moves, Window

__all__ = ["Solution", "solve"]

# Nodes of the search: a count, not a clock, so that every rank finds the same.
_MOST_NODES = 300
# Among equal plans the one that repeats least wins, although cheap work costs nothing.
_EPSILON = 1e-6
# Bytes count in rows from this share of the budget on; the solver ignores coefficients of 1e-9.
_TINY = 1e-7
# Among equal plans the one that copies least wins: a hidden copy counts this share of its time.
_HIDDEN = 1e-3


@dataclass(frozen=True)
class Solution:
    """The storages to recompute and to offload, the time that takes, and a lower bound on it under the given rows."""

    rebuilt: frozenset[int]
    seconds: float
    bound_seconds: float
    offloaded: frozenset[int] = frozenset()


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
        """Add so many variables."""
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


def solve(
    candidates: MilpVariables,
    rows: Sequence[MemoryRow],
    budget_bytes: int,
    gap: float = 0.0,
    moves: Moves | None = None,
) -> Solution | None:
    """The least time within the rows, to a relative `gap`; None if no solution exists or was found in the nodes.

    Args:
        candidates: the storages to decide about.
        rows: the memory rows.
        budget_bytes: their limit.
        gap: relative to the least time.
        moves: times of copies, if storages may be offloaded.
    """
    graph, storages, ops = candidates.graph, sorted(candidates.storages), candidates.ops
    movable = sorted(candidates.movable) if moves else []
    if not ops and not movable:
        return None
    program = _Program()
    k = dict(zip(candidates.decided, program.new(len(candidates.decided)), strict=True))
    r = dict(zip(ops, program.new(len(ops)), strict=True))
    o = dict(zip(movable, program.new(len(movable)), strict=True))
    decisions = program.variables
    for s in sorted({*storages, *movable}):
        if s in candidates.needed:
            program.row(_there(candidates, k, r, o, s), 1)
    for op in ops:
        for a in graph.ops[op].reads:
            if a in k:
                program.row({r[op]: -1, **_there(candidates, k, r, o, a)}, 0)
    for row in rows:
        _add_memory(program, candidates, row, k, o, budget_bytes)

    seconds = np.array([candidates.repeat_s[op] for op in ops])
    longest = max(seconds.max(initial=0.0), max((moves.copy_s[s] for s in movable), default=0.0) if moves else 0.0)
    scale = 1.0 / (longest or 1.0)  # the solver's tolerances are absolute
    exposed = _add_windows(program, moves, o, scale) if moves else ()
    cost = np.zeros(program.variables)
    cost[list(r.values())] = seconds * scale + _EPSILON
    if moves:
        copies = np.array([2 * moves.copy_s[s] * moves.haste[s] for s in movable])
        cost[list(o.values())] = copies * scale * _HIDDEN + _EPSILON
        cost[list(exposed)] = 1
    integer = np.zeros(program.variables)
    integer[:decisions] = 1
    lower, upper = np.zeros(program.variables), np.ones(program.variables)
    upper[list(exposed)] = np.inf
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
    offloaded = frozenset(s for s in movable if found.x[o[s]] > 0.5 and found.x[k[s]] < 0.5)
    rebuilt = frozenset(s for s in storages if candidates.maker[s] in again and found.x[k[s]] < 0.5) - offloaded
    total = sum(candidates.repeat_s[op] for op in again) + (moves.exposed_seconds(offloaded) if moves else 0.0)
    return Solution(rebuilt, total, float((found.mip_dual_bound or 0.0) / scale), offloaded)


def _there(
    candidates: MilpVariables, k: Mapping[int, int], r: Mapping[int, int], o: Mapping[int, int], s: int
) -> dict[int, float]:
    """The ways by which the backward gets a storage: kept, recomputed, fetched."""
    ways: dict[int, float] = {k[s]: 1}
    if s in candidates.maker:
        ways[r[candidates.maker[s]]] = 1
    if s in o:
        ways[o[s]] = 1
    return ways


def _add_windows(program: _Program, moves: Moves, o: Mapping[int, int], scale: float) -> tuple[int, ...]:
    """The exposed time of the copies in each direction: at least the time that any window cannot hide."""

    def add(windows: Sequence[Window]) -> int:
        (late,) = program.new(1)
        for window in windows:
            # A storage that must be recomputed is never copied.
            copies = {o[s]: -moves.copy_s[s] * scale for s in sorted(window.storages) if s in o}
            program.row({late: 1, **copies}, -window.work_s * scale)
        return late

    return add(moves.leaving), add(moves.coming)


def _add_memory(
    program: _Program,
    candidates: MilpVariables,
    row: MemoryRow,
    k: Mapping[int, int],
    o: Mapping[int, int],
    budget_bytes: int,
) -> None:
    """Live bytes at one step: kept storages, and storages recomputed or fetched by then."""
    by_then = dict(zip(row.started, program.new(len(row.started)), strict=True))
    terms: dict[int, float] = {}
    for op, used in row.started.items():
        for s in used:
            program.row({by_then[op]: 1, k[s]: 1} | ({o[s]: 1} if s in o else {}), 1)
        for s in candidates.made(op):
            for reader in candidates.readers.get(s, ()):
                if reader in by_then:
                    fetched = {o[s]: 1} if s in o else {}
                    program.row({by_then[op]: 1, k[s]: 1, by_then[reader]: -1} | fetched, 0)
    spare_bytes = budget_bytes - row.fixed_bytes
    for s, nbytes in row.bytes_of.items():
        if nbytes < _TINY * budget_bytes:
            spare_bytes -= nbytes  # as if it were alive: the solver would not see it
            continue
        maker = by_then.get(candidates.maker[s]) if s in row.again else None
        fetchers = [by_then[op] for op in row.fetched.get(s, ())] if s in o else []
        if maker is None and not fetchers:
            terms[k[s]] = nbytes / budget_bytes
            continue
        (alive,) = program.new(1)
        program.row({alive: 1, k[s]: -1}, 0)
        if maker is not None:
            program.row({alive: 1, maker: -1}, 0)
        for fetcher in fetchers:
            program.row({alive: 1, fetcher: -1, o[s]: -1}, -1)
        terms[alive] = nbytes / budget_bytes
    program.row(terms, -np.inf, spare_bytes / budget_bytes)
