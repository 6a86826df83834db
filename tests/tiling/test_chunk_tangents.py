"""Tangents of chunked losses, and several results of one head."""

import pytest
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, head, inputs, relative


@pytest.mark.parametrize("tangent", [1.0, -2.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tangents(tangent, dtype):
    x, w, t = inputs(64, 16, 300, dtype)
    fn, _ = chunked(head)
    grads = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(tangent, dtype=dtype))
    for got, want in zip(grads, exact(head, x, w, t, tangent=tangent)[1], strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=3e-4)


def test_infinite_tangent_is_not_finite_for_the_scaler_to_see():
    x, w, t = inputs()
    fn, _ = chunked(head)
    dx, dw = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(float("inf")))
    assert not dx.isfinite().all() and not dw.isfinite().all()


def test_loss_and_its_multiple_are_one_scalar():
    def fn(x, w, t):
        loss = head(x, w, t)
        return loss, 3 * loss

    x, w, t = inputs()
    compiled, transform = chunked(fn)
    a, b = compiled(x, w, t)
    grads = torch.autograd.grad(a + b, (x, w))
    assert transform.record.loops[0].mode == "grads-in-forward"
    for got, want in zip(grads, exact(head, x, w, t, tangent=4.0)[1], strict=True):
        assert relative(got, want) < 1e-5


def two_losses(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, t), torch.logsumexp(z, -1).square().mean()


def test_several_losses_on_one_head_recompute():
    x, w, t = inputs()
    compiled, transform = chunked(two_losses)
    a, b = compiled(x, w, t)
    grads = torch.autograd.grad(a * 0.7 + b * b, (x, w))
    assert transform.record.loops[0].mode == "recompute-in-backward"

    def both(x, w, t):
        a, b = two_losses(x, w, t)
        return a * 0.7 + b * b

    for got, want in zip(grads, exact(both, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


def test_only_one_of_two_losses_is_used():
    x, w, t = inputs()
    compiled, _ = chunked(two_losses)
    grads = torch.autograd.grad(compiled(x, w, t)[1], (x, w))
    for got, want in zip(grads, exact(lambda *a: two_losses(*a)[1], x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5
