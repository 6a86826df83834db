"""Find the cheapest recomputation whose peak fits a budget.

The integer program (`milp.py`) proposes, with rows from a few trials of a curve of minimum cuts (`tradeoff_curve.py`).
A trial by the exact timeline disposes. Proposals belong to fixed targets between the curve's ends, not to the given
budget. So the same few choices answer neighbouring budgets, and a larger budget never has fewer choices. If no proposal
fits, a tried point of the curve does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph
from thunder_mem.partition.constraints import UNDECIDED, Constraints
from thunder_mem.partition.evaluation import Evaluation, evaluate
from thunder_mem.partition.milp import Solution, solve
from thunder_mem.partition.milp_memory_rows import MemoryRow, MilpVariables, calibrated, memory_rows
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.partition.overwriting_on_graph import Overwritable
from thunder_mem.partition.tradeoff_curve import TradeoffPoint, repeat_seconds, tradeoff_curves
from thunder_mem.partition.transfer_windows import Moves
from thunder_mem.schedule.registry import SortFunction

__all__ = ["PartitionChoice", "PartitionProblem", "fit_budget"]

# The range of peaks is cut into so many targets: fewer in programs that are solved exactly, and the fewest
# in those of fewer than so many ops.
_TARGETS, _TARGETS_OF_EXACT, _TARGETS_OF_SMALL, _SMALL = 256, 64, 32, 500
# Rounds of cutting planes for one target; each costs a solution and a trial.
_ROUNDS = 3
# So many targets below the budget's own are tried one by one; further down the steps double.
_TARGETS_BELOW = 2
# Relative difference below which times are the same.
_EQUAL = 1e-9
# In programs of fewer ops every target is solved exactly, and all targets below a budget and the next curve are
# tried. In larger ones that takes too long (8 layers of a LLaMA have 2,020 and take 3 s instead of 1).
_EXACT = 2500
# Rungs between the ends are also tried, as long as all trials together run no more ops than this.
_SAMPLED_OPS = 8000
# So many of the trials and one more give rows.
_ROW_TRIALS = 4
# The relative optimality gap that ends the search in larger ones.
_LARGE_GAP = 0.002


@dataclass(frozen=True)
class PartitionChoice:
    """A choice and its cost.

    Attributes:
        rebuilt: the storages that the backward recomputes.
        peak_bytes: the peak of its trial.
        seconds: the time of all recomputation.
        bound_seconds: a lower bound on `seconds`, under the model of the integer program.
        method: "curve" or "milp", whichever found it.
        offloaded: the storages that the backward fetches from the host.
        exposed_seconds: the part of `seconds` that waits for copies to the host and back.
        without_seconds: the time of the cheapest fitting choice without offload; None if none was found.
    """

    rebuilt: frozenset[int]
    peak_bytes: int
    seconds: float
    bound_seconds: float
    method: str
    offloaded: frozenset[int] = frozenset()
    exposed_seconds: float = 0.0
    without_seconds: float | None = None


@dataclass(frozen=True)
class PartitionProblem:
    """The choice of what a program saves or recomputes.

    Attributes:
        graph: its joint graph, unfused and without recomputation.
        fuse: the executors that can take each op.
        repeat_s: per op, the seconds to recompute it in the backward; infinite if it may not run again.
        choices: the decisions already made.
        sort: the sort of the plans.
        moves: the values that may be offloaded, and the cost of that.
        over: per operation of the backward, the operands over which it may write their gradients.
    """

    graph: Graph
    fuse: FusionCapabilities
    repeat_s: Sequence[float] = field(repr=False)
    choices: Constraints = UNDECIDED
    sort: str | SortFunction = "auto"
    moves: Moves | None = None
    over: Mapping[int, Overwritable] = field(default_factory=dict, repr=False)
    _trials: dict[tuple[frozenset[int], frozenset[int]], Evaluation] = field(
        default_factory=dict, repr=False, compare=False
    )
    _spacings: list[_Spacing] = field(default_factory=list, repr=False, compare=False)
    _coming: list[Iterator[tuple[TradeoffPoint, ...]]] = field(default_factory=list, repr=False, compare=False)

    _next: dict[int, tuple[PartitionChoice, ...]] = field(default_factory=dict, repr=False, compare=False)

    def trial(self, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Evaluation:
        """The exact price of a choice, computed once."""
        if (rebuilt, offloaded) not in self._trials:
            asked = self.choices.offload & saved_storages(self.graph, rebuilt) if self.choices.offload else frozenset()
            found = evaluate(self.graph, self.fuse, rebuilt, self.sort, offloaded | asked, self.over)
            self._trials[rebuilt, offloaded] = found
        return self._trials[rebuilt, offloaded]

    def seconds(self, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> float:
        """Seconds to recompute `rebuilt`, and of copies that no other work hides."""
        return repeat_seconds(self.graph, rebuilt, self.repeat_s) + self.exposed_seconds(offloaded)

    def exposed_seconds(self, offloaded: frozenset[int]) -> float:
        """Seconds of copies that no other work hides."""
        return self.moves.exposed_seconds(offloaded) if self.moves is not None else 0.0

    def fit(
        self, rebuilt: frozenset[int], bound_seconds: float, method: str, offloaded: frozenset[int] = frozenset()
    ) -> PartitionChoice:
        """A choice with its prices."""
        seconds = self.seconds(rebuilt, offloaded)
        peak_bytes = self.trial(rebuilt, offloaded).peak_bytes
        exposed = self.exposed_seconds(offloaded)
        return PartitionChoice(rebuilt, peak_bytes, seconds, min(bound_seconds, seconds), method, offloaded, exposed)

    def spacings(self) -> Iterator[_Spacing]:
        """The curves, narrowest spacing of block boundaries first, as long as a wider spacing has a lower end."""
        known = self._spacings
        for i in itertools.count():
            if i == len(known):
                if not self._coming:
                    self._coming.append(tradeoff_curves(self.graph, self.fuse, self.repeat_s, self.choices))
                points = next(self._coming[0], None)
                if points is None:
                    return
                spacing = _Spacing(self, points)
                if known and spacing.low_bytes >= known[-1].low_bytes:
                    self._coming[0] = iter(())
                    return
                known.append(spacing)
            yield known[i]


class _Spacing:
    """One curve, the integer program over its candidates, and the program's answers to fixed targets."""

    def __init__(self, problem: PartitionProblem, points: Sequence[TradeoffPoint]) -> None:
        self.problem, self.points = problem, points
        self.exact = len(problem.graph) < _EXACT
        small = len(problem.graph) < _SMALL
        self.targets = _TARGETS_OF_SMALL if small else _TARGETS_OF_EXACT if self.exact else _TARGETS
        self._solutions: dict[int, Solution | None] = {}
        self._answers: dict[int, frozenset[int]] = {}
        self.candidates = MilpVariables(
            problem.graph,
            problem.fuse,
            points[-1].rebuilt,
            problem.repeat_s,
            forced=points[0].rebuilt & (problem.choices.may_recompute | problem.choices.must_recompute),
        )

    @cached_property
    def sampled(self) -> tuple[PartitionChoice, ...]:
        """The two ends and, if trials are cheap, evenly spaced points between; every budget may choose among these."""
        last = len(self.points) - 1
        count = min(last, max(1, _SAMPLED_OPS // max(1, len(self.problem.graph)) - 1))
        chosen = dict.fromkeys(round(i * last / count) if count else 0 for i in range(count + 1))
        return tuple(self.problem.fit(self.points[i].rebuilt, 0.0, "curve") for i in chosen)

    @cached_property
    def low_bytes(self) -> int:
        """The lowest peak on the curve; in small programs another point than the last may have it."""
        return min(fit.peak_bytes for fit in self.sampled)

    @cached_property
    def high_bytes(self) -> int:
        """The highest peak on the curve."""
        return max(fit.peak_bytes for fit in self.sampled)

    @cached_property
    def rows(self) -> list[MemoryRow]:
        """The memory rows of some sampled points; no row claims more for a sampled point than its trial shows."""
        trials = [self.problem.trial(fit.rebuilt) for fit in self.sampled]
        shown = {i * (len(trials) - 1) // _ROW_TRIALS for i in range(_ROW_TRIALS + 1)}
        found = {row.key: row for i in sorted(shown) for row in memory_rows(self.candidates, trials[i])}
        return calibrated(self.candidates, found.values(), trials)

    def target(self, nbytes: int) -> int:
        """The highest target of at most so many bytes, counted from the low end; negative if there is none."""
        return (nbytes - self.low_bytes) * self.targets // max(1, self.high_bytes - self.low_bytes)

    def target_bytes(self, target: int) -> int:
        """The bytes of a target, rounded up so that target 0 is the low end itself."""
        return self.low_bytes - (self.low_bytes - self.high_bytes) * target // self.targets

    def solution(self, target: int) -> Solution | None:
        """The integer program's solution for a target, by the spacing's own rows."""
        if target not in self._solutions:
            self._solutions[target] = self._solve(self.rows, self.target_bytes(target))
        return self._solutions[target]

    def answer(self, target: int) -> PartitionChoice | None:
        """The choice for a target: the solution, repaired if its trial exceeds the target."""
        first = self.solution(target)
        if first is None:
            return None
        if target not in self._answers:
            self._answers[target] = self._mended(first, self.target_bytes(target))
        return self.problem.fit(self._answers[target], first.bound_seconds, "milp")

    def _solve(self, rows: Sequence[MemoryRow], target_bytes: int) -> Solution | None:
        gap = 0.0 if self.exact else _LARGE_GAP
        return solve(self.candidates, rows, target_bytes, gap)

    def _mended(self, solution: Solution, target_bytes: int) -> frozenset[int]:
        # One step may have several rows: the rows of one trial do not replace those of others.
        rows = list(self.rows)
        chosen = solution
        for _ in range(_ROUNDS):
            trial = self.problem.trial(chosen.rebuilt)
            if trial.peak_bytes <= target_bytes:
                return chosen.rebuilt
            rows += memory_rows(self.candidates, trial)
            following = self._solve(rows, target_bytes)
            if following is None:
                break
            chosen = following
        return chosen.rebuilt


def fit_budget(problem: PartitionProblem, budget_bytes: int) -> PartitionChoice:
    """The cheapest choice found whose peak stays within the budget, or else the choice with the smallest peak.

    Among equally cheap choices the one with the lower peak wins.
    """
    spacing = next((spacing for spacing in problem.spacings() if spacing.low_bytes <= budget_bytes), None)
    if spacing is None:
        return _smallest(problem)
    found = _proposals(problem, spacing, budget_bytes)
    bound = found[0].bound_seconds if found else 0.0
    known = (*found, *spacing.sampled, *_of_the_next(problem, spacing))
    found = [fit for fit in known if fit.peak_bytes <= budget_bytes]
    best = min(found, key=lambda f: (f.seconds, f.peak_bytes))
    if not spacing.exact and (point := _cheaper_point(problem, spacing, best, bound, budget_bytes)) is not None:
        best = point
    return replace(best, bound_seconds=min(bound, best.seconds))


def _cheaper_point(
    problem: PartitionProblem, spacing: _Spacing, best: PartitionChoice, bound_seconds: float, budget_bytes: int
) -> PartitionChoice | None:
    """The curve's own best choice, if the integer program stopped at its gap and a cheaper choice may exist."""
    cheaper = [point for point in spacing.points if bound_seconds <= point.seconds < best.seconds * (1 - _EQUAL)]
    if not cheaper:
        return None
    fit = problem.fit(cheaper[-1].rebuilt, bound_seconds, "curve")
    return fit if fit.peak_bytes <= budget_bytes and fit.seconds < best.seconds else None


def _of_the_next(problem: PartitionProblem, spacing: _Spacing) -> tuple[PartitionChoice, ...]:
    """The cheapest choice of later curves; without it, a smaller budget might be cheaper.

    Large programs omit this, because it takes too long.
    """
    if not spacing.exact:
        return ()
    if spacing.low_bytes not in problem._next:
        fit = fit_budget(problem, spacing.low_bytes - 1)
        problem._next[spacing.low_bytes] = (fit,) if fit.peak_bytes < spacing.low_bytes else ()
    return problem._next[spacing.low_bytes]


def _proposals(problem: PartitionProblem, spacing: _Spacing, budget_bytes: int) -> list[PartitionChoice]:
    """Answers to the targets around a budget, starting from the first above it.

    Targets below follow until none of them can be cheaper than a fitting choice. If a stretch of targets costs
    the same, its two ends are also answered: less memory for equal time. In programs that are not solved
    exactly, the first fitting answer is the last.
    """
    here = min(spacing.target(budget_bytes), spacing.targets)
    proposals: list[PartitionChoice] = []
    best, lowest = inf, 0
    for target in _targets_from(min(here + 1, spacing.targets), spacing.exact):
        solution = spacing.solution(target)
        if solution is not None and solution.bound_seconds >= best * (1 - _EQUAL):
            break
        if (fit := spacing.answer(target)) is not None:
            proposals.append(fit)
            if fit.peak_bytes <= budget_bytes and fit.seconds < best:
                best, lowest = fit.seconds, target
                if not spacing.exact:  # targets below are cheaper by less than the gap
                    return proposals
    if best < inf:
        ends = {_last_as_cheap(spacing, lowest, best, direction) for direction in (-1, 1)} - {lowest}
        proposals += [fit for fit in map(spacing.answer, sorted(ends)) if fit is not None]
    return proposals


def _targets_from(first: int, each: bool) -> Iterator[int]:
    """The targets from one down to 0, singly or finally in doubling steps; 0 itself is always included."""
    target, step = first, 1
    while target > 0:
        yield target
        if not each and first - target > _TARGETS_BELOW:
            step *= 2
        target -= step
    yield 0


def _last_as_cheap(spacing: _Spacing, target: int, seconds: float, direction: int) -> int:
    """The last target on one side whose solution costs the same, by doubling steps and bisection."""

    def as_cheap(other: int) -> bool:
        solution = spacing.solution(other) if 0 <= other <= spacing.targets else None
        return solution is not None and abs(solution.seconds - seconds) <= seconds * _EQUAL

    step = 1
    while as_cheap(target + direction * step):
        target, step = target + direction * step, 2 * step
    while (step := step // 2) > 0:
        if as_cheap(target + direction * step):
            target += direction * step
    return target


def _smallest(problem: PartitionProblem) -> PartitionChoice:
    """The cheapest choice with the smallest known peak."""
    spacings = list(problem.spacings())
    found = [fit for spacing in spacings for fit in spacing.sampled]
    found += _proposals(problem, spacings[-1], spacings[-1].low_bytes)
    return replace(min(found, key=lambda f: (f.peak_bytes, f.seconds)), bound_seconds=0.0)
