"""Stretches with random numbers: any tiling has the numbers of the whole program, and their mask crosses the border."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tiling.test_tiles import made
from thunder_mem import MemEfficient, Tiles, last_plan, measure_peak, predict
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of


class Block(nn.Module):
    """An MLP whose wide values are `drop`ped, and whose result is, too."""

    def __init__(self, drop, checkpointed):
        super().__init__()
        self.drop, self.checkpointed = drop, checkpointed
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def block(self, x):
        return x + F.dropout(self.down(self.drop(F.gelu(self.up(self.norm(x))))), 0.2)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return x.square().mean()


def dropped(t):
    return F.dropout(t, 0.3)


def noisy(t):
    return t * torch.rand_like(t)


def kept(t):
    return torch.where(torch.rand_like(t) < 0.5, t, t.sin())


def compiled(module, tile):
    return thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True, verify=True, tile=tile)])


def step(jitted, module, x):
    """Loss and gradients, and the number that is drawn next."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    loss = jitted(x)
    loss.backward()
    after = torch.rand(())
    grads = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return loss, after, grads


def loops(jitted):
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    return [loop_of(b).plan for trace in traces for b in trace.bound_symbols if is_chunk_loop(b)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("drop", [dropped, noisy, kept])
@pytest.mark.parametrize("rows", [7, 50])
def test_the_numbers_are_those_of_the_whole_program(drop, checkpointed, rows):
    module, x = made(Block(drop, checkpointed), (2, 25, 16), torch.float64)
    loss, after, grads = step(compiled(module, False), module, x)
    jitted = compiled(module, Tiles(rows=rows))
    for _ in range(2):
        found = step(jitted, module, x)
        assert torch.equal(found[1], after)
        torch.testing.assert_close(found[0], loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found[2], grads, rtol=1e-9, atol=1e-12)
    assert sum(d.what == "tiles" for d in last_plan(jitted).decisions) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_crosses_the_border_with_a_byte_a_number(dtype):
    module, x = made(Block(dropped, True), (2, 25, 16), dtype)
    jitted = compiled(module, Tiles(rows=7))
    step(jitted, module, x)
    wide = [
        (s.dtype, s.shape) for plan in loops(jitted) for s in plan.inputs if s.shape[-1:] == (64,) and len(s.shape) > 2
    ]
    assert wide and set(wide) == {(torch.bool, (2, 25, 64))}


@pytest.mark.slow
def test_the_peak_falls_and_is_predicted_to_the_byte():
    module, x = made(Block(dropped, True), (4, 256, 16))
    peaks = []
    for tile in (False, Tiles(rows=64)):
        jitted = compiled(module, tile)

        def run(jitted=jitted):
            jitted(x).backward()
            module.zero_grad(set_to_none=True)

        run()
        peaks.append(measure_peak(run))
        assert 0 <= peaks[-1] - predict(jitted, x).measured_bytes <= 8  # the loss
    assert peaks[1] < 0.7 * peaks[0]
