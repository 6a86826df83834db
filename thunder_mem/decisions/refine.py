"""Rewrite a planned trace where its plan shows a way to a lower peak, and plan again.

A plan shows which values are alive at the peak without being used: a base that a small view keeps alive, or a value
that could be recomputed later. Each rewrite is tried as a whole and stays if the exact peak falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.costs.plan_time import bound_symbol_seconds, plan_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.program import Planned, device_of
from thunder_mem.fusers.fusion_queries import fusibility
from thunder_mem.fusion.arrangement import Arranged, arrange
from thunder_mem.memory.graph import Op
from thunder_mem.memory.plan import Decision
from thunder_mem.memory.plan_steps import plan_steps
from thunder_mem.rewrites.copy_small_views import about_views, pinned_bases, with_copied_views
from thunder_mem.rewrites.rematerialize import Remake, about_remakes, idle_at_peak, with_rematerialized
from thunder_mem.schedule.registry import SortFunction
from thunder_mem.trace.reading import read_trace

__all__ = ["TILES_AGAIN", "bytes_idle_at_peak", "refined"]

TILES_AGAIN = "tiles again"
"""Names the decision to run some tiles once more."""

Rewrite = Callable[[Planned], tuple[TraceCtx, int]]
About = Callable[[int, int, int], Decision]

# The most tries of each rewrite, as long as it lowers the peak.
_ROUNDS = 4
# The share of the program's modelled time that stretches in tiles may take once more. Tiles may save some time, too, so
# this is more than what is free in all (`tile_selection.py`).
_MOST_TIME = 0.02


def refined(
    planned: Planned,
    arranged: Arranged,
    executors: Sequence[FusionExecutor],
    sort: str | SortFunction,
    repeat_tiles: bool = True,
) -> Planned:
    """The plan with small views copied and idle values recomputed, as far as that lowers the peak.

    If results are written over what dies, the merges of the last arrangement leave room for that.

    Args:
        planned: the plan.
        arranged: the arrangement whose plan that is.
        executors: the fusion executors.
        sort: of the new plans.
        repeat_tiles: whether results of stretches in tiles may be recomputed too, which takes some time.
    """
    said: list[Decision] = []

    def lowered(planned: Planned, rewrite: Rewrite, about: About, rounds: int = _ROUNDS) -> Planned:
        """The plan after some rounds of one rewrite; the same object if the first does not lower the peak."""
        nonlocal arranged
        before_bytes, total = planned.peak_bytes, 0
        for _ in range(rounds):
            new, count = rewrite(planned)
            if not count:
                break
            read = read_trace(new, earlier=planned.source)
            fuse = fusibility(read, executors, (planned.source, planned.fuse))
            made = arrange(read.graph, fuse, [str(e.name) for e in executors], sort=sort)
            if made.plan.candidate.peak_bytes >= planned.peak_bytes:
                break
            arranged = made
            planned = replace(planned, plan=made.plan, source=read, fuse=fuse, trace=new)
            total += count
        if total:
            said.append(about(total, before_bytes, planned.peak_bytes))
        return planned

    planned = lowered(planned, _with_copied_views, about_views)
    planned = lowered(planned, _with_remakes, about_remakes)
    repetition = _Repetition()
    for _ in range(_ROUNDS if repeat_tiles else 0):
        without, planned = planned, lowered(planned, repetition, _about_repetition, rounds=1)
        if planned is without:
            break
        planned = lowered(planned, _with_remakes, about_remakes)  # what a second run reads may wait for it, idle
    for_reuse = planned.program.options.reuse and sort == "auto"  # another sort is the user's, and stays
    plan = arranged.merged_for_reuse() if for_reuse else arranged.plan
    return replace(planned, plan=plan.after(*said))


def bytes_idle_at_peak(planned: Planned) -> int:
    """The most bytes that copies of small views and recomputation can free at the peak of a plan."""
    source, plan = planned.source, planned.plan
    steps = plan_steps(source.graph, plan)
    freed_bytes = {split.storage: split.saved_bytes for split in pinned_bases(source, plan)}
    for remake in idle_at_peak(source, plan, planned.fuse):
        freed_bytes[remake.storage] = source.graph.storages[remake.storage].nbytes
    return sum(nbytes for s, nbytes in freed_bytes.items() if steps.is_alive_at_peak(s))


def _with_copied_views(planned: Planned) -> tuple[TraceCtx, int]:
    """The trace with copies of small views that keep a base alive at the peak, and the number of copies."""
    splits = pinned_bases(planned.source, planned.plan)
    count = sum(len(split.views) for split in splits)
    return (with_copied_views(planned.source, planned.trace, splits) if count else planned.trace), count


def _with_remakes(planned: Planned) -> tuple[TraceCtx, int]:
    """The trace that recomputes values which are idle at the peak, and the number of these values."""
    remakes = idle_at_peak(planned.source, planned.plan, planned.fuse)
    return (with_rematerialized(planned.source, planned.trace, remakes) if remakes else planned.trace), len(remakes)


class _Repetition:
    """The same for the results of stretches in tiles, such as query, key and value, within some seconds in all."""

    def __init__(self) -> None:
        self.left_s: float | None = None

    def __call__(self, planned: Planned) -> tuple[TraceCtx, int]:
        """The trace that recomputes such values which are idle at the peak, and their number."""
        source, device = planned.source, device_model_of(device_of(planned.source))
        loops = {op.index for op, bsym in zip(source.graph.ops, source.bsyms, strict=True) if _is_repeated(op, bsym)}
        remakes = idle_at_peak(source, planned.plan, planned.fuse, frozenset(loops)) if loops else ()
        if not remakes:
            return planned.trace, 0
        if self.left_s is None:
            self.left_s = _MOST_TIME * plan_seconds(planned.plan, source, device)
        seconds = {op: bound_symbol_seconds(source.bsyms[op], device) for op in loops}
        chosen, again = list[Remake](), set[int]()
        for remake in reversed(remakes):  # the last one made is the last one needed, beside the most gradients
            more = {op for s in remake.chain if (op := source.graph.allocator[s]) in loops} - again
            if (cost_s := sum(seconds[op] for op in more)) <= self.left_s:
                self.left_s, again, chosen = self.left_s - cost_s, again | more, [*chosen, remake]
        trace = with_rematerialized(source, planned.trace, chosen) if again else planned.trace
        return trace, len(chosen) * bool(again)


def _about_repetition(repeated: int, before_bytes: int, after_bytes: int) -> Decision:
    return replace(about_remakes(repeated, before_bytes, after_bytes), what=TILES_AGAIN)


def _is_repeated(op: Op, bsym: BoundSymbol) -> bool:
    """Whether a checkpoint's repetition runs a stretch in tiles there."""
    return op.backward and is_chunk_loop(bsym) and bsym.sym.name == "chunk_loop" and loop_of(bsym).plan.is_stretch
