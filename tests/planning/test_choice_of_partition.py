"""Partitions are compared by their arrangements before any of them is refined."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
import thunder
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import BudgetError, MemEfficient, last_plan
from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.planning import pipeline, tile_selection
from thunder_mem.planning.budget_loop import within_budget
from thunder_mem.planning.pipeline import TooSlowError, _in_time, _promising, choose_partition
from thunder_mem.planning.program import Program


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def counted(monkeypatch, name, calls):
    inner = getattr(pipeline, name)

    def call(*args, **options):
        calls.append(name)
        return inner(*args, **options)

    monkeypatch.setattr(pipeline, name, call)


def plan_of(module):
    with uncompiled_regions():
        jitted = thunder.jit(
            copy.deepcopy(module), executors=["mem_pointwise"], transforms=[MemEfficient(strict=True, tile=False)]
        )
        jitted(torch.ones(64, 8, dtype=torch.bfloat16))
    return last_plan(jitted).to_json()


@pytest.mark.slow
def test_a_partition_that_starts_no_lower_is_not_refined_and_would_not_be_chosen(monkeypatch):
    module, calls = Checkpointed().bfloat16(), []
    for name in ("arrange", "refined"):
        counted(monkeypatch, name, calls)
    plan = plan_of(module)
    assert (calls.count("arrange"), calls.count("refined")) == (3, 1)
    monkeypatch.setattr(pipeline, "_promising", lambda partitions, rank: partitions)
    assert plan_of(module) == plan
    assert calls.count("refined") == 4


@pytest.mark.parametrize(
    ("ranks", "promising"),
    [
        ([(10, 5), (9, 9), (9, 8)], [0, 1, 2]),
        ([(10, 5), (10, 5), (11, 1)], [0]),  # no lower than one before
        ([(13, 0), (10, 5), (9, 9)], [1, 2]),  # the first is too far above the last
        ([(125,), (100,)], [0, 1]),
        ([(126,), (100,)], [1]),
    ],
)
def test_partitions_that_are_refined(ranks, promising):
    assert list(_promising(range(len(ranks)), ranks.__getitem__)) == promising


def test_partitions_that_take_too_long_do_not_count():
    a, b, c = (SimpleNamespace(seconds=s) for s in (1.0, 1.001, 1.01))
    assert _in_time([c, b, a], inf) == [c, b, a]
    assert _in_time([c, b, a], 1.002) == [b, a]
    assert _in_time([c, b, a], 1.0) == [a]
    assert _in_time([c, b, a], 0.9995) == [b, a]  # which refinement may bring there
    with pytest.raises(TooSlowError):
        _in_time([c], 1.0)


def test_the_time_of_a_partition_is_that_of_its_arrangement():
    """Of its kernels by the roofline, before refinement: `most_s` is compared with it."""
    matrix = torch.randn(256, 256, requires_grad=True)
    with plans_made() as plans:
        jitted = thunder.jit(lambda x: (x @ x).sin().sum(), executors=[], transforms=[MemEfficient(strict=True)])
        jitted(matrix)
    (planned,) = plans
    model = device_model_of(torch.device("cpu"))
    assert planned.arranged_seconds == plan_seconds(planned.plan, planned.source, model) > 3 * 2 * 256**3 / 1e12
    program = replace(planned.program, options=replace(planned.program.options, most_s=planned.arranged_seconds / 2))
    with pytest.raises(TooSlowError):
        choose_partition(program)


@contextmanager
def plans_made():
    plans, inner = [], tile_selection.planned_trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_selection, "planned_trace", lambda *args: plans.append(inner(*args)) or plans[-1])
        yield plans


def test_a_budget_is_searched_again_without_the_inputs_that_stretches_keep(monkeypatch):
    asked = []

    def noted(best, problem, *rest):
        asked.append(problem.choices.must_save)
        return within_budget(best, problem, *rest)

    monkeypatch.setattr(pipeline, "within_budget", noted)
    monkeypatch.setattr(
        Program, "borders_kept", lambda program, chosen: frozenset(program.source.graph.ops[0].allocates)
    )
    x = torch.randn(64, 64, requires_grad=True)
    jitted = thunder.jit(lambda x: (x @ x).sin().sum(), executors=[], transforms=[MemEfficient(budget=1, strict=True)])
    with pytest.raises(BudgetError):
        jitted(x)
    assert [bool(kept) for kept in asked[:2]] == [True, False]
