"""What is worth knowing about how a program was compiled, in sentences."""

from __future__ import annotations

from typing import Any

import thunder
from thunder.extend import FusionExecutor
from thunder.transforms.cudagraph import CUDAGraphTransform

from thunder_mem.delegate import unseat
from thunder_mem.fx import graph_breaks, highest_peak, subgraphs

__all__ = ["about_compilation", "about_subgraphs", "left_to_others"]

NOT_FUSED = (
    "no executor of this compilation fuses operations, so none is rebuilt at no cost: leave executors= out, "
    'or add "mem_pointwise" to it'
)
CUDA_GRAPHS = "CUDA graphs keep their values, and copies of arguments, between calls: these are not counted"


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
    for found in graph_breaks(compiled):
        at = f" at {found.source}" if found.source else ""
        notes.append(f"graph {found.graph} breaks{at}: {found.reason}")
    return tuple(notes)
