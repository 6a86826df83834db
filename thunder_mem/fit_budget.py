"""Find the cheapest choice of what to recompute whose peak fits a budget.

The ladder (`ladder.py`) is searched by exact trials for its first rung that fits; the integer program
(`saving_milp.py`) then looks for a cheaper choice within the same limit. Whatever either proposes, a
trial by the exact timeline decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thunder_mem.choices import UNDECIDED, Choices
from thunder_mem.graph import Graph
from thunder_mem.ladder import Rung, ladders, repeat_seconds
from thunder_mem.regions import Fusibility
from thunder_mem.saving_milp import Candidates, MemoryRow, memory_rows, solve
from thunder_mem.trial import Trial, try_rebuilding

__all__ = ["Fit", "SavingProblem", "fit_budget", "frontier"]

# Rounds of cutting planes; each costs a solution and a trial.
_ROUNDS = 3


@dataclass(frozen=True)
class SavingProblem:
    """What a program may save or recompute.

    Attributes:
        graph: its joint graph, unfused, nothing recomputed.
        fuse: which executor can take which op.
        repeat_s: per op, the seconds of repeating it in the backward; infinite where it may not be.
        choices: what is decided already.
    """

    graph: Graph
    fuse: Fusibility
    repeat_s: Sequence[float] = field(repr=False)
    choices: Choices = UNDECIDED
    _trials: dict[frozenset[int], Trial] = field(default_factory=dict, repr=False, compare=False)

    def trial(self, rebuilt: frozenset[int]) -> Trial:
        """The exact price of a choice; made once."""
        if rebuilt not in self._trials:
            self._trials[rebuilt] = try_rebuilding(self.graph, self.fuse, rebuilt)
        return self._trials[rebuilt]

    def seconds(self, rebuilt: frozenset[int]) -> float:
        return repeat_seconds(self.graph, rebuilt, self.repeat_s)


@dataclass(frozen=True)
class Fit:
    """A choice, and what it costs.

    Attributes:
        rebuilt: the storages that the backward computes again.
        peak_bytes: of its trial.
        seconds: of all repetitions.
        bound_seconds: a lower bound on it, under the model of the integer program.
        method: "ladder" or "milp"; "smallest" if nothing fits, and this has the smallest peak found.
    """

    rebuilt: frozenset[int]
    peak_bytes: int
    seconds: float
    bound_seconds: float
    method: str


def fit_budget(problem: SavingProblem, budget_bytes: int) -> Fit:
    """The cheapest choice found whose trial stays within the budget, or the one of the smallest peak."""
    smallest: Fit | None = None
    for rungs in ladders(problem.graph, problem.fuse, problem.repeat_s, problem.choices):
        highest = problem.trial(rungs[-1].rebuilt)
        found, trial = _first_that_fits(problem, rungs, highest, budget_bytes)
        fit = Fit(found.rebuilt, trial.peak_bytes, found.seconds, 0.0, "ladder")
        if fit.peak_bytes <= budget_bytes:
            return _cheaper(problem, rungs, fit, trial, budget_bytes)
        if smallest is None or fit.peak_bytes < smallest.peak_bytes:
            smallest = Fit(fit.rebuilt, fit.peak_bytes, fit.seconds, fit.seconds, "smallest")
    assert smallest is not None  # there is always one ladder
    return smallest


def _first_that_fits(
    problem: SavingProblem, rungs: Sequence[Rung], highest: Trial, budget_bytes: int
) -> tuple[Rung, Trial]:
    """Search between the lowest rung and the highest, guessing by the bytes that a rung saves."""
    low, high, trial = 0, len(rungs) - 1, highest
    if highest.peak_bytes > budget_bytes:
        return rungs[-1], highest
    guess = True
    while high > low:
        middle = (low + high) // 2
        if guess:  # what is over the budget would have to be saved less
            enough = rungs[high].saved_bytes + budget_bytes - trial.peak_bytes
            middle = next((i for i in range(low, high) if rungs[i].saved_bytes <= enough), high - 1)
        guess = not guess
        tried = problem.trial(rungs[middle].rebuilt)
        if tried.peak_bytes <= budget_bytes:
            high, trial = middle, tried
        else:
            low = middle + 1
    return rungs[high], trial


def _cheaper(problem: SavingProblem, rungs: Sequence[Rung], fit: Fit, trial: Trial, budget_bytes: int) -> Fit:
    """The integer program's choice, where a trial says that it fits and it costs less; else `fit`."""
    candidates = Candidates(problem.graph, rungs[-1].rebuilt | fit.rebuilt, problem.repeat_s)
    rows: dict[int, MemoryRow] = {}
    bound = 0.0
    for _ in range(_ROUNDS):
        rows |= {row.key: row for row in memory_rows(candidates, trial)}
        solution = solve(candidates, list(rows.values()), budget_bytes)
        if solution is None or solution.seconds >= fit.seconds:
            break
        bound = bound or solution.bound_seconds
        trial = problem.trial(solution.rebuilt)
        if trial.peak_bytes <= budget_bytes:
            return Fit(solution.rebuilt, trial.peak_bytes, solution.seconds, min(bound, solution.seconds), "milp")
    return Fit(fit.rebuilt, fit.peak_bytes, fit.seconds, min(bound or fit.seconds, fit.seconds), fit.method)


def frontier(problem: SavingProblem, points: int = 16) -> Iterator[Fit]:
    """Choices from no costly repetition to the smallest peak, each with a lower peak than the one before.

    The narrowest spacing of the anchors is sampled at `points` rungs, the wider ones only for as long
    as they still lower the peak.
    """
    peak_bytes: int | None = None
    for rungs in ladders(problem.graph, problem.fuse, problem.repeat_s, problem.choices):
        last = len(rungs) - 1
        if peak_bytes is not None and problem.trial(rungs[last].rebuilt).peak_bytes >= peak_bytes:
            return
        for i in sorted({*range(0, last, max(1, -(-last // points))), last}):
            tried = problem.trial(rungs[i].rebuilt)
            if peak_bytes is None or tried.peak_bytes < peak_bytes:
                peak_bytes = tried.peak_bytes
                yield Fit(rungs[i].rebuilt, peak_bytes, rungs[i].seconds, rungs[i].seconds, "ladder")
