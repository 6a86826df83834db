"""Notes about the compilation of a program, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import thunder
from thunder.transforms.cudagraph import CUDAGraphTransform

from thunder_mem.frontend.thunderfx import (
    Break,
    Subgraph,
    graph_breaks,
    highest_peak,
    left_to_others,
    subgraphs,
)
from thunder_mem.fusers.fusion_executors import fuses_generally
from thunder_mem.loop_body.region import RETURNED_WHOLE
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.record import last_plan

__all__ = ["about_compilation", "about_subgraphs"]

NOT_FUSED = (
    "no executor of this compilation fuses operations, so none is rebuilt at no cost: leave executors= out, "
    'or add "mem_pointwise" to it'
)
CUDA_GRAPHS = "CUDA graphs keep their values, and copies of arguments, between calls: these are not counted"


def about_compilation(jitted: Any) -> tuple[str, ...]:
    """Notes about the executors and transforms of a function compiled with `MemEfficient`."""
    data: Any = thunder.compile_data(jitted)
    notes = []
    if not any(map(fuses_generally, user_executors(data.executors_list))):
        notes.append(NOT_FUSED)
    if any(isinstance(t, CUDAGraphTransform) for t in data.transforms):
        notes.append(CUDA_GRAPHS)
    return tuple(notes)


def about_subgraphs(compiled: Any) -> tuple[str, ...]:
    """Notes about a program of ThunderFX: the subgraph shown, and parts that Thunder does not compile."""
    parts, shown = subgraphs(compiled), highest_peak(compiled)
    theirs = [part for part in parts if part.jitted is not None]
    notes = []
    if len(parts) > 1:
        name = next((part.name for part in theirs if part.jitted is shown), "")
        which = f"this is {name}, whose plan peaks highest" if len(theirs) > 1 else f"this is {name}"
        notes.append(
            f"ThunderFX made {len(parts)} subgraphs of the program, {len(theirs)} of them for Thunder: {which}; "
            "thunder_mem.frontend.thunderfx.subgraphs has all"
        )
    notes += left_to_others(compiled)
    breaks = graph_breaks(compiled)
    for found in breaks:
        at = f" at {found.source}" if found.source else ""
        notes.append(f"graph {found.graph} breaks{at}: {found.reason}")
    return (*notes, *_heads_kept_whole(theirs, breaks))


def _heads_kept_whole(theirs: Sequence[Subgraph], breaks: Sequence[Break]) -> Iterator[str]:
    """Notes about loss heads whose logits leave their graph, although the program may return only a loss."""
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
