"""What may be offloaded, what is, and when its copies run."""

from dataclasses import replace

import pytest
import torch
from thunder.core.trace import from_trace

from tests.checking.graphs import training
from tests.programs.offload_cases import PROGRAMS, stack, transfers
from thunder_mem.analysis.partition_problem import study_program
from thunder_mem.decisions.budget_loop import within_budget
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.device_models import device_model
from thunder_mem.partition.budget_search import fit_budget
from thunder_mem.partition.evaluation import evaluate
from thunder_mem.partition.milp_memory_rows import memory_rows
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.partition.offload_on_graph import move_in_backward
from thunder_mem.partition.offload_search import fit_with_offload
from thunder_mem.partition.recompute_on_graph import recompute_on_graph
from thunder_mem.rewrites.offload import offload_obstacle
from thunder_mem.rewrites.transfer_scheduling import schedule_transfers
from thunder_mem.trace.renaming import renamed
from thunder_mem.trace.verification import VerificationError, verify_rewrite
from thunder_mem.user_choices.offload import OffloadOption, moves_for

# ---- what may not ----


def studied(model, x):
    study = study_program(model, (x,), {}, executors=[])
    return study.source, study.problem


@pytest.mark.slow
def test_the_caller_keeps_what_it_holds():
    source, _ = studied(stack(), torch.randn(512, 64))
    graph = source.graph
    for s in graph.storages:
        reason = offload_obstacle(source, s.index)
        maker = graph.allocator[s.index]
        if maker is None or graph.ops[maker].backward or s.index in graph.outputs or s.held:
            assert reason is not None
        assert offload_obstacle(source, s.index, s.nbytes + 1) is not None
    assert any(offload_obstacle(source, s) is None for s in saved_storages(graph))


def test_what_is_overwritten_stays():
    source, _ = studied(stack(), torch.randn(512, 64))
    s = next(s for s in saved_storages(source.graph) if offload_obstacle(source, s) is None)
    assert offload_obstacle(replace(source, overwritten=frozenset({s})), s) == "it is overwritten"


def test_what_shows_a_part_of_its_storage_stays():
    def program(x, w):
        return (x @ w)[:, ::2].exp()

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    source = study_program(program, (x, w), {}, executors=[]).source
    made = {offload_obstacle(source, s) for s in range(len(source.graph.storages))}
    assert made <= {None, "the forward does not make it", "the caller holds it"}
    shown = replace(source, layout=_Partial())
    assert {offload_obstacle(shown, s) for s in saved_storages(source.graph) - source.graph.outputs} <= {
        "no tensor shows all of it"
    }


class _Partial:
    """A layout in which no tensor shows all of its storage."""

    def is_dense(self, name):
        return False


# ---- graphs and traces ----


def problem_of(seed: int):
    graph = training(seed, 4)
    nobody = (0,) * len(graph)
    producers = [{graph.allocator[s] for s in op.reads} - {None, op.index} for op in graph.ops]
    operands = tuple(tuple(sorted(p)) for p in producers)
    return graph, FusionCapabilities(nobody, nobody, 0, (False,) * len(graph), operands)


@pytest.mark.parametrize("seed", range(8))
def test_the_backward_of_a_graph_reads_what_it_fetches(seed):
    graph, fuse = problem_of(seed)
    saved = saved_storages(graph)
    moved = frozenset(s for s in saved if not graph.storages[s].held and s not in graph.outputs)
    new = move_in_backward(recompute_on_graph(graph, fuse, ()), moved)
    assert moved
    for op in new.graph.ops:
        assert not (op.backward and moved & {*op.reads, *op.writes})
    left, came = ([i for i in new.moves if new.graph.ops[i].backward == half] for half in (False, True))
    assert sorted(new.moves[i] for i in left) == sorted(new.moves[i] for i in came) == sorted(moved)
    for i in came:
        (fresh,) = new.graph.ops[i].allocates
        assert new.graph.storages[fresh].nbytes == graph.storages[new.moves[i]].nbytes
    plain = evaluate(graph, fuse, frozenset(), "source")
    tight = evaluate(graph, fuse, frozenset(), "source", moved)
    assert tight.peak_bytes <= plain.peak_bytes
    assert _between(plain) - _between(tight) == sum(graph.storages[s].nbytes for s in moved)


def _between(trial) -> int:
    """Bytes that live from the forward into the backward."""
    graph = trial.timeline.graph
    first = next(op.index for op in graph.ops if op.backward)
    return sum(
        s.nbytes
        for s, maker, users in zip(graph.storages, graph.allocator, graph.users, strict=True)
        if (maker is None or maker < first) and users and users[-1] >= first and not s.held
    )


@pytest.mark.parametrize("name", ["softmax", "views", "in place"])
@pytest.mark.slow
def test_a_trial_is_what_is_planned(name):
    study = study_program(PROGRAMS[name][0](), (torch.randn(512, 64),), {}, executors=[])
    source, problem = study.source, study.problem
    moved = frozenset(s for s in saved_storages(source.graph) if offload_obstacle(source, s) is None)
    planned = study.plan(frozenset(), moved)
    assert planned.peak_bytes <= problem.trial(frozenset(), moved).peak_bytes < problem.trial(frozenset()).peak_bytes
    host = [s for s in planned.source.graph.storages if s.host_bytes]
    assert all(s.nbytes == 0 for s in host)
    assert {s.host_bytes for s in host} == {source.graph.storages[s].nbytes for s in moved}
    verify_rewrite(planned.program.trace, planned.trace)


def broken(trace, change):
    """The trace with each of its bound symbols as `change` gives it back: none, one or several."""
    new = from_trace(trace)
    new.bound_symbols = [b for old in trace.bound_symbols for b in change(old)]
    return new


@pytest.mark.slow
def test_what_is_away_may_not_be_used_and_what_comes_back_is_what_left():
    study = study_program(stack(4, 0.0), (torch.randn(512, 64),), {}, executors=[])
    source = study.source
    moved = frozenset(s for s in saved_storages(source.graph) if offload_obstacle(source, s) is None)
    planned = study.plan(frozenset(), moved)
    copies = transfers(planned.trace)
    hosts = [b.args[0] for b in copies if b.sym.name == "prefetch"]
    fetched = next(b for b in copies if b.sym.name == "prefetch_wait")

    def early(bsym):  # uses what is still coming
        return [] if bsym is fetched else [renamed(bsym, {fetched.output.name: fetched.args[0]}, outputs=False)]

    def swapped(bsym):  # fetches another value
        swap = {hosts[0].name: hosts[1], hosts[1].name: hosts[0]}
        return [renamed(bsym, swap, outputs=False) if bsym.sym.name == "prefetch" else bsym]

    verify_rewrite(planned.program.trace, planned.trace)
    for change, what in ((early, "on its way"), (swapped, "computed from other values")):
        with pytest.raises(VerificationError, match=what):
            verify_rewrite(planned.program.trace, broken(planned.trace, change))


# ---- what is chosen ----


def moving(study, device, **changes):
    """The program's problem, in which all may be offloaded that may be at all."""
    source, problem = study.source, study.problem
    device = replace(device, **changes)
    moves = moves_for(OffloadOption(), source, problem.fuse, problem.choices, frozenset(), device, "cpu")
    return replace(problem, moves=moves)


@pytest.fixture(scope="module")
def deep():
    return study_program(stack(6), (torch.randn(512, 64),), {}, executors=[])


@pytest.mark.slow
def test_a_budget_out_of_reach_of_recomputation_is_met_by_offloading(deep):
    problem = moving(deep, device_model("cpu"))
    smallest = fit_budget(problem, 1)
    fit = fit_with_offload(problem, smallest.peak_bytes - 1)
    assert fit.offloaded and fit.peak_bytes < smallest.peak_bytes
    assert fit.peak_bytes == problem.trial(fit.rebuilt, fit.offloaded).peak_bytes
    assert fit.without_seconds is None


@pytest.mark.slow
def test_whatever_the_link_nothing_is_dearer_than_recomputing_and_all_fits(deep):
    free = deep.problem.trial(frozenset()).peak_bytes
    smallest = fit_budget(deep.problem, 1).peak_bytes
    for link in (1e6, 1e9, 1e12):
        problem = moving(deep, device_model("cpu"), link_bytes_per_s=link, copy_s=1e-9)
        for share in (0.1, 0.5, 0.9):
            budget = int(smallest + (free - smallest) * share)
            fit = fit_with_offload(problem, budget)
            assert fit.peak_bytes <= budget
            assert fit.seconds <= fit.without_seconds == fit_budget(problem, budget).seconds
            assert fit.offloaded.isdisjoint(fit.rebuilt)
            if link == 1e6:
                assert not fit.offloaded
            elif link == 1e12:
                assert fit.offloaded and fit.seconds == 0


@pytest.mark.parametrize("late_ms", (0, 1e6))
@pytest.mark.slow
def test_copies_that_turn_out_dearer_than_recomputing_are_given_up(deep, late_ms):
    """The final schedule may have less room beside the copies than the search assumed."""
    problem = moving(deep, device_model("cpu"), link_bytes_per_s=1e12, copy_s=1e-9)
    free = deep.plan(frozenset())
    budget = (free.peak_bytes + fit_budget(deep.problem, 1).peak_bytes) // 2

    def finish(planned):
        bought = planned.plan.budget
        late = replace(bought, exposed_ms=late_ms) if bought and bought.offloaded else bought
        return replace(planned, plan=replace(planned.plan, budget=late))

    found = within_budget(free, problem, budget, deep.plan, finish)
    assert found.peak_bytes <= budget
    assert bool(found.plan.budget.offloaded) == (late_ms == 0)


@pytest.mark.slow
def test_what_a_row_says_of_its_trial_is_what_is_alive(deep):
    problem = moving(deep, device_model("cpu"))
    spacing = next(problem.spacings())
    candidates = replace(spacing.candidates, movable=problem.moves.movable)
    rebuilt = spacing.points[-1].rebuilt
    moved = saved_storages(problem.graph, rebuilt) & candidates.movable
    for offloaded in (moved, frozenset(sorted(moved)[::2])):
        trial = problem.trial(rebuilt, offloaded)
        kept = saved_storages(problem.graph, rebuilt) - offloaded
        for row in memory_rows(candidates, trial):
            assert row.live_bytes(candidates, rebuilt, kept, offloaded) in trial.timeline.live_bytes


# ---- when copies run ----


def everything_moved(deep):
    source = deep.source
    moved = frozenset(s for s in saved_storages(source.graph) if offload_obstacle(source, s) is None)
    return deep.plan(frozenset(), moved)


@pytest.mark.slow
def test_copies_run_beside_other_work_as_far_as_there_is_room(deep):
    planned = everything_moved(deep)
    device = replace(device_model("cpu"), link_bytes_per_s=1e9)
    found = [schedule_transfers(planned.trace, device, limit) for limit in (1, planned.peak_bytes * 3 // 2, 10**9)]
    for scheduled, limit in zip(found, (1, planned.peak_bytes * 3 // 2, 10**9), strict=True):
        peak = max(scheduled.peaks)
        assert peak <= max(limit, planned.peak_bytes)
        assert 0 <= scheduled.exposed_s <= scheduled.link_s
        verify_rewrite(planned.program.trace, scheduled.trace)
        left = sum(s.host_bytes for s in planned.source.graph.storages)
        assert scheduled.host_bytes == left and len(scheduled.names) == len(transfers(scheduled.trace)) // 4
    assert found[2].exposed_s < found[1].exposed_s < found[0].exposed_s


@pytest.mark.slow
def test_what_the_work_hides_costs_nothing_and_what_it_does_not_is_exposed(deep):
    planned = everything_moved(deep)
    fast, slow = (replace(device_model("cpu"), link_bytes_per_s=rate, copy_s=0.0) for rate in (1e15, 1e6))
    assert schedule_transfers(planned.trace, fast, 10**9).exposed_s == pytest.approx(0, abs=1e-9)
    scheduled = schedule_transfers(planned.trace, slow, 10**9)
    assert scheduled.exposed_s > 0.95 * scheduled.link_s
    assert schedule_transfers(planned.program.trace, slow, 10**9) is None
