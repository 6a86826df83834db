"""One notion of a peak: what plans, budgets, reports, the frontier and the command line say is what a device holds."""

import json

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import BudgetError, MemEfficient, explain, last_plan, measure_peak, memory_time_frontier, predict
from thunder_mem.command_line import main
from thunder_mem.simulate import simulate

ONE_BYTES = 4  # the gradient of the loss, which `loss.backward()` makes and the backward does not take


def planned_and_measured(fn, *args):
    """What a plan says, and the most that is really held, while the caller holds all that is returned."""
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    tensors = [*args, *(jitted.parameters() if isinstance(fn, torch.nn.Module) else ())]

    def run():
        for t in tensors:
            t.grad = None
        returned = jitted(*args)
        loss = returned if isinstance(returned, torch.Tensor) else returned[0]
        loss.backward()
        return returned

    run()
    for t in tensors:
        t.grad = None
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return last_plan(jitted).candidate.peak_bytes, measure_peak(run) + sum(held.values())


def one(h):
    return h.square().mean(), h.argmax(-1)


def two(h):
    return h.square().mean(), h.argmax(-1), (h > 0)


def the_last_is_small(h):
    return h.square().mean(), (h > 0), h.argmax(-1)[:3]


def returned_twice(h):
    found = h.argmax(-1)
    return h.square().mean(), found, {"again": found, "count": 3}


def detached(h):
    return h.square().mean(), h.detach()[0] * 2


@pytest.mark.parametrize("fn", (one, two, the_last_is_small, returned_twice, detached), ids=lambda f: f.__name__)
def test_a_plan_counts_what_autograd_makes_for_outputs_without_a_gradient(fn):
    """Zeros of their shape, the last of which Thunder's backward holds to its end."""
    planned, measured = planned_and_measured(fn, torch.randn(512, 128, requires_grad=True))
    assert planned == measured - ONE_BYTES


def test_so_does_it_for_an_argument_that_is_returned():
    planned, measured = planned_and_measured(
        lambda h, i: (h.square().mean(), i), torch.randn(512, 128, requires_grad=True), torch.arange(5000)
    )
    assert planned == measured - ONE_BYTES


def test_a_budget_is_kept_beside_outputs_without_a_gradient():
    x = torch.randn(512, 128, requires_grad=True)
    planned, measured = planned_and_measured(one, x)
    with pytest.raises(BudgetError):
        thunder.jit(one, executors=[], transforms=[MemEfficient(budget=measured - 4096)])(x)
    jitted = thunder.jit(one, executors=[], transforms=[MemEfficient(budget=measured)])
    jitted(x)
    assert last_plan(jitted).budget.peak_bytes == planned


class Tied(torch.nn.Module):
    """A weight under two names; without the last layer as its own, beside another of the same shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000, bias=False)
        self.other = torch.nn.Embedding(1000, 64)
        self.last.weight = self.embedding.weight

    def forward(self, tokens):
        return self.last(self.embedding(tokens) + self.other(tokens)).tanh().sum()


def test_a_parameter_of_two_names_counts_once():
    planned, measured = planned_and_measured(Tied(), torch.arange(30))
    assert planned == measured - ONE_BYTES


SCRIPT = """
import torch
from tests.test_one_peak import Looped

def build():
    return Looped(), (torch.zeros(512, dtype=torch.long), torch.zeros(512, dtype=torch.long))
"""


class Looped(torch.nn.Module):
    """A loss head that is chunked, below layers that are worth computing again, with its weight tied."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4096, 64), torch.nn.Linear(64, 4096, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.softmax(layer(x).repeat(1, 16), -1)[:, :64]
        return F.cross_entropy(self.head(x), targets)


def test_everybody_names_the_same_figure(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    target, gpu = f"{tmp_path / 'train.py'}:build", ["--device", "H100-80GB"]

    def asked(command, *words):
        code = main([command, target, *gpu, "--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    with simulate("H100-80GB"), torch.device("cuda"):
        model, tokens, targets = Looped(), *(torch.zeros(512, dtype=torch.long) for _ in range(2))
        jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)])
        report = explain(jitted, tokens, targets, bounds=False)
        frontier = memory_time_frontier(model, tokens, targets, points=2)
        peak = last_plan(jitted).candidate.peak_bytes
        smallest = frontier.points[-1].peak_bytes
        assert report.prediction.scratch_bytes > 0 and peak == report.peak_bytes == frontier.points[0].peak_bytes
        assert str(report).startswith(
            f"Peak {report.peak_bytes / 2**20:.2f} MiB ({peak:,} bytes) in the forward, at chunk"
        )
        for budget in (smallest, smallest - 1):
            step = thunder.jit(model, transforms=[MemEfficient(budget=budget, strict=True)])
            if budget == smallest:
                assert predict(step, tokens, targets, keep_outputs=True).peak_bytes == smallest
            else:
                with pytest.raises(BudgetError) as caught:
                    predict(step, tokens, targets)
                assert caught.value.smallest_peak_bytes == smallest
    assert asked("predict")[1]["peak_bytes"] == peak
    for budget in (smallest, smallest - 1):
        code, data = asked("plan", "--budget", budget)
        assert (code, data["fits"], data["peak_bytes"]) == (int(budget < smallest), budget == smallest, smallest)
