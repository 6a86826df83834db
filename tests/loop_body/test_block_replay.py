"""What a block of rows computes: the user's operations, in the largest form that executors know."""

import thunder
import torch
import torch.nn.functional as F

from thunder_mem import ChunkLossHead
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of


def block_of(fn, *args):
    """The names of a block's operations, in a program without gradients."""
    jitted = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(chunks=3)])
    torch.testing.assert_close(jitted(*args), fn(*args))
    (loop,) = (loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b))
    return [b.sym.name for b in loop.forward[max(loop.forward)].trace.bound_symbols]


def test_a_composite_stays_whole():
    """PyTorch's own softmax runs, which takes no memory for its steps."""
    names = block_of(lambda x, w: F.linear(x, w).softmax(-1).amax(), torch.randn(31, 4), torch.randn(40, 4))
    assert "softmax" in names and "exp" not in names
