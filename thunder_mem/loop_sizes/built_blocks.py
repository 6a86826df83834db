"""The blocks of a loop in the sizes that its plan has, which may be others than those that it was built with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from thunder_mem.chunk_loop.body import BodiesByRows, Body
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop

__all__ = ["with_blocks_built"]


def with_blocks_built(loop: ChunkLoop) -> ChunkLoop:
    """The loop of a CPU with all blocks that its plan needs and no others; their bytes are those of its plan."""
    plan, opening = loop.plan, loop.plan.opening
    sizes = block_sizes(plan.n, plan.chunk_rows, plan.block_rows)
    forward, backward = _of_sizes(loop.forward, sizes), _of_sizes(loop.backward, sizes)
    opens, closes = loop.opening, loop.closing
    if opening:
        sizes = block_sizes(plan.n, plan.chunk_rows, opening.block_rows)
        opens, closes = _of_sizes(opens, sizes), _of_sizes(closes, sizes)
        opening = replace(opening, forward_block_bytes=_most_bytes(opens), backward_block_bytes=_most_bytes(closes))
    plan = replace(
        plan,
        opening=opening,
        forward_block_bytes=_most_bytes(forward or backward),
        backward_block_bytes=_most_bytes(backward),
    )
    return ChunkLoop(plan, forward, backward, opens, closes)


def _of_sizes(bodies: Mapping[int, Body], sizes: Collection[int]) -> BodiesByRows:
    return BodiesByRows({rows: bodies[rows] for rows in sizes} if bodies else {})


def _most_bytes(bodies: Mapping[int, Body]) -> int:
    return max((body.peak_bytes for body in bodies.values()), default=0)
