"""A compiled block builds the same block for other rows, which gives the same gradients."""

from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import MemEfficient, Tiles
from thunder_mem.chunk_loop.gradient_sums import finish
from thunder_mem.chunk_loop.run import ChunkLoop, run
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_body.sums_in_block import adds_to_sum

ROWS, WIDTH, WIDE = 12, 8, 32


def gated(x, gate, up, down):
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("rows", [4, 6])
def test_a_stretch_in_blocks_of_other_rows_has_the_same_gradients(rows):
    torch.manual_seed(0)
    shapes = (ROWS, WIDTH), (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    tangent = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    tile = Tiles(rows=3)
    jitted = thunder.jit(gated, executors=[], transforms=[MemEfficient(strict=True, tile=tile)])
    jitted(*args).backward(tangent)
    (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    bodies = {rows: loop.backward[3].resized(rows)}
    assert sum(map(adds_to_sum, bodies[rows].trace.bound_symbols)) == 3
    other = ChunkLoop(replace(loop.plan, chunk_rows=rows, block_rows=rows), {}, bodies)
    by_name = dict(zip([p.name for p in thunder.last_traces(jitted)[0].args], args, strict=True))
    inputs = [by_name[spec.name].detach() for spec in other.plan.inputs]
    _, parts = run(other, inputs, [tangent], False)
    found = finish(other.plan, None, parts)
    expected = torch.autograd.grad(gated(*args), args, tangent)
    order = [list(by_name).index(other.plan.inputs[i].name) for i in other.plan.grads]
    torch.testing.assert_close(found, [expected[i] for i in order])
