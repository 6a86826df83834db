"""The options of planning, which `MemEfficient` passes on."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_mem.memory.plan import Decision, Refusal
from thunder_mem.rewrites.updates import Optimized
from thunder_mem.schedule.registry import SortFunction
from thunder_mem.user_choices.offload import OffloadOption
from thunder_mem.user_choices.partition_policy import PartitionPolicy

__all__ = ["PlanningOptions"]


@dataclass(frozen=True)
class PlanningOptions:
    """The options that `MemEfficient` passes on; see there."""

    sort: str | SortFunction = "auto"
    strict: bool = False
    budget: int | str | None = None
    on_infeasible: str = "error"
    costs: str = "roofline"
    recompute: PartitionPolicy | None = None
    offload: OffloadOption | None = None
    reuse: bool = True
    keep: bool = True
    redraw: bool = True
    verify: bool | None = None
    studied: bool = False  # operations keep the names that the program gives them, and the record keeps a study
    optimized: Optimized | None = None  # parameters that the backward updates
    limits_s: tuple[float, ...] = ()  # seconds; only partitions within the first that any keeps count, see `made`
    repeat_tiles: bool = True  # results of stretches in tiles may be computed once more
    smaller_heads: bool = True  # loss heads may become smaller to fit a budget
    refused: tuple[Refusal, ...] = ()  # by earlier passes
    decisions: tuple[Decision, ...] = ()  # of earlier passes
