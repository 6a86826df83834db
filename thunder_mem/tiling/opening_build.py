"""From the operations above a head's products to the opening of its loop: its rows, its compiled blocks, its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from thunder_mem.chunk_loop.body import BodiesByRows, Body
from thunder_mem.chunk_loop.plan import LoopPlan, Opening, Spec
from thunder_mem.chunk_loop.price import opening_calls
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.loop_body.region import Region
from thunder_mem.tiling.build import Blocks, spec_of

__all__ = ["with_opening", "with_smaller_opening"]

_GPU_ROWS = 512
"""Enough for the kernels of a GPU between products; its temporaries are a fraction of a chunk's rows."""


def with_opening(loop: ChunkLoop, region: Region, executors: Sequence[Any]) -> ChunkLoop:
    """The loop of a head with what makes the rows of its products.

    Args:
        loop: without its opening; its plan leaves the rows open.
        region: of the opening, which reads inputs of the loop.
        executors: of its blocks.

    Raises:
        Refused: a block cannot be built.
    """
    plan = loop.plan
    index = {(spec.name, spec.sharding): i for i, spec in enumerate(plan.inputs)}
    sides = tuple(index[value.key] for value in region.inputs)
    gpu = plan.device.startswith("cuda")
    blocks = Blocks(region, region.inputs, executors)
    wanted = [i in plan.grads for i in sides]
    if gpu:
        rows = _GPU_ROWS if plan.block_rows % _GPU_ROWS == 0 else plan.block_rows
    else:
        rows = _cpu_rows(plan, blocks([plan.step_rows], wanted, False)[plan.step_rows])
    sizes = block_sizes(plan.n, plan.chunk_rows, rows)
    forward = BodiesByRows(blocks(sizes, [False] * len(sides), True))
    backward = BodiesByRows(blocks(sizes, wanted, False))
    opening = _opening(plan, spec_of(region.outputs[0]), sides, rows, forward, backward)
    return ChunkLoop(replace(plan, opening=opening), loop.forward, loop.backward, forward, backward)


def with_smaller_opening(loop: ChunkLoop, rows: int) -> ChunkLoop:
    """The loop on a GPU whose opening sees fewer rows at once; its blocks are compiled anew.

    Args:
        loop: with an opening.
        rows: of a block of the opening, for any chunks of whole blocks.
    """
    plan, opening = loop.plan, loop.plan.opening
    assert opening is not None
    sizes = block_sizes(plan.n, rows, rows)
    forward, backward = (bodies[opening.block_rows].in_sizes(sizes) for bodies in (loop.opening, loop.closing))
    new = _opening(plan, opening.out, opening.sides, rows, forward, backward)
    return ChunkLoop(replace(plan, opening=new), loop.forward, loop.backward, forward, backward)


def _opening(
    plan: LoopPlan,
    out: Spec,
    sides: tuple[int, ...],
    rows: int,
    forward: Mapping[int, Body],
    backward: Mapping[int, Body],
) -> Opening:
    gpu = plan.device.startswith("cuda")
    return Opening(
        out=out,
        sides=sides,
        block_rows=rows,
        forward_block_bytes=max(b.peak_bytes for b in forward.values()),
        backward_block_bytes=max(b.peak_bytes for b in backward.values()),
        forward_block_calls=opening_calls(plan, sides, forward[rows]) if gpu else 0,
        backward_block_calls=opening_calls(plan, sides, backward[rows]) if gpu else 0,
        forward_row_s=_row_seconds(forward),
        backward_row_s=_row_seconds(backward),
    )


def _cpu_rows(plan: LoopPlan, probe: Body) -> int:
    """A whole number of steps by which a chunk grows, while temporaries are no larger than those of the head's blocks.

    Args:
        plan: of the loop.
        probe: a block of the opening, with gradients.
    """
    step = plan.step_rows
    row_bytes = max(1, probe.peak_bytes // probe.rows)
    most = max(step, min(plan.chunk_rows, plan.backward_block_bytes // row_bytes))
    parts = range(-(-plan.chunk_rows // most), plan.chunk_rows // step + 1)
    even = (plan.chunk_rows // part for part in parts if plan.chunk_rows % (part * step) == 0)
    return next(even, step)


def _row_seconds(bodies: Mapping[int, Body]) -> float:
    """Seconds of the device's kernels for a row."""
    body = bodies[max(bodies)]
    return body.kernels_s / body.rows
