"""Updates stand where gradients are complete, before any sort: that is where sorts and prices begin."""

import copy

import pytest
import thunder
import torch
from thunder.core.prims import PrimIDs
from torch import nn

from thunder_mem import MemEfficient, StepInBackward
from thunder_mem.optimizer.update import is_update


class Net(nn.Module):
    """Each norm's weight is cast inside of regions, in the forward and in the backward."""

    def __init__(self, layers=3):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x.float()).to(x.dtype) * norm.weight.float().to(x.dtype))
        return x.float().square().mean()


def trained(model, x, steps=3, executors=None, **options):
    optimizer = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.5))
    transform = MemEfficient(strict=True, verify=True, optimizer=optimizer, **options)
    jitted = thunder.jit(model, executors=executors, transforms=[transform])
    for _ in range(steps):
        jitted(x).backward()
        optimizer.step()
    return jitted


@pytest.mark.slow
def test_no_update_waits_for_the_end_of_the_source_order():
    torch.manual_seed(0)
    model, x = Net().bfloat16(), torch.randn(4, 8, 16, dtype=torch.bfloat16)
    jitted = trained(model, x, steps=1, executors=[], sort="source")
    steps = thunder.last_backward_traces(jitted)[-1].bound_symbols[:-1]
    is_step = [is_update(b) for b in steps if b.sym.id is not PrimIDs.DEL]
    assert sum(is_step) == 9
    assert not all(is_step[-9:])


@pytest.mark.slow
def test_updates_follow_regions_that_cast_their_parameter():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8, 16)
    ours = copy.deepcopy(model)
    trained(ours, x)
    double, theirs = copy.deepcopy(model).double(), copy.deepcopy(model)
    for m, given in ((double, x.double()), (theirs, x)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            m(given).backward()
            optimizer.step()
    for mine, other, exact in zip(ours.parameters(), theirs.parameters(), double.parameters(), strict=True):
        assert (mine - exact).norm() <= 2 * (other - exact).norm() + 1e-6 * exact.norm()
