"""A gradient that should have a gradient itself is warned of, and other backwards are not."""

import warnings

import pytest
import thunder
import torch

from thunder_mem import MemEfficient


def compiled():
    return thunder.jit(lambda x: x**3, executors=[], transforms=[MemEfficient(strict=True)])


def test_a_gradient_penalty_is_warned_of():
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="no gradients of gradients"):
        (grad,) = torch.autograd.grad(compiled()(x).sum(), x, create_graph=True)
    assert not grad.requires_grad


def test_other_backwards_are_not():
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="create_graph")
        compiled()(x).sum().backward(retain_graph=True)
        torch.autograd.grad(compiled()(x).sum(), x)
