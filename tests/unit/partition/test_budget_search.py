"""The cheapest recomputation within a budget, on graphs alone."""

from random import Random

import pytest

from tests.checking.graphs import Builder
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition import budget_search
from thunder_mem.partition.budget_search import PartitionProblem, fit_budget
from thunder_mem.partition.recompute_on_graph import recompute_on_graph
from thunder_mem.partition.tradeoff_curve import repeat_seconds


def residual_blocks(seed, layers):
    """Blocks of two values beside a residual stream; what they cost to make again is drawn."""
    rng, b = Random(seed), Builder()
    x, kept, grads = b.storage(8, held=True), [], []
    for _ in range(layers):
        h = b.op((x,), rng.choice((8, 16, 24)), name="up")
        g = b.op((h,), rng.choice((8, 16, 24)), name="act")
        kept.append((x, h, g))
        x = b.op((g, x), 8, name="down")
    grad = b.op((x,), 8, backward=True, name="loss_grad")
    for x, h, g in reversed(kept):
        grads.append(b.op((grad, g), 4, backward=True, name="dW2"))
        dh = b.op((b.op((grad,), 16, backward=True, name="dg"), h), 16, backward=True, name="dh")
        grads.append(b.op((dh, x), 4, backward=True, name="dW1"))
        grad = b.op((dh, grad), 8, backward=True, name="dx")
    graph = b.build(outputs=tuple(grads))
    nobody = (0,) * len(graph)
    made = [[graph.allocator[s] for s in op.reads if graph.allocator[s] is not None] for op in graph.ops]
    fuse = FusionCapabilities(nobody, nobody, 0, (False,) * len(graph), tuple(tuple(sorted(set(m))) for m in made))
    return PartitionProblem(graph, fuse, [rng.choice((1.0, 3.0, 20.0)) for _ in graph.ops])


@pytest.mark.parametrize(("seed", "share", "seconds"), [(14, 0, 27), (21, 0, 42)])
def test_the_integer_program_finds_what_no_rung_has_and_proves_it_cheapest(seed, share, seconds):
    problem = residual_blocks(seed, 4)
    spacings = list(problem.spacings())
    budget_bytes = min(spacing.low_bytes for spacing in spacings)
    found = fit_budget(problem, budget_bytes)
    assert (found.method, found.seconds, found.bound_seconds) == ("milp", seconds, seconds)
    assert found.peak_bytes == problem.trial(found.rebuilt).peak_bytes <= budget_bytes
    assert found.seconds == repeat_seconds(problem.graph, found.rebuilt, problem.repeat_s)
    assert all(r.seconds > seconds for spacing in spacings for r in spacing.sampled if r.peak_bytes <= budget_bytes)


@pytest.mark.parametrize("seed", [15, 18])
def test_a_larger_budget_is_kept_and_never_costs_more(seed):
    problem = residual_blocks(seed, 3)
    spacings = list(problem.spacings())
    low, high = min(spacing.low_bytes for spacing in spacings), max(spacing.high_bytes for spacing in spacings)
    found = [fit_budget(problem, low + (high - low) * i // 4) for i in range(5)]
    assert all(fit.peak_bytes <= low + (high - low) * i // 4 for i, fit in enumerate(found))
    assert all(fit.bound_seconds <= fit.seconds for fit in found)
    seconds = [fit.seconds for fit in found]
    assert seconds == sorted(seconds, reverse=True)
    points = [
        min(r.seconds for spacing in spacings for r in spacing.sampled if r.peak_bytes <= fit.peak_bytes)
        for fit in found
    ]
    assert all(fit.seconds <= point for fit, point in zip(found, points, strict=True))


def test_a_budget_below_all_plans_gives_the_smallest():
    problem = residual_blocks(14, 3)
    smallest = min(r.peak_bytes for spacing in problem.spacings() for r in spacing.sampled)
    assert fit_budget(problem, 1).peak_bytes == smallest


def test_the_backward_repeats_what_a_value_is_made_from_once_and_before_its_first_use():
    problem = residual_blocks(14, 2)
    graph, fuse = problem.graph, problem.fuse
    both = [s for s, op in enumerate(graph.allocator) if op in (0, 1)]  # `up` and `act` of the first block
    again = recompute_on_graph(graph, fuse, both)
    names = [op.name for op in again.graph.ops]
    at = len(names) - 1 - names[::-1].index("dW2")
    assert names[at - 2 : at + 1] == ["up", "act", "dW2"] and len(names) == len(graph) + 2
    repeated = {s for op in again.graph.ops[at - 2 : at] for s in op.allocates}
    assert repeated.isdisjoint(range(len(graph.storages))) and repeated & set(again.graph.ops[at].reads)
    assert [again.source[i] for i in (at - 2, at - 1)] == [0, 1]


@pytest.mark.parametrize(("seed", "share", "seconds"), [(0, 2, 8), (1, 1, 14)])
def test_where_the_integer_program_stops_early_a_cheaper_rung_is_taken(monkeypatch, seed, share, seconds):
    """As in large programs, here with a gap that accepts nearly every solution."""
    monkeypatch.setattr(budget_search, "_EXACT", 0)
    monkeypatch.setattr(budget_search, "_LARGE_GAP", 0.9)
    monkeypatch.setattr(budget_search, "_SAMPLED_OPS", 0)  # only the two ends of a curve are tried beforehand
    problem = residual_blocks(seed, 4)
    spacing = next(problem.spacings())
    budget_bytes = spacing.low_bytes + (spacing.high_bytes - spacing.low_bytes) * share // 4
    found = fit_budget(problem, budget_bytes)
    assert found.peak_bytes <= budget_bytes and found.seconds <= seconds
