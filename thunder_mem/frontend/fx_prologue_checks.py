"""Limit ThunderFX's pruning of checks to its own subgraph.

For each graph of Dynamo, `ThunderCompiler` appends a transform to the caller's ``transforms=`` list, which removes
checks from the prologue, and leaves it there (Thunder 0.2.6). Later graphs, whose shapes may be dynamic, and other uses
of the list then lack necessary checks: `thunder.jit` runs code for one shape that it compiled for another. Here a
subgraph removes that transform from the list when it is jitted, and prunes when it is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import thunder
from thunder.core.trace import TraceCtx
from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform
from torch._guards import CompileContext

__all__ = ["is_of_thunderfx", "pruned", "take_back_pruning"]

# The latest graph, by Dynamo's number of the compilation: its subgraphs are jitted one after the other.
_latest: ContextVar[tuple[object, ExtractionOnlyPrologueTransform] | None] = ContextVar("latest", default=None)


def is_of_thunderfx(compile_options: Mapping[str, Any]) -> bool:
    """Whether ThunderFX has jitted a program, by the options of its compilation."""
    return "is_differentiable_outputs" in compile_options  # which only ThunderFX gives


def take_back_pruning(module: Any) -> None:
    """Remove ThunderFX's transform from the list of a module's transforms, and keep it with the module.

    Args:
        module: the result of a `thunder.jit` call; nothing happens unless ThunderFX made the call.
    """
    data: Any = thunder.compile_data(module)
    if data is None or not is_of_thunderfx(data.compile_options):
        return
    graph = CompileContext.current_compile_id()
    transforms = data.transforms
    if isinstance(transforms, list) and transforms and isinstance(transforms[-1], ExtractionOnlyPrologueTransform):
        data.thunder_mem_pruning = transforms.pop()
        _latest.set((graph, data.thunder_mem_pruning))
    elif (latest := _latest.get()) is not None and graph is not None and latest[0] == graph:
        data.thunder_mem_pruning = latest[1]


def pruned(data: Any, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None) -> TraceCtx:
    """The prologue without the checks that ThunderFX does not need."""
    pruning = getattr(data, "thunder_mem_pruning", None)
    if pruning is None:
        return prologue
    return pruning.transform_traces_pre_prologue(prologue, computation, epilogue)[0]
