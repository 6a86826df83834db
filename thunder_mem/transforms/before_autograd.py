"""What `MemEfficient` does to a program before autograd, each step with its record, or none after a failure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.plan import about_chunks
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.frontend.checkpoint_tags import take_over_checkpoints
from thunder_mem.frontend.scalar_broadcast import expand_scalars
from thunder_mem.functionalization.decided_views import with_decided_views
from thunder_mem.functionalization.detached_results import with_detached_results, with_same_results
from thunder_mem.functionalization.functionalize import without_writes
from thunder_mem.functionalization.shared_arguments import with_arguments_apart
from thunder_mem.functionalization.written_arguments import with_histories
from thunder_mem.kernels.registered import with_statistics_apart
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_sizes.rows_per_chunk import lean_rows, leanest_rows
from thunder_mem.loop_sizes.tile_choice import ALL_STRETCHES, TileChoice
from thunder_mem.memory.plan import Refusal
from thunder_mem.partition.budget import parse_budget
from thunder_mem.tiling.find import ChunkingError, chunk_trace
from thunder_mem.tiling.heads import with_head_groups
from thunder_mem.tiling.tiles import Tiles, TilingError, tile_trace
from thunder_mem.torch_functions.mended_functions import with_mended_functions
from thunder_mem.trace.origins import name_origins
from thunder_mem.trace.verification import verify_final
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead
from thunder_mem.transforms.failures import left

__all__ = ["chunked", "detached", "prepared", "tiled", "with_written_arguments"]


def with_written_arguments(
    traces: tuple[TraceCtx, TraceCtx, TraceCtx | None], compile_options: dict[str, Any], options: PlanningOptions
) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
    """The program's three traces, in which autograd sees writes to arguments; unchanged after a failure.

    Args:
        traces: prologue, computation and epilogue, as Thunder passes them to a transform.
        compile_options: Thunder's, see `with_histories`.
        options: of planning.
    """
    try:
        prologue, computation, epilogue = traces
        prologue, computation = with_decided_views(*with_arguments_apart(prologue, computation))
        return with_histories(prologue, computation, epilogue, compile_options)
    except Exception as error:
        left("writes to arguments as Thunder has them", error, strict=options.strict)
        return traces


def prepared(
    trace: TraceCtx,
    prologue_trace: TraceCtx,
    options: PlanningOptions,
    *,
    named: bool,
    kernels: bool = False,
    fused: bool = False,
) -> TraceCtx:
    """The trace in functional form, for planning; unchanged after a failure.

    Args:
        trace, prologue_trace: the program's, before autograd.
        options: of planning.
        named: whether values get the names of the modules and lines that they come from.
        fused: whether an executor fuses generally.
        kernels: whether batch norms are in the form that `mem_kernels` takes.
    """
    try:
        opened = with_mended_functions(with_same_results(trace), fused=fused)
        opened = name_origins(opened, prologue_trace) if named else opened
        ready = take_over_checkpoints(expand_scalars(without_writes(opened)))
        ready = with_statistics_apart(ready) if kernels else ready
        verify_final(ready)
        return ready
    except Exception as error:
        left("writes and checkpoints as Thunder has them", error, strict=options.strict)
        return trace


def chunked(
    trace: TraceCtx, asked: ChunkLossHead, options: PlanningOptions, executors: tuple
) -> tuple[TraceCtx, PlanningOptions]:
    """The trace with chunked loss heads (unchanged after a failure), and the options with a record of it."""
    try:
        trace, record = chunk_trace(
            trace,
            chunks=asked.chunks,
            rows=asked.rows,
            accumulate=asked.accumulate,
            executors_list=executors,
            choose_rows=lean_rows if options.budget is None else leanest_rows,
            # A share of a device's memory is larger than any head that is left alone for its size.
            budget_bytes=None if options.budget is None else parse_budget(options.budget, 1 << 40),
            verify=options.verify is not False,
        )
    except ChunkingError:  # the user marked this head by `with chunked():`
        raise
    except Exception as error:
        cause = left("the loss head as it is", error, strict=options.strict)
        return trace, replace(options, refused=(Refusal("loss head", cause),))
    refused = tuple(Refusal(r.op, f"{r.reason} ({r.source})") for r in record.refusals)
    return trace, replace(options, refused=refused, decisions=about_chunks(record.loops))


def tiled(
    trace: TraceCtx,
    tiles: Tiles,
    options: PlanningOptions,
    executors: tuple,
    choice: TileChoice = ALL_STRETCHES,
    equal: EqualBlocks | None = None,
) -> tuple[TraceCtx, PlanningOptions]:
    """The trace with stretches in tiles (unchanged after a failure), and the options with a record of it."""
    verify = options.verify is not False
    choice = choice if options.budget is None else replace(choice, fewest_rows=True)
    cut = partial(tile_trace, tiles=tiles, executors_list=executors, verify=verify, choice=choice, equal=equal)
    try:
        in_groups, heads = with_head_groups(trace, executors)
        new, record = cut(in_groups)
        if not record.loops and heads:
            heads = ()
            new, record = cut(trace)
    except TilingError:  # the user marked this stretch by `with tiled():`
        raise
    except Exception as error:
        cause = left("stretches whole", error, strict=options.strict)
        return trace, replace(options, refused=(*options.refused, Refusal("tiles", cause)))
    refused = tuple(Refusal(r.op, f"{r.reason} ({r.source})") for r in record.refusals) if tiles.rows != "auto" else ()
    decisions = (*options.decisions, *about_chunks(record.loops), *heads)
    return new, replace(options, refused=(*options.refused, *refused), decisions=decisions)


def detached(epilogue: TraceCtx, trace: TraceCtx, options: PlanningOptions) -> TraceCtx:
    """The epilogue that detaches what eager detaches; unchanged after a failure.

    Args:
        epilogue: the program's.
        trace: before it is `prepared`.
        options: of planning.
    """
    try:
        return with_detached_results(epilogue, trace)
    except Exception as error:
        left("all results with a history, as Thunder has them", error, strict=options.strict)
        return epilogue
