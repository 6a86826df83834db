"""Updates in the backward are those of an eager loop: on shared memory, of sparse rows, with options that change."""

import warnings
from collections import defaultdict

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, last_plan
from thunder_mem.runtime.memory_spans import overlapping


class Tied(nn.Module):
    """Three layers of which the last two have one memory, whole or in part, as two parameters."""

    def __init__(self, rows):
        super().__init__()
        self.first, self.a = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.w = nn.Parameter(self.a.weight.data[:rows])

    def forward(self, x):
        return F.linear(self.a(self.first(x).tanh()).tanh(), self.w).tanh()


def trained(make, loop=lambda optimizer, i: None, in_backward=False, parts=lambda model: [model], lr=0.5, **options):
    """The parameters after three steps in float64, of eager PyTorch or with updates in the backward."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    run = parts(model)
    if in_backward:
        optimizer = StepInBackward(optimizer)
        run = [
            thunder.jit(part, executors=[], transforms=[MemEfficient(strict=True, verify=True, optimizer=optimizer)])
            for part in run
        ]
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    for i in range(3):
        out = x[i]
        for part in run:
            out = part(out)
        out.square().mean().backward()
        loop(optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_like_eager(make, **options):
    for mine, eager in zip(trained(make, in_backward=True, **options), trained(make, **options), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_parameters_on_one_memory_wait_for_the_step(rows, momentum):
    with pytest.warns(UserWarning, match="a parameter shares memory with .* another parameter"):
        assert_like_eager(lambda: Tied(rows), momentum=momentum, weight_decay=0.1)


def test_two_programs_with_parameters_on_one_memory_wait():
    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        model[4].weight.data = model[2].weight.data
        return model

    with pytest.warns(UserWarning, match="shares memory"):
        assert_like_eager(make, parts=lambda model: [model[:3], model[3:]])


def test_memory_that_was_updated_since_the_step_is_not_updated_again():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight.data = a.weight.data
    optimizer = StepInBackward(torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1))
    first, second = (thunder.jit(m, executors=[], transforms=[MemEfficient(optimizer=optimizer)]) for m in (a, b))
    first(torch.ones(2, 4)).sum().backward()
    out = second(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match="a second backward since the last step"):
        out.backward()


def test_flat_parameters_do_not_overlap():
    flat = torch.zeros(12)
    a, b, c = flat[:4].view(2, 2), flat[4:8].view(2, 2).t(), flat[8:]
    assert overlapping([a, b, c, flat[:0], torch.zeros(3)]) == set()
    inner, outer = flat[5:6], flat[4:12]
    assert overlapping([a, inner, outer, c]) == {id(inner), id(outer), id(c)}
    assert overlapping([a, a]) == set()


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("accumulates", [False, True])
def test_sparse_gradients_wait_for_the_step(padding, accumulates):
    def grown(in_backward):
        torch.manual_seed(0)
        table = nn.Embedding(10, 8, sparse=True, padding_idx=padding)
        model = nn.Sequential(table, nn.Linear(8, 8)).double()
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), model
        if in_backward:
            optimizer = StepInBackward(optimizer)
            step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=optimizer)])
        for i in range(3):
            if in_backward and accumulates:
                with optimizer.accumulate():
                    step(torch.arange(i, i + 4)).square().mean().backward()
            elif accumulates:
                step(torch.arange(i, i + 4)).square().mean().backward()
            step(torch.tensor([i, 2, 5, 5])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reasons = {r.what: r.reason for r in last_plan(step).refused} if in_backward else {}
        return [p.detach() for p in model.parameters()], reasons

    mine, reasons = grown(True)
    for own, eager in zip(mine, grown(False)[0], strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-12, atol=1e-14)
    assert [reason for what, reason in reasons.items() if "weight" in what] == [
        "its gradient is sparse, so step() updates the parameter"
    ]


def resets_momentum(optimizer, i):
    if i == 1:
        optimizer.state = defaultdict(dict)


def replaces_groups(optimizer, i):
    if i == 1:
        optimizer.param_groups = [{**group, "momentum": 0.5} for group in optimizer.param_groups]


@pytest.mark.parametrize("change", [resets_momentum, replaces_groups])
def test_what_is_assigned_to_it_is_the_wrapped_optimizers(change):
    def run(in_backward):
        torch.manual_seed(0)
        model = nn.Linear(8, 8).double()
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model
        if in_backward:
            optimizer = StepInBackward(optimizer)
            step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=optimizer)])
        for i in range(4):
            step(torch.ones(3, 8, dtype=torch.float64) * i).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            change(optimizer, i)
        return model.weight.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=1e-14)


def test_a_rate_that_changes_behind_the_backward_is_warned_of_once():
    def late(optimizer, i):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    with pytest.warns(UserWarning, match=r"'lr' of a parameter group changed between backward\(\)") as seen:
        trained(lambda: nn.Linear(8, 8).double(), loop=late, in_backward=True)
    assert sum("between backward" in str(w.message) for w in seen) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*between backward.*")
        trained(lambda: nn.Linear(8, 8).double(), in_backward=True, lr=torch.tensor(0.1, dtype=torch.float64))


class Counting(torch.optim.SGD):
    """It counts its calls in a tensor, in a list, in a list of its group, or in a private number."""

    def __init__(self, params, place):
        super().__init__(params, lr=0.1)
        self.place, self.tensor, self.list, self._k = place, torch.zeros(()), [0], 0
        self.param_groups[0]["calls"] = [0]
        self.seen = []

    def step(self, closure=None):
        self.seen.append("a log")
        if self.place == "tensor":
            self.tensor += 1
        elif self.place == "list":
            self.list[0] += 1
        elif self.place == "calls":
            self.param_groups[0]["calls"][0] += 1
        elif self.place == "_k":
            self._k += 1
        return super().step(closure)


@pytest.mark.parametrize("place", ["tensor", "list", "calls", "_k"])
def test_an_optimizer_that_counts_in_any_place_is_refused(place):
    with pytest.raises(TypeError, match=f"changes .*'{place}'.* in a step"):
        StepInBackward(Counting([nn.Parameter(torch.ones(2))], place))


def test_steps_on_trial_leave_the_optimizer_as_it_was():
    model = nn.Linear(4, 4)
    own = Counting(model.parameters(), "nowhere")
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=StepInBackward(own))])
    out = step(torch.ones(2, 4)).sum()
    assert own.seen == []
    out.backward()
    assert own.seen == ["a log"] * 2  # an update for each parameter
