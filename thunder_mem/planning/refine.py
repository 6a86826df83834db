"""Rewrite a planned trace where its plan shows a way to a lower peak, and plan again.

A plan shows which values are alive at the peak without being used: a base that a small view keeps alive, or a value
that could be recomputed later. Each rewrite is tried as a whole and stays if the exact peak falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_mem.fusion.arrangement import arrange
from thunder_mem.memory.plan import Decision
from thunder_mem.planning.program import Planned
from thunder_mem.regions.fusion_queries import fusibility
from thunder_mem.rewrites.copy_small_views import about_views, pinned_bases, with_copied_views
from thunder_mem.rewrites.rematerialize import about_remakes, idle_at_peak, with_rematerialized
from thunder_mem.schedule.registry import SortFunction
from thunder_mem.trace.reading import read_trace

__all__ = ["refined"]

# The most tries of each rewrite, as long as it lowers the peak.
_ROUNDS = 4


def refined(planned: Planned, executors: Sequence[FusionExecutor], sort: str | SortFunction) -> Planned:
    """The plan with small views copied and idle values recomputed, as far as that lowers the peak."""
    said: list[Decision] = []
    for rewrite, about in ((_with_copied_views, about_views), (_with_remakes, about_remakes)):
        before_bytes, total = planned.peak_bytes, 0
        for _ in range(_ROUNDS):
            new, count = rewrite(planned)
            if not count:
                break
            read = read_trace(new, earlier=planned.source)
            fuse = fusibility(read, executors)
            made = arrange(read.graph, fuse, [str(e.name) for e in executors], sort=sort)
            if made.candidate.peak_bytes >= planned.peak_bytes:
                break
            planned = replace(planned, plan=made, source=read, fuse=fuse, trace=new)
            total += count
        if total:
            said.append(about(total, before_bytes, planned.peak_bytes))
    return replace(planned, plan=replace(planned.plan, decisions=(*planned.plan.decisions, *said)))


def _with_copied_views(planned: Planned) -> tuple[TraceCtx, int]:
    """The trace with copies of small views that keep a base alive at the peak, and the number of copies."""
    splits = pinned_bases(planned.source, planned.plan)
    count = sum(len(split.views) for split in splits)
    return (with_copied_views(planned.source, planned.trace, splits) if count else planned.trace), count


def _with_remakes(planned: Planned) -> tuple[TraceCtx, int]:
    """The trace that recomputes values which are idle at the peak, and the number of these values."""
    remakes = idle_at_peak(planned.source, planned.plan, planned.fuse)
    return (with_rematerialized(planned.source, planned.trace, remakes) if remakes else planned.trace), len(remakes)
