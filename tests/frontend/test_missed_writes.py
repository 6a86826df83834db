"""Writes that Thunder's autograd misses are named; those that it sees raise no alarm."""

import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import MemEfficient


def row(x, w):
    y = x @ w
    y[1].zero_()
    return y.sin()


def columns(x, w):
    y = x @ w
    y[:, :2].mul_(2)
    return y.sin()


def transposed(x, w):
    y = x @ w
    y.t().mul_(x)
    return y.sin()


def transposed_sums(x, w):
    y = torch.cumsum(x @ w, 0)
    y.t().mul_(x)
    return y.sin()


def flat(x, w):
    y = x @ w
    y.view(-1).mul_(2)
    return y.sin()


def function_in_place(x, w):
    y = x @ w
    F.relu_(y[:2])
    return y.sin()


def returned(x, w):
    y = x @ w
    y[1].zero_()
    return y


def diagonal(x, w):
    y = x @ w
    y.diagonal().mul_(2)
    return y.sin()


def assigned(x, w):
    y = x @ w
    y[1] = 0
    return y.sin()


def augmented(x, w):
    y = x @ w
    y[1] += 1
    return y.sin()


def through_the_view_alone(x, w):
    v = (x @ w)[1]
    v.mul_(2)
    return v.sin()


def as_a_whole(x, w):
    y = x @ w
    y.mul_(2).add_(1)
    return y.view(-1) * 2


def of_a_mask(x, w):
    mask = torch.zeros(4, 4)
    mask[1].add_(1)
    return (x @ w) * mask


def of_a_diagonal(x, w):
    y = (x @ w).diagonal().sin()
    y.mul_(2)
    return y


def detached(x, w):
    y = (x @ w).detach()
    y[1].zero_()
    return y * w


def gradients(fn, compiled):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(4, 4, generator=generator) for _ in range(2))
    compiled(fn)(x, w.requires_grad_()).sum().backward()
    return w.grad


def name(fn):
    return fn.__name__


def planned(fn):
    return thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])


@pytest.mark.parametrize(
    "fn",
    [row, columns, transposed, transposed_sums, flat, function_in_place, returned, diagonal],
    ids=lambda f: f.__name__,
)
def test_a_write_through_a_view_whose_base_is_read_afterwards(fn):
    line = fn.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match=rf"misses the write at .*test_missed_writes.py:{line}"):
        actual = gradients(fn, planned)
    # Why it warns: should Thunder be right one day, the warning goes.
    assert not torch.allclose(actual, gradients(fn, lambda f: f))


@pytest.mark.parametrize(
    "fn",
    [assigned, augmented, through_the_view_alone, as_a_whole, of_a_mask, of_a_diagonal, detached],
    ids=lambda f: f.__name__,
)
def test_no_alarm_where_gradients_are_right(fn):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*misses the write.*")
        actual = gradients(fn, planned)
    torch.testing.assert_close(actual, gradients(fn, lambda f: f))
