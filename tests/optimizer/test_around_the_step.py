"""Gradients that nobody asked for, hooks, scalers, and parameters that are replaced, returned or removed."""

import copy

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, last_plan, predict_step

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def made(model=None, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ours = StepInBackward(optimizer(model.parameters(), lr=0.1, **options))
    return model, ours, compiled(model, ours)


def compiled(function, ours):
    return thunder.jit(function, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def refused(step):
    return {r.what: r.reason for r in last_plan(step).refused}


@pytest.mark.parametrize("way", ["torch.autograd.grad", "inputs"])
def test_gradients_that_nobody_asked_for_update_nothing(way):
    model, ours, step = made()
    x, before = X.clone().requires_grad_(), values(model)
    if way == "inputs":
        step(x).sum().backward(inputs=[x, model[0].bias])
        ours.step()
        assert not torch.equal(model[0].bias, before[1])
        model[0].bias.data.copy_(before[1])
    else:
        assert torch.autograd.grad(step(x).sum(), x)[0].abs().sum() > 0
    assert all(map(torch.equal, values(model), before))


def test_autograd_grad_cannot_have_what_the_backward_uses():
    model, _, step = made()
    before = values(model)
    with pytest.raises(RuntimeError, match="gets no gradient of t_0_bias"):
        torch.autograd.grad(step(X).sum(), list(model.parameters()))
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_the_optimizer_does_not_know(fused):
    _, ours, step = made(optimizer=torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(step(X).sum()).backward()
    with pytest.raises(RuntimeError, match=r"StepInBackward\(optimizer, scaler=scaler\)"):
        scaler.step(ours)
    ours.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(step(X).sum()).backward()
    off.step(ours)


def test_a_replaced_parameter():
    model = nn.Linear(4, 4)
    _, ours, step = made(model)
    step = compiled(lambda x: model(x).sum(), ours)
    step(X).backward()
    ours.step()
    model.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="is another tensor than at the compilation"):
        step(X)


def test_a_hook_sees_its_gradient():
    model, ours, _ = made()
    before = model[0].weight.detach().clone()
    model[0].weight.register_hook(lambda grad: 0 * grad)
    seen = []
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    step = compiled(model, ours)
    step(X).sum().backward()
    ours.step()
    assert torch.equal(model[0].weight, before) and seen == [True]
    assert "a hook waits" in refused(step)["update of t_0_weight"]
    model[2].bias.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="t_2_bias got a hook after the compilation"):
        step(X)


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(x @ self.a), self.a.t(), self.a


class ReadsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x):
        return torch.tanh(torch.tanh(x @ self.b) @ self.a) @ self.c


@pytest.mark.parametrize(
    "kind, given, loss",
    [
        (Returns, lambda model, x: x, lambda out: out[0].square().sum() + out[1].square().sum() + (3 * out[2]).sum()),
        (ReadsTwice, lambda model, x: model.a.detach().t(), lambda out: out.square().sum()),
    ],
)
@pytest.mark.filterwarnings("ignore:gradients wait")
def test_parameters_that_others_hold(kind, given, loss):
    """A program that returns a parameter; an input that is a parameter's memory, read after the update."""
    torch.manual_seed(0)
    model = kind()
    exact = copy.deepcopy(model).double()
    reference = torch.optim.SGD(exact.parameters(), lr=0.01)
    ours = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.01))
    step = compiled(model, ours)
    for _ in range(2):
        loss(step(given(model, X))).backward()
        ours.step()
        ours.zero_grad()
        loss(exact(given(exact, X.double()))).backward()
        reference.step()
        reference.zero_grad()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-5, rtol=1e-5)


def test_an_input_in_a_parameters_memory_makes_it_wait():
    torch.manual_seed(0)
    model = ReadsTwice()
    *_, step = made(model)
    with pytest.warns(UserWarning, match="shares memory with an input of the program"):
        step(model.a.detach().t()).sum().backward()
    assert model.a.grad is not None and model.b.grad is None and model.c.grad is None


def test_a_parameter_that_left_the_optimizer():
    model, ours, step = made()
    step(X).sum().backward()
    ours.step()
    ours.param_groups[0]["params"].remove(next(p for p in ours.param_groups[0]["params"] if p is model[0].weight))
    before = model[0].weight.detach().clone()
    step(X).sum().backward()
    ours.step()
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="t_0_weight is in no parameter group any more"):
        predict_step(step, ours, torch.sum, X)
