"""Partitions are compared by their arrangements before any of them is refined."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import thunder
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.checking.traces import unfused
from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import BudgetError, MemEfficient, last_plan, predict, simulate
from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions import partition_choice, pipeline
from thunder_mem.decisions.budget_loop import within_budget
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.partition_choice import (
    FreePartitions,
    TooSlowError,
    _lowest,
    _within_limits,
    arranged_partitions,
    plan_partition,
)
from thunder_mem.decisions.program import Program, read_program
from thunder_mem.planning import tile_selection
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex


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
    inner = getattr(partition_choice, name)

    def call(*args, **options):
        calls.append(name)
        return inner(*args, **options)

    monkeypatch.setattr(partition_choice, name, call)


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
    monkeypatch.setattr(partition_choice, "_lowest", lowest_of_all)
    assert plan_of(module) == plan
    assert calls.count("refined") == 4


def lowest_of_all(ranks, refined, rank):
    return min(((k, refined(k)) for k in range(len(ranks))), key=lambda found: rank(found[1]))


@pytest.mark.parametrize(
    ("starts", "ends", "order", "chosen"),
    [
        ([(10, 5), (9, 9), (9, 8)], [(8, 5), (8, 5), (8, 6)], [2, 1, 0], 0),  # of equal ones the first
        ([(10, 5), (10, 5), (11, 1)], [(9, 5), (1, 1), (1, 1)], [0], 0),  # no lower than one before
        ([(110, 0), (100, 5)], [(80, 0), (90, 9)], [1, 0], 0),
        ([(110, 0), (100, 5)], [(83, 0), (83, 9)], [1, 0], 0),
        ([(13, 0), (10, 5)], [(1, 0), (9, 9)], [1], 1),  # too far above
        ([(101,), (100,)], [(77,), (76,)], [1, 0], 1),
        ([(100,), (80,)], [(74,), (75,)], [1], 1),
    ],
)
def test_the_lowest_partition_is_refined_first_and_few_others(starts, ends, order, chosen):
    refined = []

    def refine(place):
        refined.append(place)
        return ends[place]

    assert _lowest(starts, refine, lambda end: end) == (chosen, ends[chosen])
    assert refined == order


def test_partitions_that_take_too_long_do_not_count():
    a, b, c = (SimpleNamespace(seconds=s) for s in (1.0, 1.001, 1.01))
    assert _within_limits([c, b, a], ()) == [c, b, a]
    assert _within_limits([c, b, a], (1.002, 2.0)) == [b, a]
    assert _within_limits([c, b, a], (1.0, 2.0)) == [a]
    assert _within_limits([c, b, a], (0.9, 1.001)) == [b, a]  # none keeps the first limit
    with pytest.raises(TooSlowError):
        _within_limits([c], (0.9, 1.0))


def test_free_partitions_are_bounded_by_the_lowest_and_by_the_fastest():
    figures = ((400, 3.0), (200, 2.0), (300, 1.0))
    arranged = [SimpleNamespace(least_likely_bytes=nbytes, seconds=seconds) for nbytes, seconds in figures]
    partitions = FreePartitions(program=None, arranged=tuple(arranged))
    assert (partitions.least_likely_bytes, partitions.least_seconds) == (200, 1.0)


def between(z, m):
    """What peaks, beside the value that made `z`."""
    a = z @ torch.cat([m, m], 1)
    return (a.sin() @ torch.cat([m, m], 0).t().t()) @ m


def with_an_idle_value(x, m):
    y = x.sin() * 2  # is made again
    return between(y @ m, m).t() @ y


def with_a_small_view(x, m):
    y = x @ torch.cat([m, m, m], 1)  # lets go of all but the view, which is copied
    return between(y[:, :16] @ m, m) @ y[:16, 32:]


@pytest.mark.parametrize(("fn", "freed"), [(with_an_idle_value, 64 * 16), (with_a_small_view, 3 * 64 * 16 - 16 * 16)])
def test_a_partition_is_bounded_by_what_is_idle_at_its_peak(fn, freed):
    trace = unfused(fn, torch.randn(64, 16), torch.randn(16, 16))
    program = read_program(trace, (mem_pointwise_ex,), PlanningOptions(strict=True))
    (partition,) = arranged_partitions(program).arranged
    peak_bytes = partition.planned.plan.overwritten_peak_bytes
    assert plan_partition(program, partition.rebuilt).plan.overwritten_peak_bytes == peak_bytes - 4 * freed
    assert partition.least_likely_bytes == int(0.92 * (peak_bytes - 4 * freed))


def test_the_time_of_a_partition_is_that_of_its_arrangement():
    matrix = torch.randn(256, 256, requires_grad=True)
    with plans_made() as plans:
        jitted = thunder.jit(lambda x: (x @ x).sin().sum(), executors=[], transforms=[MemEfficient(strict=True)])
        jitted(matrix)
    (planned,) = plans
    assert planned.arranged_seconds == planned.final_seconds  # nothing was refined, and a CPU does one after the other
    program = replace(planned.program, options=replace(planned.program.options, limits_s=(planned.final_seconds / 2,)))
    with pytest.raises(TooSlowError):
        arranged_partitions(program)


@pytest.mark.parametrize("width", [64, 4096])
def test_the_time_of_a_partition_on_a_gpu_is_without_launches(width):
    """Otherwise tiles whose launches are hidden would be refused."""
    with simulate("H100-80GB", fusion="nvfuser"), plans_made() as plans:
        x = torch.randn(width, width, device="cuda", requires_grad=True)
        jitted = thunder.jit(lambda x: ((x @ x).sin() @ x).sum(), transforms=[MemEfficient(strict=True, tile=False)])
        predict(jitted, x)
        (planned,) = plans
        serial_s = plan_seconds(planned.plan, planned.source, device_model_of(torch.device("cuda")))
        assert planned.arranged_seconds <= planned.final_seconds < serial_s


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
