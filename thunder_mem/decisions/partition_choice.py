"""Which storages the backward recomputes at no price: the lowest of the free partitions.

All of them are arranged. Then the lowest is refined, and those that may become lower than it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.loss_outside import Rank, rank_with_loss_outside
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.program import Planned, Program, device_of, free_partitions
from thunder_mem.decisions.refine import bytes_idle_at_peak, refined
from thunder_mem.fusion.arrangement import Arranged, arrange
from thunder_mem.partition.min_cut_partition import about_saving

__all__ = ["FreePartitions", "TooSlowError", "arranged_partitions", "plan_partition"]

# Refinement lowers 95 of 100 partitions by this share at most. So one that starts further above is not refined.
_MOST_LOWERED = 0.25
# Beyond what is idle at the peak it lowered none of 42 partitions of checkpointed steps on a CPU by more than 6.3 %.
_MOST_LOWERED_BEYOND_IDLE = 0.08

Found = TypeVar("Found")


class TooSlowError(Exception):
    """Every plan takes longer than allowed."""


def arranged_partitions(program: Program) -> FreePartitions:
    """The free partitions of a program.

    Raises:
        TooSlowError: none is within `options.limits_s`.
    """
    arranged = [_arranged(program, rebuilt) for rebuilt in free_partitions(program)]
    return FreePartitions(program, tuple(_within_limits(arranged, program.options.limits_s)))


def plan_partition(program: Program, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Planned:
    """The plan for given storages to recompute and to offload: its regions and their order."""
    return _refined(_arranged(program, rebuilt, offloaded))


@dataclass(frozen=True)
class _Partition:
    """A choice of storages that the backward recomputes, with its regions and their order, before refinement."""

    rebuilt: frozenset[int]
    planned: Planned
    arranged: Arranged

    @cached_property
    def seconds(self) -> float:
        """The modelled time of its kernels; without their launches on a GPU, whose host starts them ahead."""
        source = self.planned.source
        return plan_seconds(self.planned.plan, source, device_model_of(device_of(source)).without_launches)

    @cached_property
    def least_likely_bytes(self) -> int:
        """A peak that this is seldom below, once it is refined and its results overwrite dying values.

        Tiles that run again are not counted.
        """
        busy_bytes = self.planned.plan.overwritten_peak_bytes - bytes_idle_at_peak(self.planned)
        return int((1 - _MOST_LOWERED_BEYOND_IDLE) * busy_bytes)


@dataclass(frozen=True)
class FreePartitions:
    """The free partitions of a program, arranged and not yet refined, which takes as long again.

    Attributes:
        program: the program.
        arranged: its partitions; those that save more for the backward come later.
    """

    program: Program
    arranged: tuple[_Partition, ...]

    @property
    def lowest(self) -> _Partition:
        """The lowest as arranged."""
        rank = _rank(self.program.options)
        return min(self.arranged, key=lambda p: rank(p.planned))

    @cached_property
    def least_likely_bytes(self) -> int:
        """A peak that the best plan of a program without tiles is seldom below."""
        return min(p.least_likely_bytes for p in self.arranged)

    @cached_property
    def least_seconds(self) -> float:
        """The modelled time of the fastest, as arranged."""
        return min(p.seconds for p in self.arranged)

    def chosen(self) -> tuple[Planned, frozenset[int]]:
        """The best plan without costly recomputation, and the storages that its backward recomputes."""
        partitions, rank = self.arranged, _rank(self.program.options)
        place, best = _lowest([rank(p.planned) for p in partitions], lambda k: _refined(partitions[k]), rank)
        return replace(best, arranged_seconds=partitions[place].seconds), partitions[place].rebuilt


def _arranged(program: Program, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> _Partition:
    trace, read, fuse = program.recomputing(rebuilt, offloaded)
    arranged = arrange(read.graph, fuse, [str(e.name) for e in program.executors], sort=program.options.sort)
    return _Partition(rebuilt, Planned(program, arranged.plan, read, fuse, trace), arranged)


def _within_limits(partitions: Sequence[_Partition], limits_s: Sequence[float]) -> Sequence[_Partition]:
    """The partitions within the first limit that any of them keeps; all without limits."""
    for limit_s in limits_s:
        if found := [p for p in partitions if p.seconds <= limit_s]:
            return found
    if limits_s:
        raise TooSlowError
    return partitions


def _lowest(ranks: Sequence[Rank], refined: Callable[[int], Found], rank: Callable[[Found], Rank]) -> tuple[int, Found]:
    """The partition, by its place, that is lowest once it is refined, and its plan.

    Later partitions save more for the backward, so they must start lower than those before them. Of these the lowest is
    refined first, and a higher one only if it may become lower than that.

    Args:
        ranks: of the partitions' arrangements.
        refined: refines the partition at a place.
        rank: of what that gives.
    """
    falling = [k for k, own in enumerate(ranks) if own < min(ranks[:k], default=(inf,))]
    place, best = falling[-1], refined(falling[-1])
    for k in reversed(falling[:-1]):
        if (1 - _MOST_LOWERED) * ranks[k][0] < rank(best)[0] and rank(found := refined(k)) <= rank(best):
            place, best = k, found
    return place, best


def _refined(partition: _Partition) -> Planned:
    planned, program = partition.planned, partition.planned.program
    found = refined(planned, partition.arranged, program.executors, program.options.sort, program.options.repeat_tiles)
    decisions = (*program.asked, about_saving(program.source.graph, planned.source.graph), *found.plan.decisions)
    return replace(found, plan=replace(found.plan, decisions=decisions))


def _rank(options: PlanningOptions) -> Callable[[Planned], Rank]:
    """What makes a plan without costly recomputation the better one: the smaller, the better.

    A budget limits only the two halves, so under a budget only their peaks decide.
    """
    return rank_with_loss_outside(options.reuse) if options.budget is None else lambda planned: (planned.peak_bytes,)
