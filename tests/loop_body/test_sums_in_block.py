"""Products that a block adds to sums of gradients itself, as soon as their operands exist."""

import thunder
import torch
import torch.nn.functional as F

from thunder_mem import MemEfficient, Tiles
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_body.sums_in_block import adds_to_sum

ROWS, WIDTH, WIDE = 12, 8, 32


def gated(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down).square().sum()


def inputs(moving):
    torch.manual_seed(0)
    shapes = (ROWS, WIDTH), (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    return [torch.randn(s, dtype=torch.float64, requires_grad=r) for s, r in zip(shapes, moving, strict=True)]


def in_tiles(args):
    """The compiled program after its backward, and the gradients."""
    tile = Tiles(rows=5)
    jitted = thunder.jit(gated, executors=[], transforms=[MemEfficient(strict=True, verify=True, tile=tile)])
    jitted(*args).backward()
    return jitted, [a.grad for a in args if a.requires_grad]


def eager(args):
    return torch.autograd.grad(gated(*args), [a for a in args if a.requires_grad])


def test_a_product_is_added_before_later_gradients_exist():
    jitted, found = in_tiles(args := inputs([True] * 4))
    torch.testing.assert_close(found, list(eager(args)))
    (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    assert sorted(loop.backward[5].pairs) == [1, 2, 3]
    bsyms = [b for b in loop.backward[5].trace.bound_symbols if adds_to_sum(b) or "matmul" in b.sym.name]
    assert sum(map(adds_to_sum, bsyms)) == 3
    assert adds_to_sum(bsyms[1])  # that of the last weight, whose operand is wide, behind the gradient of its rows


def test_a_block_may_have_no_gradients_but_products():
    _, found = in_tiles(args := inputs([False, True, False, True]))
    torch.testing.assert_close(found, list(eager(args)))
