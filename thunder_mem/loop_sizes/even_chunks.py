"""Equal chunks in as few blocks as their memory allows, for the loss heads of a final trace on a CPU.

While a plan is made, chunks grow and shrink, and the blocks that exist need not divide them. Once their number is
known, chunks get equal rows, and the largest blocks whose temporaries are allowed and do not raise the peak. So a loop
takes fewer calls of Python: in the scaled longchat each of 3 chunks is one block, where 4 chunks had 11. A GPU's blocks
are as large as its host needs already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.plan import LoopPlan, Opening
from thunder_mem.chunk_loop.price import row_scratch_bytes
from thunder_mem.chunk_loop.row_blocks import block_count
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.loop_sizes.built_blocks import with_blocks_built
from thunder_mem.loop_sizes.chunk_resizing import ResizedLoops, UsesOfLoop, resized, uses_of_loops
from thunder_mem.loop_sizes.rows_per_chunk import allowed_block_rows, even_part, even_rows
from thunder_mem.trace.reading import TraceGraph

__all__ = ["with_even_chunks"]

_CACHED_BYTES = 6 << 20
"""Logits of a block that its kernels find in a cache, one after the other. Measured: with blocks of 33 MB falcon's head
takes 1.02 to 1.04 times as long as with 4 MB, and other heads with 6 MB no longer than with 3."""


def with_even_chunks(trace: TraceCtx, source: TraceGraph) -> ResizedLoops | None:
    """Give the loss heads on a CPU whose rows the user did not set equal chunks and large blocks.

    All blocks that run are built afterwards.

    Args:
        trace: a joint or plain trace in its final order, with fitted loops.
        source: its reading.

    Returns:
        None when no loop changes.
    """
    uses, peak_bytes = uses_of_loops(source)
    swap = {id(use.loop): new for use in uses if (new := _even(use, peak_bytes)) is not use.loop}
    return resized(trace, source, swap) if swap else None


def _even(use: UsesOfLoop, peak_bytes: int) -> ChunkLoop:
    """The loop with equal chunks in the fewest blocks that do not raise the peak, all of which are built."""
    loop, old = use.loop, use.loop.plan
    if old.is_stretch or not old.device.startswith("cpu"):
        return loop
    plans = [old, *_in_larger_blocks(loop)] if old.sized != "asked" else [old]
    for plan in sorted(plans, key=_cost):
        if plan is old:  # the blocks that are still to be built are smaller than those that its bytes count
            break
        if use.fits(plan, peak_bytes):
            built = with_blocks_built(loop.with_plan(plan))
            if use.fits(built.plan, peak_bytes):
                return built
    built = with_blocks_built(loop)
    return loop if built.plan == old else built


def _in_larger_blocks(loop: ChunkLoop) -> Iterator[LoopPlan]:
    """The loop's plans with equal chunks in one block or a few, whose bytes are estimated."""
    rows = even_rows(loop.plan.n, loop.plan.chunk_rows)
    most_rows = [-(-rows // parts) for parts in (1, 2, 4, 8)]
    openings = [_opening_in_blocks(loop, rows, most) for most in most_rows] if loop.plan.opening else [None]
    return (_in_blocks(loop, rows, most, opening) for most in most_rows for opening in openings)


def _in_blocks(loop: ChunkLoop, rows: int, most: int, opening: Opening | None) -> LoopPlan:
    """The loop's plan with chunks of some rows in blocks of at most `most`, which hold what they may."""
    plan = loop.plan
    bodies = [bodies[plan.block_rows] for bodies in (loop.forward, loop.backward) if bodies]
    scratch = [row_scratch_bytes(plan, body) for body in bodies]
    block_rows = _block_rows(plan, rows, most, max(scratch), plan.block_rows)
    more = block_rows - plan.block_rows
    return replace(
        plan,
        chunk_rows=rows,
        block_rows=block_rows,
        opening=opening,
        forward_block_bytes=plan.forward_block_bytes + scratch[0] * more,
        backward_block_bytes=plan.backward_block_bytes + scratch[-1] * more,
    )


def _opening_in_blocks(loop: ChunkLoop, rows: int, most: int) -> Opening:
    """The same for the loop's opening."""
    opening = loop.plan.opening
    assert opening is not None
    bodies = [bodies[opening.block_rows] for bodies in (loop.opening, loop.closing)]
    row_bytes = [-(-body.peak_bytes // body.rows) for body in bodies]
    block_rows = _block_rows(loop.plan, rows, most, max(row_bytes), opening.block_rows)
    held = [each * block_rows for each in row_bytes]
    return replace(opening, block_rows=block_rows, forward_block_bytes=held[0], backward_block_bytes=held[1])


def _block_rows(plan: LoopPlan, chunk_rows: int, most: int, row_bytes: int, before: int) -> int:
    """Rows of a block, at most `most`, whose temporaries are allowed and whose logits may stay in a cache.

    No fewer than before, which products may need.
    """
    allowed = allowed_block_rows(plan.device, plan.n, chunk_rows, plan.row_bytes, row_bytes, asked=False)
    enough = min(allowed, _CACHED_BYTES // plan.row_bytes)
    rows = even_part(chunk_rows, min(most, max(before, enough)))
    return max(rows, min(before, chunk_rows))


def _cost(plan: LoopPlan) -> tuple[int, int]:
    """The calls of blocks in all chunks, of which an opening's are called twice, and the loop's bytes."""
    calls = block_count(plan.n, plan.chunk_rows, plan.block_rows)
    if plan.opening:
        calls += 2 * block_count(plan.n, plan.chunk_rows, plan.opening.block_rows)
    return calls, max(plan.forward_scratch_bytes, plan.backward_scratch_bytes)
