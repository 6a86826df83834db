"""Results have a gradient where eager's have one, and only there."""

import pytest
import thunder
import torch
from torch.nn import functional as F

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import MemEfficient, predict
from thunder_mem.runtime.measure import measure_peak


def under_no_grad(h):
    with torch.no_grad():
        return h.exp()


def increased_under_no_grad(h):
    with torch.no_grad():
        h.add_(1)
    return h


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx, g):
        return g


def written_detached(h):
    d = h.detach()
    d.mul_(2)
    return d + 0 * h.sum().detach()


def passed_on(h):
    """As a state of which some values are reset for the next step."""
    state = h.detach()
    state[:, 0] = 0
    return state


RESULTS = {
    "a value": lambda h: h * 2,
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "of detached values": lambda h: h.detach() * h.detach().sum() + 1,
    "of a detached and another one": lambda h: h.detach() * h,
    "under no_grad": under_no_grad,
    "written under no_grad": lambda h: increased_under_no_grad(h * 2),
    "zeros": torch.zeros_like,
    "a comparison as a number": lambda h: (h > 0).float(),
    "a position as a number": lambda h: h.argmax(-1).float() / 2,
    "a sign": torch.sign,
    "a straight-through gradient": lambda h: StraightThrough.apply(h),
    "detached, and written": lambda h: written_detached(h * 2),
    "a state that is reset": lambda h: passed_on(h * 2),
    "a view, and written": lambda h: (lambda y: (y.detach()[0].mul_(2), y.detach())[1])(h * 2),
    "written after its detach": lambda h: (lambda y: (y.detach(), y.mul_(2))[0])(h * 2),
    "overwritten by zeros": lambda h: (h * 2).zero_(),
    "overwritten by a detached": lambda h: (h * 2).copy_(h.detach()),
    "new_zeros": lambda h: h.new_zeros(2) + h.detach().sum(),
    "new_full": lambda h: h.new_full((2,), 3.0),
    "an own gradient": lambda h: Twice.apply(h),
    "an own gradient of a detached": lambda h: Twice.apply(h.detach()),
    "without dropout": lambda h: F.dropout(h.detach(), 0.5, training=False),
    "with what is no view": lambda h: torch.cat([h, h.detach()]),
    "with a write": lambda h: h.detach().clone().copy_(h),
    "one of several": lambda h: torch.stack([h, h.detach()]).detach().unbind()[0],
}


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator, requires_grad=True)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_has_a_gradient_where_eagers_has_one(name, given):
    def step(x, w):
        h = torch.tanh(x @ w)
        return h.square().sum(), RESULTS[name](h)

    x, w = given
    compiled = thunder.jit(step, transforms=[MemEfficient(strict=True)])
    expected_loss, expected = step(x, w)
    with uncompiled_regions():
        loss, result = compiled(x, w)
    assert result.requires_grad == expected.requires_grad
    torch.testing.assert_close(result, expected)
    gradients = [
        torch.autograd.grad(loss + (result.sum() if result.requires_grad else 0), w)
        for loss, result in ((expected_loss, expected), (loss, result))
    ]
    torch.testing.assert_close(*gradients)


SAME = {
    "to": lambda h: h.to(h.dtype),
    "to a device": lambda h: h.to("cpu"),
    "type": lambda h: h.type(torch.float32),
    "type_as": lambda h: h.type_as(h),
    "flatten": lambda h: h.flatten(1),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "float": lambda h: h.float(),
    "half": lambda h: h.half(),
    "cpu": lambda h: h.cpu(),
    "conj": lambda h: h.conj(),
    "positive": lambda h: torch.positive(h),
    "atleast_2d": torch.atleast_2d,
    "real": lambda h: h.real,
    "a view": lambda h: h.view(4, 8),
    "a slice": lambda h: h[:],
    "a reshape": lambda h: h.reshape(4, 8),
    "a copy": lambda h: h.clone(),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_its_argument_under_no_grad_keeps_its_gradient(name, given):
    def step(x, w):
        h = torch.tanh(x @ w)
        with torch.no_grad():
            same = SAME[name](h)
        return h.square().sum() + same.sum(), same

    x, w = given
    expected, same = step(x, w)
    compiled = thunder.jit(step, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        loss, result = compiled(x, w)
    # In eager, a view under no_grad of what has a gradient is a leaf with a gradient of its own.
    assert result.requires_grad == (same.grad_fn is not None)
    torch.testing.assert_close(torch.autograd.grad(loss, w), torch.autograd.grad(expected, w))


def test_an_argument_that_is_returned_stays_itself(given):
    x, w = given
    compiled = thunder.jit(lambda x, w: ((x @ w).sum(), x, w), transforms=[MemEfficient(strict=True)], executors=[])
    _, same_x, same_w = compiled(x, w)
    assert same_x is x and same_w is w


def test_a_state_is_passed_on_from_step_to_step():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 4)

        def forward(self, x, state):
            state = self.cell(x, state)
            return state.square().mean(), state.detach()

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 4)

    def losses_of(step):
        state, losses = torch.zeros(2, 4), []
        for _ in range(3):
            loss, state = step(x, state)
            loss.backward()
            losses.append(float(loss))
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        state.numpy()
        return losses, gradients

    expected = losses_of(model)
    torch.testing.assert_close(losses_of(thunder.jit(model, transforms=[MemEfficient()])), expected)


def test_the_peak_of_a_step_with_detached_results_is_predicted():
    def step(x, w):
        h = torch.tanh(x @ w)
        return h.square().mean(), h.detach(), h.exp().detach()

    x, w = torch.randn(256, 64), torch.randn(64, 64, requires_grad=True)
    compiled = thunder.jit(step, transforms=[MemEfficient(strict=True)], executors=[])

    def run():
        results = compiled(x, w)
        results[0].backward()
        w.grad = None

    run()
    predicted = predict(compiled, x, w, tangents=[torch.ones(()), None, None], keep_outputs=True)
    assert measure_peak(run) == predicted.measured_bytes
