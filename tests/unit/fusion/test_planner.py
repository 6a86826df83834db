"""Plans of generated graphs with random executors: what they compute, what they hold, and what they depend on."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checking.graphs import (
    Builder,
    layered,
    recomputed_chains,
    renamed,
    reordered,
    scaled,
    series_parallel,
    shuffled,
    training,
)
from tests.programs.fusible import EXECUTORS, check_plan, fusible, fusible_graphs, half_peaks, plan_live_bytes
from thunder_mem.fusion import arrangement
from thunder_mem.fusion.arrangement import THUNDERS_OWN, arrange, between_halves, fingerprint
from thunder_mem.fusion.contraction import FusionCapabilities, consecutive_groups
from thunder_mem.memory.graph import Graph, GraphError
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.plan import Plan, PlannedRegion
from thunder_mem.sorting import SORTS

ROOT = Path(__file__).parents[3]


def peaks(plan: Plan) -> tuple[int, int]:
    return plan.candidate.forward_peak_bytes, plan.candidate.backward_peak_bytes


def of(plan: Plan, name: str) -> tuple[int, int]:
    candidate = next(c for c in plan.candidates if c.name == name)
    return candidate.forward_peak_bytes, candidate.backward_peak_bytes


# ---- what a plan computes and holds ----


def check_peaks(graph: Graph, plan: Plan) -> None:
    """Assert that a plan's peaks are those of its steps, whichever of a value and its copy a region reads."""
    least, most = (half_peaks(plan, plan_live_bytes(graph, plan, copies_first=first)) for first in (True, False))
    assert all(a <= peak <= b for a, peak, b in zip(least, peaks(plan), most, strict=True))


@settings(max_examples=300)
@given(fusible_graphs(30))
@pytest.mark.slow
def test_a_plan_runs_every_op_once_in_a_legal_order(drawn):
    graph, fuse = drawn
    check_plan(graph, fuse, arrange(graph, fuse, EXECUTORS).plan)


@pytest.mark.slow
@settings(max_examples=300)
@given(fusible_graphs(30))
def test_planned_peaks_are_those_of_the_plan_run_step_by_step(drawn):
    graph, fuse = drawn
    plan = arrange(graph, fuse, EXECUTORS).plan
    check_peaks(graph, plan)
    assert plan.candidate.regions == len(plan.regions)
    assert plan.candidate.peak_bytes == max(peaks(plan))


@settings(max_examples=300)
@given(fusible_graphs(30))
@pytest.mark.slow
def test_no_half_is_above_thunders_own_arrangement_and_that_is_what_it_says(drawn):
    graph, fuse = drawn
    plan = arrange(graph, fuse, EXECUTORS).plan
    own = of(plan, THUNDERS_OWN)
    assert all(mine <= thunders for mine, thunders in zip(peaks(plan), own, strict=True))
    assert plan.candidate.peak_bytes == min(
        c.peak_bytes for c in plan.candidates if c.forward_peak_bytes <= own[0] and c.backward_peak_bytes <= own[1]
    )


@settings(max_examples=300)
@given(fusible_graphs(24))
@pytest.mark.slow
def test_no_half_is_above_what_thunder_would_run(drawn):
    """Neighbours that one executor takes together are fused, the others run op by op, in source order."""
    graph, fuse = drawn
    groups = [group for group in consecutive_groups(graph, fuse) if fuse.executors(group)]
    regions = graph.contract(groups)
    halves: tuple[list[int], list[int]] = ([], [])
    for op, live in zip(regions.ops, price_order(regions).live_bytes, strict=True):
        halves[op.backward].append(live)
    plan = arrange(graph, fuse, EXECUTORS).plan
    assert all(mine <= max(thunders, default=0) for mine, thunders in zip(peaks(plan), halves, strict=True))


@given(fusible_graphs(30, often=0.0))
def test_without_fusible_ops_the_plan_is_an_order(drawn):
    graph, fuse = drawn
    plan = arrange(graph, fuse, ()).plan
    order = [op for region in plan.regions for op in region.ops]
    assert all(len(region.ops) == 1 and region.executor is None for region in plan.regions)
    assert plan.candidate.peak_bytes == price_order(graph, order).peak_bytes <= price_order(graph).peak_bytes


# ---- what a plan depends on ----


@given(fusible_graphs(30))
@pytest.mark.slow
def test_planning_again_gives_the_same(drawn):
    graph, fuse = drawn
    assert arrange(graph, fuse, EXECUTORS).plan == arrange(graph, replace(fuse), EXECUTORS).plan


@pytest.mark.slow
@given(fusible_graphs(30))
def test_names_play_no_part(drawn):
    graph, fuse = drawn
    plan, other = arrange(graph, fuse, EXECUTORS).plan, arrange(renamed(graph), fuse, EXECUTORS).plan
    assert replace(other, fingerprint=plan.fingerprint) == plan


@given(fusible_graphs(30))
@pytest.mark.slow
def test_plans_scale_with_the_sizes(drawn):
    graph, fuse = drawn
    graph = scaled(graph, 16)  # beyond what counts as a number
    plan, fourfold = arrange(graph, fuse, EXECUTORS).plan, arrange(scaled(graph, 4), fuse, EXECUTORS).plan
    assert fourfold.regions == plan.regions and fourfold.chosen == plan.chosen
    assert [(4 * c.forward_peak_bytes, 4 * c.backward_peak_bytes) for c in plan.candidates] == [
        (c.forward_peak_bytes, c.backward_peak_bytes) for c in fourfold.candidates
    ]


@pytest.mark.slow
@given(fusible_graphs(30))
def test_planning_what_was_planned_does_not_raise_it_and_comes_to_rest(drawn):
    """Regions, once fused, are ops that nobody fuses: only their order is open, and a second look may better
    it, a third finds nothing."""
    graph, fuse = drawn
    emitted, peak = run_regions(graph, arrange(graph, fuse, EXECUTORS).plan)
    unfused = FusionCapabilities(
        (0,) * len(emitted), (0,) * len(emitted), 0, (False,) * len(emitted), emitted.predecessors
    )
    second = arrange(emitted, unfused, ()).plan
    assert second.candidate.peak_bytes <= peak
    order = [op for region in second.regions for op in region.ops]
    third = arrange(reordered(emitted, order), unfused, ()).plan
    assert third.candidate.peak_bytes == second.candidate.peak_bytes
    assert [region.ops for region in third.regions] == [(i,) for i in range(len(emitted))]


def run_regions(graph: Graph, plan: Plan) -> tuple[Graph, int]:
    """A plan's regions as ops of their own, and their peak in the plan's order."""
    if any(region.copies for region in plan.regions):
        plan = replace(plan, regions=tuple(PlannedRegion((op.index,), backward=op.backward) for op in graph.ops))
    small = graph.contract([region.ops for region in plan.regions])
    position = {op.payload: op.index for op in small.ops}
    order = [position[region.ops] for region in plan.regions]
    return reordered(small, order), price_order(small, order).peak_bytes


def several_plans() -> str:
    plans = []
    for seed in range(12):
        shapes = (layered(seed, 40), series_parallel(seed, 30), training(seed, 6, True), recomputed_chains(seed, 4))
        plans += [arrange(*fusible(graph, seed), EXECUTORS).plan.to_json() for graph in shapes]
    return json.dumps(plans)


@pytest.mark.slow  # test_determinism.py compares four processes
def test_another_process_makes_the_same_plans():
    """With another hash seed: this one's is drawn at its start."""
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.unit.fusion.test_planner import *; print(several_plans())"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert other.strip() == several_plans()


def test_the_fingerprint_tells_graphs_apart_and_ignores_names():
    graph = training(0, 3)
    assert fingerprint(renamed_storages(graph)) == fingerprint(graph)
    others = [
        scaled(graph, 2),
        replace(graph, outputs=frozenset()),
        training(1, 3),
        replace(graph, predecessors=((),) * len(graph)),
        replace(graph, storages=tuple(replace(s, held=False) for s in graph.storages)),
        replace(graph, storages=tuple(replace(s, device="cuda:0") for s in graph.storages)),
        replace(graph, ops=tuple(replace(op, name="other") for op in graph.ops)),
    ]
    assert len({fingerprint(g) for g in [graph, *others]}) == len(others) + 1


def renamed_storages(graph: Graph) -> Graph:
    return replace(graph, storages=renamed(graph).storages)


# ---- the developer's order ----


@given(fusible_graphs(24), st.sampled_from(sorted(SORTS)))
def test_every_named_sort_gives_a_legal_plan_that_is_never_above_thunders_own(drawn, name):
    graph, fuse = drawn
    plan = arrange(graph, fuse, EXECUTORS, sort=name).plan
    check_plan(graph, fuse, plan)
    check_peaks(graph, plan)
    assert all(a <= b for a, b in zip(peaks(plan), of(plan, THUNDERS_OWN), strict=True))


@given(fusible_graphs(24), st.randoms(use_true_random=False))
def test_a_developers_order_is_one_of_the_candidates_and_cannot_harm(drawn, rng):
    graph, fuse = drawn

    def at_random(half: Graph) -> list[int]:
        payload = {op.payload: i for i, op in enumerate(half.ops)}
        return [payload[op.payload] for op in shuffled(half, rng).ops]

    plan = arrange(graph, fuse, EXECUTORS, sort=at_random).plan
    assert {c.name for c in plan.candidates} == {"planned", "planned, source order", THUNDERS_OWN}
    check_plan(graph, fuse, plan)
    assert all(a <= b for a, b in zip(peaks(plan), of(plan, THUNDERS_OWN), strict=True))
    assert plan.sort == ("at_random" if plan.chosen == "planned" else "source")


def test_a_developers_order_that_breaks_an_edge_is_refused():
    graph, fuse = fusible(training(0, 3), 0)
    with pytest.raises(GraphError, match="breaks the edge"):
        arrange(graph, fuse, EXECUTORS, sort=lambda half: range(len(half) - 1, -1, -1))


# ---- by hand ----


def fan(width: int = 6, size: int = 64):
    """Issue #1337: all paths are opened before the first is closed; everything can be fused."""
    b = Builder()
    x = b.storage(size, held=True)
    opened = [b.op((x,), size, name="open") for _ in range(width)]
    total = b.op((opened[0],), size, name="first")
    for path in opened[1:]:
        total = b.op((total, path), size, name="add")
    graph = b.build(outputs=(total,))
    n = len(graph)
    operands = tuple(tuple(sorted({graph.allocator[s] for s in op.reads} - {None})) for op in graph.ops)
    return graph, FusionCapabilities((1,) * n, (0,) * n, 0, (False,) * n, operands)


def test_paths_are_not_fused_side_by_side():
    """With matmuls at the ends of the paths Thunder's neighbours hold all paths at once, the plan one."""
    graph, fuse = fan()
    n = len(graph)
    takes = tuple(int(op.name != "add") for op in graph.ops)
    plan = arrange(graph, replace(fuse, takes=takes), ("first",)).plan
    assert of(plan, THUNDERS_OWN)[0] == 64 * (1 + 6 + 1)
    assert peaks(plan)[0] == 64 * (1 + 1 + 2)
    assert len(plan.regions) == n - 2  # the first path's two ops and the opening of the second run as one


def test_a_chain_of_everything_is_one_region():
    graph, fuse = fan()
    plan = arrange(graph, fuse, ("first",)).plan
    assert [region.ops for region in plan.regions] == [tuple(range(len(graph)))]
    assert plan.regions[0].executor == "first" and peaks(plan) == (64 * 2, 0)


def upcast_chain(layers: int = 4):
    """Matmuls, each over an upcast and a scaling of the same small tensor, in the forward and the backward."""
    b = Builder()
    x = b.storage(100, held=True)
    kinds: list[tuple[bool, bool]] = []  # fusible, cheap

    def op(reads, size, fusible=False, cheap=False, backward=False):
        kinds.append((fusible, cheap))
        return b.op(reads, size, backward=backward)

    base = op((x,), 100)
    wide = op((base,), 400, True, True)
    out = op((op((wide,), 100, True),), 100)
    for _ in range(layers):
        out = op((op((wide, out), 100, True),), 100)
    grad = op((out,), 100, backward=True)
    for _ in range(layers):
        grad = op((op((wide, grad), 100, True, backward=True),), 100, backward=True)
    graph = b.build(outputs=(out, grad))
    operands = tuple(tuple(sorted({graph.allocator[s] for s in o.reads} - {None})) for o in graph.ops)
    n = len(graph)
    return graph, FusionCapabilities(tuple(int(f) for f, _ in kinds), (0,) * n, 0, tuple(c for _, c in kinds), operands)


def test_an_upcast_is_rebuilt_in_each_reader_and_neither_kept_nor_saved():
    graph, fuse = upcast_chain()
    plan = arrange(graph, fuse, ("first",)).plan
    check_plan(graph, fuse, plan)
    holders = [region for region in plan.regions if 1 in region.ops]
    assert len(holders) == 9 and all(region.copies == (1,) for region in holders)
    assert any(region.backward for region in holders)
    assert peaks(plan)[0] <= of(plan, THUNDERS_OWN)[0] - 300
    assert peaks(plan)[1] <= of(plan, THUNDERS_OWN)[1] - 300


def test_layers_of_the_same_program_make_large_plans_fast_enough_to_test():
    """Not a timing: a graph of a thousand ops plans, and its plan is right."""
    graph, fuse = fusible(layered(3, 1000), 3)
    plan = arrange(graph, fuse, EXECUTORS).plan
    check_plan(graph, fuse, plan)
    check_peaks(graph, plan)


# ---- merges that leave results to be written over what dies ----


def gated_backward(overwriting: int) -> tuple[Graph, FusionCapabilities]:
    """A product is made again, and two gradients of its factors: only the last of the three frees a factor.

    Before them a region needs more memory, unless it writes its result over its argument. Each region has two ops.
    """
    b, fused = Builder(), list[int]()

    def matmul(reads, nbytes):
        return b.op(reads, nbytes)

    def region(*reads):
        fused.extend([len(b.ops), len(b.ops) + 1])
        nbytes = b.storages[reads[0]].nbytes
        return b.op((b.op(reads, nbytes),), nbytes)

    x = b.storage(8, held=True)
    outputs = [matmul((region(matmul((x,), 300)),), 8)]
    gate, up, gradient = (matmul((x, outputs[0]), 100) for _ in range(3))
    outputs += [matmul((region(gate, up),), 8), matmul((region(gradient, gate),), 8)]
    outputs.append(matmul((region(gradient, gate, up),), 8))
    graph = b.build(outputs)
    takes = tuple(int(op in fused) for op in range(len(graph)))
    operands = tuple(tuple(sorted({m for s in op.reads if (m := graph.allocator[s]) is not None})) for op in graph.ops)
    return graph, FusionCapabilities(
        takes, (0,) * len(graph), 0, (False,) * len(graph), operands, overwriting=overwriting
    )


def test_a_merge_leaves_results_to_be_written_over_what_dies():
    """All three regions read the gate, and two at once fit. But then none of their results is over what dies."""
    graph, fuse = gated_backward(overwriting=1)
    arranged = arrange(graph, fuse, ("first",))
    plan, lower = arranged.plan, arranged.merged_for_reuse()
    check_plan(graph, fuse, lower)
    assert max(peaks(lower)) == max(peaks(plan))
    assert (plan.overwritten_peak_bytes, lower.overwritten_peak_bytes) == (524, 424)


def test_merges_stay_if_no_region_writes_over_what_dies():
    arranged = arrange(*gated_backward(overwriting=0), ("first",))
    assert arranged.merged_for_reuse() == arranged.plan


# ---- what a plan costs ----


@pytest.mark.parametrize("seed", [0, 3, 7, 15])
def test_more_copies_are_priced_only_if_they_replace_a_value_outside_of_regions(seed, monkeypatch):
    graph, fuse = fusible(layered(seed, 20), seed)
    priced, propose = [], arrangement._propose
    monkeypatch.setattr(arrangement, "_propose", lambda *args: priced.append(args) or propose(*args))
    plan = arrange(graph, fuse, EXECUTORS).plan
    assert len(priced) == 1
    monkeypatch.setattr(arrangement, "_may_lower", lambda chains, best: True)
    assert arrange(graph, fuse, EXECUTORS).plan == plan
    assert len(priced) == 3


def test_more_copies_lower_a_peak(monkeypatch):
    """Values that copies keep alive are made again from each other, where that pays."""
    graph, fuse = fusible(layered(74, 20), 74)
    lower = arrange(graph, fuse, EXECUTORS).plan
    check_plan(graph, fuse, lower)
    monkeypatch.setattr(arrangement, "_may_lower", lambda chains, best: False)
    assert lower.candidate.peak_bytes < arrange(graph, fuse, EXECUTORS).plan.candidate.peak_bytes


def test_bytes_between_the_halves_are_those_that_every_order_has_there():
    graph, _ = upcast_chain()
    last = max(op.index for op in graph.ops if not op.backward)
    live_bytes = price_order(graph, range(len(graph))).live_bytes
    dying = sum(
        s.nbytes for s, users in zip(graph.storages, graph.users, strict=True) if users[-1:] == (last,) and not s.held
    )
    assert between_halves(graph) == live_bytes[last] - dying > 0
