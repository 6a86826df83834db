"""A write in the forward of a `torch.autograd.Function` is refused: replaced, it would lose the function's gradient."""

import pytest
import thunder
import torch

from thunder_mem import MemEfficient


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 3).add_(1)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def shifted(x):
    return Shifted.apply(x * 1)


def test_it_is_refused_with_its_line():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"test_own_gradients\.py:\d+.*compute a new value there"):
        thunder.jit(shifted, executors=[], transforms=[MemEfficient(strict=True)])(x)


def test_without_a_gradient_it_runs():
    x = torch.arange(3.0)
    assert torch.equal(thunder.jit(shifted, executors=[], transforms=[MemEfficient(strict=True)])(x), shifted(x))
