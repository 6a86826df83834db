"""What is worth knowing about how a program was compiled, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import thunder
from thunder.extend import FusionExecutor
from thunder.transforms.cudagraph import CUDAGraphTransform

from thunder_mem.chunk_region import RETURNED_WHOLE
from thunder_mem.delegate import last_failure, last_plan, unseat
from thunder_mem.fx import Break, Subgraph, graph_breaks, highest_peak, is_fx, subgraphs, why_no_subgraphs
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["about_compilation", "about_subgraphs", "left_to_others", "why_no_plan"]

NOT_FUSED = (
    "no executor of this compilation fuses operations, so none is rebuilt at no cost: leave executors= out, "
    'or add "mem_pointwise" to it'
)
CUDA_GRAPHS = "CUDA graphs keep their values, and copies of arguments, between calls: these are not counted"


def why_no_plan(jitted: Any) -> str:
    """Why `last_plan` is None, and what to do, in a sentence; "" where there is a plan.

    Args:
        jitted: what `thunder.jit` or ThunderFX returned.

    Example:
        >>> why_no_plan(thunder.jit(lambda x: x * 2))
        'it has no MemEfficient: write thunder.jit(..., transforms=[MemEfficient()])'
    """
    if is_fx(jitted):
        if (shown := highest_peak(jitted)) is None:
            others = "; ".join(left_to_others(jitted))
            return f"Thunder compiles nothing of this program: {others}" if others else why_no_subgraphs(jitted)
        return why_no_plan(shown)
    data: Any = thunder.compile_data(jitted)
    stats: Any = thunder.compile_stats(jitted)
    if data is None or stats is None:
        return f"{type(jitted).__name__} is nothing that Thunder compiled: give what thunder.jit or thunderfx returned"
    if last_plan(jitted) is not None:
        return ""
    if failure := last_failure(jitted):
        return f"planning failed, and Thunder alone compiled it: {failure}"
    if not any(isinstance(transform, MemEfficient) for transform in data.transforms):
        return "it has no MemEfficient: write thunder.jit(..., transforms=[MemEfficient()])"
    if not stats.interpreter_cache:
        return "nothing of it was compiled yet: call it once"
    return "its last compilation made no plan, and no failure is known: MemEfficient(strict=True) raises where it ends"


def about_compilation(jitted: Any) -> tuple[str, ...]:
    """About the executors and transforms of a function that was compiled with `MemEfficient`."""
    data: Any = thunder.compile_data(jitted)
    notes = []
    if not any(_fuses_all(e) for e in unseat(data.executors_list)):
        notes.append(NOT_FUSED)
    if any(isinstance(t, CUDAGraphTransform) for t in data.transforms):
        notes.append(CUDA_GRAPHS)
    return tuple(notes)


def _fuses_all(executor: Any) -> bool:
    return isinstance(executor, FusionExecutor) and not getattr(executor, "required_ops", None)


def left_to_others(compiled: Any) -> tuple[str, ...]:
    """What Thunder does not compile of a program of ThunderFX, and why."""
    notes = []
    for part in subgraphs(compiled):
        if part.jitted is None:
            by = "runs as it is" if part.compiler == "eager" else "is compiled by Inductor"
            what = ", ".join(part.operations[:4]) + (", …" if len(part.operations) > 4 else "")
            why = f": {part.reason}" if part.reason else ""
            at = f", at {part.source}" if part.source else ""
            notes.append(f"{part.name} ({what}) {by}, and MemEfficient does not see it{why}{at}")
    return tuple(notes)


def about_subgraphs(compiled: Any) -> tuple[str, ...]:
    """About a program of ThunderFX: which of its subgraphs is shown, what Thunder does not compile, and why."""
    parts, shown = subgraphs(compiled), highest_peak(compiled)
    theirs = [part for part in parts if part.jitted is not None]
    notes = []
    if len(parts) > 1:
        name = next((part.name for part in theirs if part.jitted is shown), "")
        which = f"this is {name}, whose plan peaks highest" if len(theirs) > 1 else f"this is {name}"
        notes.append(
            f"ThunderFX made {len(parts)} subgraphs of the program, {len(theirs)} of them for Thunder: {which}; "
            "thunder_mem.fx.subgraphs has all"
        )
    notes += left_to_others(compiled)
    breaks = graph_breaks(compiled)
    for found in breaks:
        at = f" at {found.source}" if found.source else ""
        notes.append(f"graph {found.graph} breaks{at}: {found.reason}")
    return (*notes, *_heads_kept_whole(theirs, breaks))


def _heads_kept_whole(theirs: Sequence[Subgraph], breaks: Sequence[Break]) -> Iterator[str]:
    """What keeps the results of loss heads that leave their graph, though the program may return only a loss."""
    for part in theirs:
        plan = last_plan(part.jitted)
        for refused in plan.refused if plan is not None else ():
            ended = next((b for b in breaks if b.graph == part.graph), None)
            if RETURNED_WHOLE not in refused.reason or ended is None:
                continue
            at = f" at {ended.source}" if ended.source else ""
            yield (
                f"{part.name}: {refused.what} is no loss head in chunks, as what runs behind the break{at} still reads "
                "its result, or holds an object (a dict, a tuple, a model's output, an attribute) that has it: "
                "take the loss out of the object before the break, or move the break"
            )
