"""Fewer rows for the loops at the peak of a program with stretches in tiles, and narrower sums where nothing else fits.

Tiles and chunks have the rows that keep a GPU's products efficient. With little more than half as many, a product takes
as long as the reading and writing of the sum that it is added to. For all loops fewer rows cost too much time, but
little for the one or two at the peak of a step. So these get fewer, while the program's time has room: about as few as
hide their sums, then the backward of a stretch half of all. Under a budget they get fewer until the program fits,
before anything is bought. If nothing fits, sums of gradients are narrowed too, one loop at the peak after another, for
narrower sums take more time. Rows grow again where the budget has room, a loss head's also between whole blocks. Blocks
with other rows are compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil, gcd

import torch
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.chunk_loop.price import with_block_calls
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, rebind
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.program import Planned
from thunder_mem.loop_sizes.chunk_narrowing import narrow_sums
from thunder_mem.loop_sizes.chunk_resizing import fit_loops, with_fitted_loops
from thunder_mem.loop_sizes.rows_per_chunk import floor_rows
from thunder_mem.loop_sizes.tile_price import tile_seconds
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.tiling.opening_build import with_smaller_opening
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["with_fewer_rows_at_peak", "with_rows_between_blocks"]

_PRODUCT_ROWS = 256
"""Chunks have a multiple of these rows, which are two tiles of a GPU's product."""


def with_fewer_rows_at_peak(
    planned: Planned,
    may: Callable[[Planned], bool] = lambda _: True,
    enough_bytes: int = 0,
    narrower_sums: bool = False,
) -> Planned:
    """The plan with fewer rows in the loops at its peak, as long as the peak falls.

    Args:
        planned: a plan that was carried out.
        may: whether such a plan may run.
        enough_bytes: the peak that is low enough.
        narrower_sums: whether loops that have few rows get narrower sums.
    """
    while planned.peak_bytes > enough_bytes:
        plans = (_carried_out(planned, trace, enough_bytes) for trace in _lighter(planned, narrower_sums))
        new = next((n for n in plans if n.peak_bytes < planned.peak_bytes and may(n)), None)
        if new is None:
            break
        planned = new
    return planned


def with_rows_between_blocks(planned: Planned) -> Planned:
    """The plan with more rows in its loss heads, where a budget has room for them but not for another whole block.

    Args:
        planned: a plan that was carried out and fits its budget.
    """
    trace = planned.lighter or planned.arranged
    if planned.plan.budget is None or trace is None:
        return planned
    budget_bytes = planned.plan.budget.budget_bytes
    heads = {id(loop_of(b)): b for b in trace.bound_symbols if is_chunk_loop(b) and not loop_of(b).plan.is_stretch}
    for head in heads.values():
        made = (_with_loop(planned.lighter or trace, head, old, new) for old, new in _between_blocks(planned, head))
        tried = (_carried_out(planned, more_rows, budget_bytes) for more_rows in made)
        faster = (new for new in tried if new.fits and new.final_seconds < planned.final_seconds)
        planned = next(faster, planned)
    return planned


def _carried_out(planned: Planned, trace: TraceCtx, enough_bytes: int) -> Planned:
    """The plan with another arranged trace, which has loops."""
    fitted = fit_loops(trace, enough_bytes)
    assert fitted is not None
    plan = with_fitted_loops(planned.plan, fitted)
    return replace(planned, plan=plan, lighter=trace, final=fitted.trace, fused=fitted.source)


def _lighter(planned: Planned, narrower_sums: bool) -> Iterator[TraceCtx]:
    """The arranged traces in which the loop at the peak has fewer rows, the fewest first, or else narrower sums."""
    trace = planned.lighter or planned.arranged
    if trace is None:
        return
    source = planned.final_source
    peak = source.bsyms[price_order(source.graph).peak_step]
    if not is_chunk_loop(peak) or not loop_of(peak).plan.device.startswith("cuda"):
        return
    mine = next(b for b in trace.bound_symbols if is_chunk_loop(b) and _made(b) == _made(peak))
    fewer = False
    for fewer_rows in _with_fewer_rows(trace, mine):
        fewer = True
        yield fewer_rows
    if narrower_sums and not fewer and (narrow := narrow_sums(trace, loop_of(mine))) is not None:
        yield narrow


def _with_fewer_rows(trace: TraceCtx, mine: BoundSymbol) -> Iterator[TraceCtx]:
    """The arranged traces in which one loop has fewer rows, the fewest first; none if it has few."""
    old = loop_of(mine)
    is_stretch = old.plan.is_stretch
    for new in [_tiles(mine)] if is_stretch else map(partial(_chunks, old), _fewer_chunk_rows(old.plan)):
        if new is not None:
            yield _with_loop(trace, mine, old, new)


def _with_loop(trace: TraceCtx, mine: BoundSymbol, old: ChunkLoop, new: ChunkLoop) -> TraceCtx:
    """The trace in which a stretch's bound symbol, or all of a loss head's, run another loop."""

    def swapped(bsym: BoundSymbol) -> BoundSymbol:
        own = bsym is mine if old.plan.is_stretch else is_chunk_loop(bsym) and loop_of(bsym) is old
        return rebind(bsym, new) if own else bsym

    return rebuilt(trace, map(swapped, trace.bound_symbols), "Other rows at the peak")


def _made(bsym: BoundSymbol) -> list[str]:
    return [p.name for p in bsym.flat_proxy_outs]


def _between_blocks(planned: Planned, head: BoundSymbol) -> Iterator[tuple[ChunkLoop, ChunkLoop]]:
    """A loss head's loop, and in its place one with more rows than now, the most first, if products want more."""
    assert planned.final is not None
    old = loop_of(head)
    final = next(loop_of(b).plan for b in planned.final.bound_symbols if is_chunk_loop(b) and _made(b) == _made(head))
    if final.sized == "asked" or not final.device.startswith("cuda"):
        return
    enough = min(final.n, floor_rows(final.device, final.gemms[0].out.dtype), final.chunk_rows + final.step_rows)
    for rows in range(enough // _PRODUCT_ROWS * _PRODUCT_ROWS, final.chunk_rows, -_PRODUCT_ROWS):
        if rows % final.step_rows and (new := _chunks(old, rows)) is not None:
            yield old, new


def _fewer_chunk_rows(plan: LoopPlan) -> range:
    """Fewer rows for a loss head's chunks: from the fewest whose products may hide the sums."""
    if plan.sized == "asked" or plan.chunks == 1:
        return range(0)
    return range(_rows_that_hide_sums(plan.device, plan.gemms[0].out.dtype), plan.chunk_rows, _PRODUCT_ROWS)


def _chunks(loop: ChunkLoop, rows: int) -> ChunkLoop | None:
    """A loss head's loop with some rows in its chunks; None if its blocks cannot have as many."""
    plan = loop.plan
    if plan.opening and rows % plan.opening.block_rows:
        loop = with_smaller_opening(loop, gcd(rows, plan.opening.block_rows))
    plan, body = replace(loop.plan, chunk_rows=rows, sized="timeline"), loop.backward.get(plan.block_rows)
    if rows % plan.block_rows == 0:
        return loop.with_plan(plan)
    if loop.forward or body is None:
        return None
    # Blocks of about the same size: larger ones would hold more beside the logits, and smaller ones take more calls.
    least = max(1, min(rows, plan.block_rows // 2))
    block_rows = next(n for n in range(least, rows + 1) if rows % n == 0)
    bodies = body.in_sizes(block_sizes(plan.n, plan.chunk_rows, block_rows))
    most_bytes = max(b.peak_bytes for b in bodies.values())
    plan = replace(plan, block_rows=block_rows, forward_block_bytes=most_bytes, backward_block_bytes=most_bytes)
    return ChunkLoop(with_block_calls(plan, {}, bodies), {}, bodies, loop.opening, loop.closing)


def _tiles(bsym: BoundSymbol) -> ChunkLoop | None:
    """The backward of a stretch in tiles of fewer rows; None if these would be less than half of enough."""
    loop = loop_of(bsym)
    plan, body = loop.plan, loop.backward.get(loop.plan.chunk_rows)
    if not bsym.sym.name.startswith("chunk_loop_backward") or body is None or plan.sized != "tile":
        return None
    dtype = plan.inputs[0].dtype
    fewer = (_rows_that_hide_sums(plan.device, dtype), floor_rows(plan.device, dtype) // 2)
    rows = next((rows for rows in fewer if rows < plan.chunk_rows), None)
    if rows is None:
        return None
    plan = replace(plan, chunk_rows=rows, block_rows=rows)
    bodies = body.in_sizes(block_sizes(plan.n, rows, rows))
    plan = replace(
        plan,
        why="the backward, which was at the peak, computes a tile's values again",
        backward_block_bytes=max(b.peak_bytes for b in bodies.values()),
        backward_adding_bytes=max(b.adding_bytes for b in bodies.values()),
        backward_tile_s=tile_seconds(plan, bodies[rows], device_model_of(torch.device(plan.device))),
    )
    return ChunkLoop(with_block_calls(plan, {}, bodies), {}, bodies)


def _rows_that_hide_sums(on: str, dtype: torch.dtype) -> int:
    """The fewest rows for which a product takes as long as its float32 sum: 8 bytes move for 2 operations a row."""
    device = device_model_of(torch.device(on))
    rows = 4 * device.matmul_flops(str(dtype).removeprefix("torch.")) / device.bandwidth_bytes_per_s
    return ceil(rows / _PRODUCT_ROWS) * _PRODUCT_ROWS
