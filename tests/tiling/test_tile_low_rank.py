"""Stretches with LoRA: the factors of low rank run inside, so that norms and wide values exist for a tile alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tiling.test_tile_dropout import loops
from tests.tiling.test_tiles import compiled, errors, gradients, made, tiles_of
from thunder_mem import Tiles


class LoRA(nn.Module):
    """A frozen linear layer and a product of two factors beside it, as litgpt and PEFT have it."""

    def __init__(self, width, out, rank):
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, width) / 8), nn.Parameter(torch.randn(out, rank) / 8)

    def forward(self, x):
        return self.linear(x) + x @ self.a.t() @ self.b.t() * 0.5


class Block(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(32), LoRA(32, 128, rank)
        self.up, self.down = LoRA(32, 128, rank), LoRA(128, 32, rank)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Blocks(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rank) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 4])
def test_factors_and_norms_are_inside(rank):
    module, x = made(Blocks(rank), (2, 64, 32))
    double = copy.deepcopy(module).double()
    exact = gradients(double, double, x.double())
    eager = errors(gradients(module, module, x), exact)
    jitted = compiled(module, Tiles(rows=20))
    ours = errors(gradients(jitted, module, x), exact)
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine <= 2 * theirs + torch.finfo(x.dtype).eps
    assert [d.how.split(",")[0] for d in tiles_of(jitted)] == [
        f"linear with t_blocks_{n}_gate_linear_weight and 8 more products in 7 tiles of 20 rows" for n in range(2)
    ]
    # Between blocks only the residual stream exists for all tokens.
    whole = {tuple(s.shape) for plan in loops(jitted) for s in (*plan.inputs, *plan.outputs) if s.sharding.split}
    assert whole == {(2, 64, 32)}


@pytest.mark.slow
def test_a_projection_of_full_rank_stays_outside():
    """Repeating it would cost time."""

    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(32, 32), Block(4)

        def forward(self, x):
            return self.block(self.first(x)).square().mean()

    module, x = made(Projected(), (2, 64, 32))
    jitted = compiled(module, Tiles(rows=20))
    gradients(jitted, module, x)
    (found,) = tiles_of(jitted)
    assert "8 more products" in found.how
