"""What the search for loops knows of a program's values."""

import thunder
import torch
import torch.nn.functional as F
from torch import nn

from thunder_mem import MemEfficient, Tiles
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of


class Columns(nn.Module):
    """An MLP whose tokens are columns: the weights stand on the left."""

    def __init__(self, width, wide):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(s)) for s in ((wide, width), (width, wide)))

    def forward(self, x):
        return (self.down @ F.silu((self.up * 2.0) @ x)).square().mean()


def test_tiles_are_of_tokens_and_not_of_a_parameters_rows():
    """A cast or a multiple of a parameter is no more a value of tokens than the parameter."""
    module, x = Columns(8, 64), torch.randn(8, 23, requires_grad=True)
    jitted = thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True, verify=True, tile=Tiles(rows=5))])
    found = torch.autograd.grad(jitted(x), (x, *module.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(module(x), (x, *module.parameters())))
    (loop,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    assert loop.n == 23
