"""Offloaded values come back as they left: the same gradients, the predicted bytes, on the traces that are planned."""

import re

import pytest
import thunder
import torch

from tests.programs.offload_cases import PROGRAMS, compiled, stack, step, tightest, transfers
from thunder_mem import MemEfficient, explain, last_plan, measure_peak, predict, predict_step, simulate
from thunder_mem.partition.constraints import RecomputeError
from thunder_mem.trace.reading import read_trace
from thunder_mem.user_choices.offload import OffloadOption, parse_offload

# ---- what is asked for ----


@pytest.mark.parametrize(
    "given, option", [(False, None), (True, OffloadOption()), ("only:Gelu+", OffloadOption("Gelu+"))]
)
def test_what_may_be_offloaded_is_read(given, option):
    assert parse_offload(given) == option


@pytest.mark.parametrize("given", ["", "Gelu+", "only:", "only:Ge lu", "only:Gelu++Add", "all"])
def test_other_strings_are_value_errors(given):
    with pytest.raises(ValueError, match='"only:PATTERN"'):
        MemEfficient(budget="1GiB", offload=given)


@pytest.mark.parametrize("given", [1, None, ["only:Gelu+"]])
def test_other_types_are_type_errors(given):
    with pytest.raises(TypeError, match="offload is True, False or"):
        MemEfficient(budget="1GiB", offload=given)


@pytest.mark.parametrize("given", [True, "only:Gelu+"])
def test_without_a_budget_there_is_nothing_to_offload_for(given):
    with pytest.raises(ValueError, match="give budget="):
        MemEfficient(offload=given)


def test_a_pattern_that_matches_nothing_names_those_that_do():
    with pytest.raises(RecomputeError, match=r"Sofmax\+ matches nothing .*Linear\+Softmax\+"):
        compiled(stack(), 1000, offload="only:Sofmax")(torch.randn(512, 64))


def assert_copies_end_before_writes(forward):
    """No op writes to a value between the start and the end of its copy to the host; its end still reads the value."""
    source = read_trace(forward)
    ends = {b.args[0].name: i for i, b in enumerate(source.bsyms) if b.sym.name == "offload_wait"}
    starts = {i: b for i, b in enumerate(source.bsyms) if b.sym.name == "offload"}
    assert len(starts) == len(ends) > 0
    for start, bsym in starts.items():
        copied = source.storage_of[bsym.args[0].name]
        end = ends[bsym.output.name]
        assert copied in source.graph.ops[end].reads
        assert not any(copied in op.writes for op in source.graph.ops[start:end])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_gradients_are_those_of_eager_and_bytes_are_those_predicted(name):
    make, executors = PROGRAMS[name]
    x = torch.randn(64 * 8, 64) * 2
    tight, found = tightest(make, x, executors)
    plan = last_plan(tight)
    assert plan.budget.offloaded and plan.budget.host_bytes > 0
    assert_copies_end_before_writes(thunder.last_traces(tight)[-1])
    exact = make().double()
    for ours, theirs in zip(found, step(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5 * theirs.abs().max().item())

    def run():
        tight(x).square().mean().backward()

    def without_gradients():
        for p in tight._model.parameters():
            p.grad = None

    without_gradients()
    predicted = predict_step(tight, None, lambda out: out.square().mean(), x)
    without_gradients()
    assert predicted.measured_bytes == measure_peak(run)
    assert predicted.host_bytes == plan.budget.host_bytes
    assert predict(tight, x).timeline[-1].host_bytes == 0


@pytest.mark.slow
def test_dropout_draws_the_same_masks():
    x = torch.randn(512, 64)
    free = compiled(stack(dropout=0.5))
    expected = step(free._model, free, x)
    _, found = tightest(lambda: stack(dropout=0.5), x, ())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_second_backward_finds_everything_where_it_was():
    x = torch.randn(512, 64)
    tight, expected = tightest(stack, x, ("mem_pointwise",))
    model = tight._model
    model.zero_grad()
    torch.manual_seed(1)
    loss = tight(x).square().sum()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    for ours, theirs in zip((p.grad for p in model.parameters()), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_simulated_gpu_offloads_to_pinned_memory_that_does_not_count():
    torch.manual_seed(0)
    with simulate("A100-40GB"), torch.device("cuda"):
        layers = ((torch.nn.Linear(512, 512), torch.nn.Softmax(-1)) for _ in range(6))
        model = torch.nn.Sequential(*(layer for pair in layers for layer in pair))
        x = torch.zeros(6000, 512)
        smallest = compiled(model, 1, offload=False, on_infeasible="warn")
        with pytest.warns(UserWarning, match="no plan"):
            predict(smallest, x)
        budget = last_plan(smallest).candidate.peak_bytes - 1
        tight = compiled(model, budget)
        found = predict(tight, x)
        plan = last_plan(tight)
        assert plan.budget.offloaded and plan.budget.peak_bytes <= budget
        assert max(found.phase(half).peak_bytes for half in ("forward", "backward")) <= budget
        assert found.host_bytes == plan.budget.host_bytes == len(plan.budget.offloaded) * 2**24  # of 12,288,000
        forward, backward = thunder.last_traces(tight)[-1], thunder.last_backward_traces(tight)[-1]
        report = str(explain(tight, x, detail=True))
    assert {b.sym.name for b in transfers(forward)} == {"offload", "offload_wait"}
    assert {b.sym.name for b in transfers(backward)} == {"prefetch", "prefetch_wait"}
    assert {b.args[1] for b in transfers(backward) if b.sym.name == "prefetch"} == {"cuda:0"}
    assert re.search(rf"{len(plan.budget.offloaded)} values? to the host and back", report)


@pytest.mark.slow
def test_only_a_pattern_is_offloaded():
    x = torch.randn(512, 64)
    tight, _ = tightest(lambda: stack(dropout=0.1), x, (), offload="only:Linear+Softmax+")
    assert len(last_plan(tight).budget.offloaded) <= 4


def test_without_a_backward_there_is_nothing_to_offload():
    x = torch.randn(512, 64)
    jitted = compiled(stack(dropout=0.0), "1 MiB", offload="only:Softmax+")
    with torch.no_grad():
        found = jitted(x)
    torch.testing.assert_close(found, stack(dropout=0.0)(x).detach(), rtol=1e-5, atol=1e-6)
    assert not last_plan(jitted).budget.offloaded
