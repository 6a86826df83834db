"""Writes in place between a head and its loss: the loop sees what the head saw."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import ChunkLossHead, MemEfficient

ROWS, WIDTH, VOCABULARY = 37, 8, 61


def bias_overwritten(x, w, t, b):
    z = F.linear(x, w) + b
    b.mul_(-2.0)
    return F.cross_entropy(z, t)


def view_of_bias_overwritten(x, w, t, b):
    z = F.linear(x, w) + b.view(1, -1)
    b[:5].zero_()
    return F.cross_entropy(z, t)


def overwritten_and_used(x, w, t, b):
    z = F.linear(x, w) + b
    b.add_(1.0)
    return F.cross_entropy(z, t) + (b * b).sum()


def logits_scaled_in_place(x, w, t, b):
    z = F.linear(x, w)
    z.mul_(0.5)
    return F.cross_entropy(z + b, t)


def mean_only_compared(x, w, t, b):
    losses = F.cross_entropy(F.linear(x, w) + b, t, reduction="none")
    return (losses * (losses > losses.mean())).sum()


def run(program, dtype):
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)))
    t = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    x, w, b = (a.to(dtype) for a in (x, w, b))
    x.requires_grad_(), w.requires_grad_()
    loss = program(x, w, t, b)
    loss.backward()
    return loss.detach(), x.grad, w.grad, b


@pytest.mark.parametrize(
    "fn",
    [bias_overwritten, view_of_bias_overwritten, overwritten_and_used, logits_scaled_in_place, mean_only_compared],
    ids=lambda fn: fn.__name__,
)
def test_loss_gradients_and_arguments_are_eagers(fn):
    compiled = thunder.jit(fn, transforms=[ChunkLossHead(chunks=5)])
    expected = run(fn, torch.float64)
    for ours, theirs in zip(run(compiled, torch.float32), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_what_names_logits_for_their_shape_alone():
    """`zero_` makes its zeros by `zeros_like(logits)`: without the logits nothing may name them any more."""

    def program(x):
        logits = x @ x.transpose(-2, -1)
        logits.zero_()
        return logits

    transform = MemEfficient(strict=True, chunk=ChunkLossHead(rows=3))
    compiled = thunder.jit(program, executors=[], transforms=[transform])
    assert torch.equal(compiled(torch.ones(6, 2)), torch.zeros(6, 6))
