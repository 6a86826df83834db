"""From a stretch to a loop of tiles: which gradients it gives, how they add up, with which compiled bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_body.leaves import Leaf, size_bytes
from thunder_mem.loop_body.region import Region
from thunder_mem.loop_sizes.tile_price import priced
from thunder_mem.tiling.build import Blocks, differentiable_of, head_label, spec_of, sum_dtype

__all__ = ["build_tiles", "tile_gain_bytes"]


def build_tiles(
    region: Region,
    rows: int,
    sized: str,
    accumulate: str | None,
    executors: Sequence[Any],
    name: str,
    equal: EqualBlocks | None = None,
) -> ChunkLoop:
    """Plan the loop of a stretch and compile its tiles.

    Args:
        region: a stretch, without amplifiers.
        rows: of a tile.
        sized: their origin, see `LoopPlan.sized`.
        accumulate: dtype in which gradients of whole 16-bit inputs add up: "float32" or "input"; None is float32
            that may still be narrowed.
        executors: the executors of the tiles.
        name: unique in the trace.
        equal: the tiles built before; equal ones are used again.

    Raises:
        Refused: a tile cannot be built.
    """
    inputs = region.inputs
    specs, outputs = tuple(map(spec_of, inputs)), tuple(map(spec_of, region.outputs))
    differentiable = differentiable_of(region)
    needs_grad = region.program.needs_grad
    grads = tuple(i for i, v in enumerate(inputs) if differentiable and v.proxy.name in needs_grad)
    rows = min(rows, region.n)
    products = [m for m in region.members if m.is_product]
    blocks = Blocks(region, inputs, executors, equal)
    sizes = block_sizes(region.n, rows, rows)
    forward = blocks(sizes, [False] * len(inputs), True)
    backward = blocks(sizes, [i in grads for i in range(len(inputs))], False) if grads else {}
    plan = LoopPlan(
        name=name,
        source=products[0].source,
        op=_label(products),
        n=region.n,
        chunk_rows=rows,
        block_rows=rows,
        sized=sized,
        mode="recompute-in-backward" if grads else "forward",
        why="the backward computes a tile's values again" if grads else "no gradient is asked for",
        inputs=specs,
        outputs=outputs,
        sides=tuple(range(len(inputs))),
        grads=grads,
        grad_dtypes=tuple(sum_dtype(specs[i], accumulate, rows < region.n) for i in grads),
        sums_asked=accumulate is not None,
        differentiable=differentiable,
        forward_block_bytes=max(b.peak_bytes for b in forward.values()),
        backward_block_bytes=max((b.peak_bytes for b in backward.values()), default=0),
        backward_adding_bytes=max((b.adding_bytes for b in backward.values()), default=0),
        wide_row_bytes=sum(size_bytes(m.outputs[0]) for m in products) // region.n,
    )
    return ChunkLoop(priced(plan, forward, backward), forward, backward)


def tile_gain_bytes(plan: LoopPlan) -> int:
    """The bytes of the products' results that never exist whole, less what the loop holds beside a tile."""
    sums_bytes = plan.wider_sums_bytes if plan.grads else 0
    return plan.n * plan.wide_row_bytes - max(plan.forward_scratch_bytes, plan.backward_scratch_bytes + sums_bytes)


def _label(products: Sequence[Leaf]) -> str:
    others = len(products) - 1
    rest = f" and {others} more product{'s' * (others > 1)}" if others else ""
    return head_label(products[0]) + rest
