"""Modules that a program makes itself, such as a loss."""

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient

LABELS, TARGETS, WEIGHTS = torch.randint(0, 5, (8,)), torch.rand(8, 5), torch.rand(5)
PROGRAMS = {
    "cross entropy": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x * 2, LABELS),
    "weighted cross entropy": lambda x: nn.CrossEntropyLoss(weight=WEIGHTS.to(x.dtype))(x * 2, LABELS),
    "binary cross entropy": lambda x: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.to(x.dtype))(x * 2, TARGETS.to(x.dtype)),
    "sequential": lambda x: nn.Sequential(nn.ReLU(), nn.Tanh())(x * 2).sum(),
    "module list": lambda x: nn.ModuleList([nn.ReLU(), nn.Tanh()])[1](x * 2).sum(),
    "layer norm": lambda x: nn.LayerNorm(5, elementwise_affine=False)(x * 2).pow(3).sum(),
    "batch norm": lambda x: nn.BatchNorm1d(5, affine=False, dtype=x.dtype)(x * 2).pow(3).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_their_programs_are_compiled(name: str):
    program = PROGRAMS[name]
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    compiled = thunder.jit(program, transforms=[MemEfficient(strict=True)], executors=[])
    for _ in range(2):
        (ours, our_grad), (exact, grad) = ((y := fn(x), torch.autograd.grad(y, x)[0]) for fn in (compiled, program))
        torch.testing.assert_close(ours, exact)
        torch.testing.assert_close(our_grad, grad)


class KeepsALoss(nn.Module):
    def forward(self, x):
        self.loss = nn.CrossEntropyLoss()
        return self.loss(x, LABELS)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return nn.CrossEntropyLoss(ignore_index=1)(self.norm(x), LABELS)


def test_one_that_the_program_keeps_is_refused_and_not_lost():
    with pytest.raises(NotImplementedError, match="_modules"):
        thunder.jit(KeepsALoss(), transforms=[MemEfficient()], executors=[])(torch.randn(8, 5))


def test_the_callers_buffers_are_written_beside_one():
    ours, theirs = WithBuffers(), WithBuffers()
    compiled, x = thunder.jit(ours, transforms=[MemEfficient()], executors=[]), torch.randn(8, 5)
    for model in (compiled, theirs):
        model(x), model(x)
    torch.testing.assert_close(ours.norm.running_mean, theirs.norm.running_mean)
    assert ours.norm.num_batches_tracked == 2
