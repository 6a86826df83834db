"""Partitions are compared by their arrangements before any of them is refined."""

import copy

import pytest
import thunder
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import BudgetError, MemEfficient, last_plan
from thunder_mem.fusion.arrangement import Arranged, arrange
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Op, Storage, make_graph
from thunder_mem.planning import pipeline
from thunder_mem.planning.budget_loop import within_budget
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
def test_a_partition_that_holds_no_less_is_not_refined_and_would_not_be_chosen(monkeypatch):
    module, calls = Checkpointed().bfloat16(), []
    for name in ("arrange", "refined"):
        counted(monkeypatch, name, calls)
    plan = plan_of(module)
    assert (calls.count("arrange"), calls.count("refined")) == (3, 2)
    monkeypatch.setattr(Arranged, "holds_no_less", lambda *_: False)
    assert plan_of(module) == plan
    assert calls.count("refined") == 5


def chain(*nbytes):
    """The arrangement of ops one after the other, with results of so many bytes and nothing to fuse."""
    storages = [Storage(i, size, held=i == 0) for i, size in enumerate((1, *nbytes))]
    ops = [Op(i, reads=(i,), allocates=(i + 1,)) for i in range(len(nbytes))]
    graph, none = make_graph(ops, storages, outputs=[len(nbytes)]), (0,) * len(nbytes)
    operands = ((), *((i,) for i in range(len(nbytes) - 1)))
    return arrange(graph, FusionCapabilities(none, none, 0, (False,) * len(nbytes), operands), [])


def test_an_arrangement_holds_no_less_only_if_it_does_so_at_every_step():
    small = chain(2, 2, 2)
    assert small.holds_no_less(small)
    assert chain(2, 3, 2).holds_no_less(small) and not small.holds_no_less(chain(2, 3, 2))
    assert not chain(1, 9, 1).holds_no_less(small)
    assert not chain(2, 2, 2, 2).holds_no_less(small)


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
