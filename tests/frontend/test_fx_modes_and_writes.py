"""Parts of ThunderFX's programs that end with gradients disabled, or get what other parts write."""

import pytest
import thunder
import torch
from thunder.dynamo import thunderfx
from torch.nn import functional as F

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import MemEfficient, fx


@pytest.fixture(autouse=True)
def gradients_afterwards():
    """ThunderFX can leave them disabled after a break under `torch.no_grad`."""
    yield
    torch.set_grad_enabled(True)
    torch._dynamo.reset()


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    x, u = torch.randn(4, 8, generator=generator), torch.randn(8, generator=generator)
    return x, torch.randn(8, 8, generator=generator, requires_grad=True), u


def test_what_is_written_out_has_a_gradient_though_the_program_disables_gradients_at_its_end(tensors):
    labels = torch.tensor([1, 7, 0, 3])

    def step(x, w, u):
        loss = torch.dot(u, w @ u) + F.rms_norm(x @ w, (8,)).logsumexp(-1).sum()
        loss = loss + F.cross_entropy(x @ w, labels, label_smoothing=0.1) + torch.hstack([w, w * 2]).sin().sum()
        torch.set_grad_enabled(False)
        return loss, (w * 2).sum()

    def gradient(f):
        loss, other = f(*tensors)
        assert not torch.is_grad_enabled() and not other.requires_grad
        torch.set_grad_enabled(True)
        return torch.autograd.grad(loss, tensors[1])

    with uncompiled_regions():
        found = gradient(thunder.jit(step, transforms=[MemEfficient(strict=True)]))
    torch.testing.assert_close(found, gradient(step))


def test_what_is_written_out_under_no_grad_has_none(tensors):
    def step(x, w, u):
        with torch.no_grad():
            scale = torch.dot(u, w @ u)
        return (x @ w * scale).sum()

    with uncompiled_regions():
        loss = thunder.jit(step, transforms=[MemEfficient(strict=True)])(*tensors)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors[1]), torch.autograd.grad(step(*tensors), tensors[1]))


def test_a_part_before_a_block_under_no_grad_has_its_gradients(tensors):
    """As a spectral norm by hand: Thunder's part of the first use ends under `no_grad`."""

    def weight(w, u):
        with torch.no_grad():
            F.normalize(w @ u, dim=0, out=u)
        v = u.clone()
        return w / torch.dot(v, w @ v)

    def step(x, w, u):
        return (x @ weight(w, u)).square().mean() - torch.tanh(x @ weight(w, u)).mean()

    x, w, u = tensors
    expected = torch.autograd.grad(step(x, w, u.clone()), w)
    with uncompiled_regions():
        compiled = thunderfx(step, transforms=[MemEfficient(strict=True)])
        loss = compiled(x, w, u.clone())
    assert len(fx.subgraphs(compiled)) > 2
    torch.testing.assert_close(torch.autograd.grad(loss, w), expected)


def out(u, v):
    torch.sinc(u + 1, out=u)


def running_statistics(u, v):
    F.batch_norm(torch.sinc(torch.ones(2, 8)), u, v, training=True)


WRITES = {
    "out=": out,
    "several in out=": lambda u, v: torch.frexp(v, out=(u, torch.zeros(8, dtype=torch.int32))),
    "inplace=": lambda u, v: F.relu(u, inplace=True),
    "a list": lambda u, v: torch._foreach_add_([u, v], 1.0),
    "running statistics": running_statistics,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_copy_of_what_another_part_writes_is_not_made_again(name, tensors):
    def step(x, w, u, v):
        loss = (torch.tanh(x @ w) * (u.clone() * 2).sin()).square().sum() + torch.sinc(x @ w).sum()
        with torch.no_grad():
            WRITES[name](u, v)
        return loss

    x, w, u = tensors
    expected = torch.autograd.grad(step(x, w, u.clone(), u.abs()), w)
    with uncompiled_regions():
        loss = thunderfx(step, transforms=[MemEfficient(strict=True)])(x, w, u.clone(), u.abs())
    torch.set_grad_enabled(True)
    torch.testing.assert_close(torch.autograd.grad(loss, w), expected)
