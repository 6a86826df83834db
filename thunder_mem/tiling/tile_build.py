"""From a stretch to a loop of tiles: which gradients it gives, how they add up, with which compiled bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.tiling.build import Blocks, differentiable_of, head_label, spec_of, sum_dtype
from thunder_mem.tiling.region import Region

__all__ = ["build_tiles"]


def build_tiles(region: Region, rows: int, accumulate: str | None, executors: Sequence[Any], name: str) -> ChunkLoop:
    """Plan the loop of a stretch and compile its tiles.

    Args:
        region: a stretch, without amplifiers.
        rows: of a tile.
        accumulate: dtype in which gradients of whole 16-bit inputs add up: "float32" or "input"; None is float32
            that may still be narrowed.
        executors: who executes the tiles.
        name: unique in the trace.

    Raises:
        Refused: a tile cannot be built.
    """
    inputs = region.inputs
    specs, outputs = tuple(map(spec_of, inputs)), tuple(map(spec_of, region.outputs))
    differentiable = differentiable_of(region)
    needs_grad = region.program.needs_grad
    grads = tuple(i for i, v in enumerate(inputs) if differentiable and v.proxy.name in needs_grad)
    rows = min(rows, region.n)
    wanted = [i in grads for i in range(len(inputs))]
    blocks = Blocks(region, inputs, executors)
    sizes = block_sizes(region.n, rows, rows)
    forward = blocks(sizes, [False] * len(inputs), True)
    backward = blocks(sizes, wanted, False) if grads else {}
    first = region.members[0]
    plan = LoopPlan(
        name=name,
        source=first.source,
        op=head_label(next(m for m in region.members if m.is_product)),
        n=region.n,
        chunk_rows=rows,
        block_rows=rows,
        sized="asked",
        mode="recompute-in-backward" if grads else "forward",
        why="a tile's values are computed anew in the backward" if grads else "no gradient is asked for",
        inputs=specs,
        outputs=outputs,
        gemms=(),
        sides=tuple(range(len(inputs))),
        grads=grads,
        grad_dtypes=tuple(sum_dtype(specs[i], accumulate, rows < region.n) for i in grads),
        sums_asked=accumulate is not None,
        over=(),
        differentiable=differentiable,
        forward_block_bytes=max(b.peak_bytes for b in forward.values()),
        backward_block_bytes=max((b.peak_bytes for b in backward.values()), default=0),
    )
    return ChunkLoop(plan, forward, backward)
