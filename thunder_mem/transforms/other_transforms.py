"""Constraints that the rest of a compilation puts on a plan: other transforms, the cache, compile options."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from thunder.core.compile_data import get_compile_option
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import IntegerProxy, TensorProxy
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.transforms.cudagraph import CUDAGraphTransform

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.memory.outside_input import quoted
from thunder_mem.memory.plan import Refusal
from thunder_mem.schedule.registry import SORTS, SortFunction
from thunder_mem.tiling.find import ChunkingError
from thunder_mem.tiling.marks import strip_marks, strip_tile_marks
from thunder_mem.tiling.tiles import TilingError

__all__ = [
    "accepts_missing_tangents",
    "behind",
    "check_compile_options",
    "check_sort",
    "composed",
    "rewriting_after",
    "with_whole_heads",
    "with_whole_stretches",
]

SORT_OPTION = "mem_efficient_sort"
_SORT_HELP = (
    "Algorithm by which thunder_mem.MemEfficient orders the program, if it was made without sort=: "
    "a name of thunder_mem.SORTS, or a function (Graph) -> Sequence[int]."
)

NO_CUDA = (
    "CUDA graphs need a GPU, and no argument of this program is on one: move the model to it, "
    'or leave CUDAGraphTransform (the plugin "reduce-overhead") out'
)

LEFT_AUTOCAST = (
    "Thunder keeps the torch.autocast of an earlier call: this call is outside of it but was traced as inside, "
    "so its results have the lower precision; use a thunder.jit of its own for calls without autocast"
)

UNSYNCED_SHARDS = (
    "Thunder's gradients of fsdp are wrong after no_sync(): "
    "accumulate without it, each backward then reduces its own (ddp has no such fault)"
)

# These transforms rewrite a trace but look for no matrix products, so chunk loops do not disturb them.
_BLIND_TO_PRODUCTS = ("ConstantFolding", "ExtractionOnlyPrologueTransform", "PrunePrologueChecks")


def check_sort(sort: Any, name: str = "sort") -> None:
    """Raise when `sort` is neither an algorithm's name nor a function.

    Raises:
        ValueError, TypeError: `sort` is neither; the message says what is accepted.
    """
    if isinstance(sort, str):
        if sort not in SORTS:
            raise ValueError(f"{name}={quoted(sort)} is not known; known are {', '.join(SORTS)}, or give a function")
    elif not callable(sort):
        raise TypeError(f"{name} is a name or a function (Graph) -> Sequence[int], not {quoted(sort)}")


def check_compile_options(given: Iterable[str]) -> None:
    """Refuse a compile option that is meant for this package but that Thunder would ignore.

    Raises:
        ValueError: its name is almost that of our option, or contains the package's name.
    """
    for name in given:
        ours = name.startswith("mem_efficient") or get_close_matches(name, [SORT_OPTION], cutoff=0.8)
        if ours and name != SORT_OPTION:
            raise ValueError(
                f"thunder.jit has no compile option {quoted(name)}: write {SORT_OPTION}= for the order, "
                "and whatever else MemEfficient does in MemEfficient(...)"
            )


def composed(options: PlanningOptions, data: Any, trace: TraceCtx) -> PlanningOptions:
    """The options that this compilation supports, and the reasons for those that it does not.

    Args:
        options: the options of `MemEfficient`.
        data: Thunder's compile data.
        trace: the computation.

    Raises:
        ValueError, TypeError: the compile option `mem_efficient_sort` is misspelt, unknown, or contradicts ``sort=``.
    """
    check_compile_options(data.compile_options)
    options = replace(options, sort=_asked_sort(options.sort))
    refused = []
    if not data.autocast_stack.is_empty() and not (
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    ):
        warnings.warn(LEFT_AUTOCAST, stacklevel=3)
    if getattr(data, "use_fsdp", False) and get_skip_data_parallel_grad_sync():
        warnings.warn(UNSYNCED_SHARDS, stacklevel=3)
    if any(isinstance(t, CUDAGraphTransform) for t in data.transforms):
        if not any(isinstance(a, TensorProxy) and a.device.type == "cuda" for a in trace.args):
            warnings.warn(NO_CUDA, stacklevel=3)
        options = replace(options, redraw=False)
        if options.reuse:
            # Recording a graph runs it several times on the memory of the saved values.
            options = replace(options, reuse=False)
            refused.append(Refusal("results over values that die", "CUDA graphs are recorded on values that must stay"))
    if data.cache_option is CACHE_OPTIONS.SYMBOLIC_VALUES and (sizes := _symbolic_sizes(trace)):
        kept = "" if options.budget is None else "; the budget is kept at these, not at larger ones"
        why = f"the plan is for the sizes of the example ({sizes}) and runs at all{kept}"
        refused.append(Refusal("symbolic sizes", why))
    return replace(options, refused=(*options.refused, *refused))


def accepts_missing_tangents(transforms: Sequence[Any]) -> bool:
    """Whether a backward may receive None: a recorded CUDA graph reads the same tensors each time."""
    return not any(isinstance(t, CUDAGraphTransform) for t in transforms)


def _asked_sort(own: str | SortFunction) -> str | SortFunction:
    asked = get_compile_option(SORT_OPTION, _SORT_HELP)
    if asked is None:
        return own
    check_sort(asked, SORT_OPTION)
    if own not in ("auto", asked):
        raise ValueError(f"MemEfficient(sort={own!r}) and {SORT_OPTION}={asked!r} both name an order: give one of them")
    return asked


def _symbolic_sizes(trace: TraceCtx) -> str:
    sizes = (n for a in trace.args if isinstance(a, TensorProxy) for n in a._shape)
    symbols = {n.name: n.value for n in sizes if isinstance(n, IntegerProxy)}
    return ", ".join(f"{name}={value}" for name, value in symbols.items())


def rewriting_after(transform: Transform, transforms: Sequence[Any]) -> str:
    """The name of the first later transform that may rewrite the computation; "" without one.

    Thunder's distributed transforms do not count: they replace parameters wherever these are read.
    """
    for other in behind(transform, transforms):
        kind = type(other)
        if getattr(kind, "transform_traces_pre_prologue", None) is Transform.transform_traces_pre_prologue:
            continue
        if not kind.__module__.startswith("thunder.distributed.") and kind.__name__ not in _BLIND_TO_PRODUCTS:
            return kind.__name__
    return ""


def behind(transform: Transform, transforms: Sequence[Any]) -> tuple[Transform, ...]:
    """The transforms of other packages behind the last occurrence of `transform`."""
    places = [i for i, other in enumerate(transforms) if other is transform]
    others = transforms[places[-1] + 1 :] if places else ()
    return tuple(other for other in others if not type(other).__module__.startswith("thunder_mem."))


def with_whole_heads(trace: TraceCtx, mine: str, other: str) -> tuple[TraceCtx, str]:
    """Leave the trace's loss heads whole because transform `other` stands behind `mine`; also return that reason.

    Raises:
        ChunkingError: one of the heads is marked by ``with chunked():``.
    """
    reason = _hidden_from(other, mine, "a chunk loop")
    trace, marks = strip_marks(trace)
    for mark in marks:
        at = f" at {mark.source}" if mark.source else ""
        raise ChunkingError(f"a head marked by thunder_mem.chunked(){at} is not chunked: {reason}")
    return trace, reason


def with_whole_stretches(trace: TraceCtx, mine: str, other: str) -> TraceCtx:
    """Leave all stretches whole: tiles are switched off, or transform `other` stands behind `mine`.

    Raises:
        TilingError: one of the stretches is marked by ``with tiled():``.
    """
    trace, marks = strip_tile_marks(trace)
    for mark in marks:
        reason = _hidden_from(other, mine, "a tile") if other else f"tile=False in {mine}"
        at = f" at {mark.source}" if mark.source else ""
        raise TilingError(f"a stretch marked by thunder_mem.tiled(){at} stays whole: {reason}")
    return trace


def _hidden_from(other: str, mine: str, place: str) -> str:
    return (
        f"{other} stands behind {mine} in transforms= and would not see the products in {place}: put {mine} behind it"
    )
