"""Reports: every figure equals the prediction's, and every decision, refusal and way to get lower is in them."""

import io
import json
import pickle
import re
from dataclasses import replace

import pytest
import rich.console
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import thunderfx
from torch import nn

from tests.programs import report_cases
from tests.programs.report_cases import synthetic
from thunder_mem.analysis.capacity import fits
from thunder_mem.memory.units import ranges, size
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.partition.budget import BudgetError
from thunder_mem.planning.record import last_plan
from thunder_mem.prediction.library_memory import cublas_workspace_bytes
from thunder_mem.prediction.predict import Prediction
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.report import Report, explain
from thunder_mem.report.advice import advice
from thunder_mem.report.facts import CATEGORIES
from thunder_mem.report.sections import sections
from thunder_mem.trace.origins import layer_numbers
from thunder_mem.transforms import MemEfficient


@pytest.fixture
def planned():
    return report_cases.planned()


@pytest.fixture
def unplanned():
    return report_cases.unplanned()


@pytest.fixture
def stacked():
    return report_cases.stacked()


DECISIONS = "Before and after each decision"


@pytest.mark.slow
def test_the_report_shows_the_predictions_peak_and_exactly_who_holds_it(planned):
    assert planned.peak_bytes == planned.prediction.peak_bytes == planned.peak.device_bytes
    assert sum(t.nbytes for t in planned.tenants) + planned.prediction.scratch_bytes == planned.peak_bytes
    assert sum(t.count for t in planned.tenants) == len(planned.prediction.held_at_peak)
    assert sum(t.share for t in planned.tenants) == pytest.approx(1)
    assert planned.headroom_bytes == 2**20 - planned.peak_bytes
    text = str(planned)
    assert f"({planned.peak_bytes:,} bytes)" in text
    assert f"{planned.peak.op} #{planned.peak.index}" in text
    for candidate in planned.plan.candidates:
        assert candidate.name in text


@pytest.mark.slow
def test_equal_layers_are_folded_into_one_row(planned):
    folded = [t for t in planned.tenants if t.count > 1]
    assert folded
    assert all(len(t.names) == min(t.count, 8) for t in folded)


def test_lines_of_the_users_code_are_found_even_for_the_backward(planned):
    peak = planned.peak
    assert peak.phase == "backward" and peak.place.undoes
    assert "report_cases.py" in str(peak.place)
    assert "gelu" in peak.place.code
    linear = next(planned.moment(i) for i, e in enumerate(planned.prediction.timeline) if e.name.endswith("linear"))
    assert linear.place.source == peak.place.source  # not the line inside torch.nn.Linear
    assert "gelu" in linear.place.code


def test_inside_a_fused_region_each_tensor_has_its_own_line():
    def f(x, w):
        h = x @ w
        a = h.sin() * 2  # sine
        b = h.cos() * 3  # cosine
        return (a @ w) * (b @ w)

    with simulate("T4"):
        x, w = (torch.ones(64, 64, device="cuda", requires_grad=True) for _ in range(2))
        report = explain(thunder.jit(f), x, w, bounds=False)
    facts, prediction = report._facts, report.prediction
    (region,) = [e for e in prediction.phase("forward").timeline if e.bsym.sym.is_fusion and len(e.outputs) == 2]
    made = [s for s in prediction.storages if s.born == region.index]
    assert sorted(facts.place_of(s).code.split("# ")[1] for s in made) == ["cosine", "sine"]
    backward = [i for i, e in enumerate(prediction.timeline) if e.phase == "backward" and e.bsym.sym.is_fusion]
    known = [facts.places[i] for i in backward if facts.places[i].source]
    assert known and all(place.undoes for place in known)


def test_equal_layers_are_named(stacked):
    folded = {t.names[0]: t for t in stacked.tenants if t.count > 1}
    weights = next(t for name, t in folded.items() if name.endswith("_0_weight"))
    assert (weights.count, weights.layers) == (3, (0, 1, 2))
    activations = next(t for t in folded.values() if t.category == "saved for the backward")
    assert len(activations.layers) == activations.count > 1
    assert f"3 × {size(weights.nbytes // 3)} in layers 0-2: " in str(stacked)


def test_layer_numbers_are_those_of_lists():
    names = ["h_0_norm_1", "h_1_norm_1", "h_0_norm_2", "h_1_norm_2", "wte", "fc_1", "fc_2"]
    assert layer_numbers(names, from_zero=True) == {"h_0_norm_1": 0, "h_1_norm_1": 1, "h_0_norm_2": 0, "h_1_norm_2": 1}
    assert layer_numbers((f"t_{i}_weight" for i in (0, 2, 4)), from_zero=True) == {
        "t_0_weight": 0,
        "t_2_weight": 2,
        "t_4_weight": 4,
    }
    assert ranges([0, 1, 2, 31, 30, 5]) == "0-2, 5, 30-31" and ranges([]) == ""


def test_each_decision_is_shown_before_and_after(stacked):
    shown = {s.title: s for s in sections(stacked)}[DECISIONS].rows
    assert [row[0] for row in shown] == ["saved for the backward", "regions", "order", "reuse"]
    for row, decision in zip(shown, stacked.plan.decisions, strict=True):
        assert row[3:5] == (size(decision.before_bytes), size(decision.after_bytes))
        assert decision.how in row[1]
    order, reuse = stacked.plan.decisions[-2:]
    assert order.after_bytes == reuse.before_bytes
    assert reuse.after_bytes == stacked.plan.candidate.peak_bytes


def test_a_chunked_head_is_a_decision():
    def loss(x, w, t):
        return F.cross_entropy(x @ w.T, t)

    args = torch.randn(4096, 8), torch.randn(8192, 8, requires_grad=True), torch.zeros(4096, dtype=torch.long)
    with simulate("T4"):
        jitted = thunder.jit(loss, executors=[], transforms=[MemEfficient(strict=True)])
        report = explain(jitted, *(t.to("cuda") for t in args), bounds=False)
    head = report.plan.decisions[0]
    assert (head.what, head.figure, head.before_bytes) == ("loss head", "logits", 4096 * 8192 * 4)
    assert head.after_bytes < head.before_bytes
    (row,) = [row for row in {s.title: s for s in sections(report)}[DECISIONS].rows if row[0] == "loss head"]
    assert "test_report.py" in row[1] and "chunks of" in row[1]
    gradient_bytes = 8192 * 8 * 4  # made in the forward, beside the loss, and handed over at the end
    assert report.layers[CATEGORIES.index("gradients")][-1] == gradient_bytes
    whys = {t.names[0]: t.why for t in report.tenants if t.kind == "tangent"}
    assert all(why.startswith("the gradient of an output") for why in whys.values())
    assert row[3:5] == (size(head.before_bytes), size(head.after_bytes))


def test_what_can_be_done_has_bytes_at_stake(stacked, unplanned):
    found = advice(stacked)
    assert [way.nbytes for way in found] == sorted((way.nbytes for way in found), reverse=True)
    by_text = {way.text.split(",")[0].split(":")[0]: way.nbytes for way in found}
    saved_bytes = stacked.peak.by_category[CATEGORIES.index("saved for the backward")]
    assert by_text["saved for the backward"] == saved_bytes
    assert by_text["parameters and inputs that the caller holds"] == stacked.prediction.held_bytes
    assert "nothing is fused" in by_text
    assert any("MemEfficient()" in way.text for way in advice(unplanned))
    assert advice(Report(Prediction((), (), 64, "cpu"))) == ()


def test_what_can_be_done_about_an_optimizer():
    model = nn.Linear(256, 256)
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient()])
    x = torch.randn(2, 256)
    prediction = predict_step(jitted, torch.optim.AdamW(model.parameters(), foreach=True), lambda out: out.sum(), x)
    report = explain(jitted, x, prediction=prediction)
    assert report.peak.phase == "optimizer" and report.optimality[0].proven
    texts = " ".join(way.text for way in advice(report))
    assert "fused=True" in texts and "optimizer's state" in texts and "gradients that wait" in texts


def test_each_microbatch_has_storages_of_its_own():
    """The same names come again in each; whoever reads one reads its own microbatch's."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    jitted, x = thunder.jit(model, executors=[]), torch.randn(32, 16)
    optimizer = torch.optim.SGD(model.parameters())
    prediction = predict_step(jitted, optimizer, lambda out: out.square().mean(), x, accumulate=2)
    report = explain(jitted, x, prediction=prediction, bounds=False)
    facts, timeline = report._facts, prediction.timeline
    tanhs = [s for s in prediction.storages if s.born >= 0 and timeline[s.born].name == "torch.tanh"]
    readers = [[timeline[p].index for p in facts.readers[prediction.storages.index(s)]] for s in tanhs]
    assert len(tanhs) == 2 and all(len(found) == len(readers[0]) > 1 for found in readers)
    assert all(s.born < p <= s.last for s, found in zip(tanhs, readers, strict=True) for p in found)
    assert "no operation reads" not in facts.why(tanhs[1], tanhs[1].born + 1)
    weights = [
        s for s in prediction.storages if s.shape == (16, 64) and s.born > tanhs[1].born and s.kind == "computed"
    ]
    (gradient,) = [s for s in weights if timeline[s.last].name == "aten::add_.Tensor"]
    assert facts.why(gradient, gradient.born + 1).startswith("a gradient, until aten::add_")


def test_arguments_choose_the_compilation():
    jitted = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient()])
    small, large = torch.randn(8, 16), torch.randn(512, 16)
    assert explain(jitted, small, bounds=False).plan is not None
    assert explain(jitted, large, bounds=False).plan is not None
    earlier = explain(jitted, small, bounds=False, detail=True)
    assert earlier.plan is None and "other arguments were compiled after these" in str(earlier)
    assert earlier.peak_bytes < explain(jitted, bounds=False).peak_bytes


def test_after_a_failed_plan_the_cause_is_reported_and_no_earlier_plan():
    def order(graph):
        if fails:
            raise RuntimeError("no order today")
        return range(len(graph))

    jitted = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient(sort=order)])
    fails = False
    assert explain(jitted, torch.randn(8), bounds=False).plan is not None
    fails = True
    with pytest.warns(UserWarning, match="no order today"):
        report = explain(jitted, torch.randn(16), bounds=False, detail=True)
    assert report.plan is None and last_plan(jitted) is None
    assert "could not plan this function" in str(report) and "RuntimeError: no order today" in str(report)
    assert "compile with transforms=[MemEfficient()]" not in str(report)
    fails = False
    report = explain(jitted, torch.randn(32), bounds=False)
    assert report.plan is not None and not any("could not plan" in note for note in report.notes)


def test_after_a_budget_that_nothing_fits_the_last_compilation_is_reported():
    jitted = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient(budget="1 KiB")])
    small = explain(jitted, torch.randn(8), bounds=False)
    with pytest.raises(BudgetError, match="1,024 bytes"):
        explain(jitted, torch.randn(1024), bounds=False)
    again = explain(jitted, bounds=False)
    assert (again.peak_bytes, again.plan) == (small.peak_bytes, small.plan) and again.plan is not None


def test_saved_views_count_once_in_a_bound():
    """The backward's trace alone does not show that what it receives shares memory."""

    def f(x, w):
        scale = x.sum(1, keepdim=True)
        return ((x * scale).sin() * w).sum() + scale.exp().sum()

    args = torch.randn(64, 128, requires_grad=True), torch.randn(128, requires_grad=True)
    for o in explain(thunder.jit(f, executors=[]), *args).optimality:
        assert not o.reason and o.bound_bytes <= o.peak_bytes


def test_the_categories_sum_to_the_live_bytes(planned):
    for report in (planned, Report(synthetic(200))):
        for event, *parts in zip(report.prediction.timeline, *report.layers, strict=True):
            assert sum(parts) == event.live_bytes + event.scratch_bytes
    at_peak = dict(zip(CATEGORIES, planned.peak.by_category, strict=True))
    assert at_peak["saved for the backward"] > 0
    assert at_peak["held by the caller"] == planned.prediction.held_bytes


def test_bounds_speak_of_the_predicted_bytes(planned, unplanned):
    assert [o.phase for o in planned.optimality] == ["forward", "backward"]
    for o in planned.optimality:
        assert not o.reason
        assert o.peak_bytes == planned.prediction.phase(o.phase).peak_bytes
        assert o.bound_bytes <= o.peak_bytes
        assert o.proven == (o.gap == 0)
    forward, backward = unplanned.optimality
    assert forward.proven
    assert backward.gap > 0  # Thunder's own order is not the best one
    assert backward.bound_bytes <= planned.optimality[1].peak_bytes < backward.peak_bytes


def test_the_peak_is_where_most_is_held_with_scratch_which_is_a_part_of_it():
    quiet = synthetic(20)
    assert ", scratch " not in str(Report(quiet))
    least = min(quiet.timeline, key=lambda e: e.live_bytes)
    busy = replace(least, scratch_bytes=2 * quiet.peak_bytes)
    loud = replace(quiet, timeline=tuple(busy if e is least else e for e in quiet.timeline))
    report = Report(loud)
    assert loud.peak_event is busy and loud.peak_bytes == least.live_bytes + 2 * quiet.peak_bytes
    assert report.peak_bytes == report.peak.device_bytes == sum(report.peak.by_category)
    first, _, parts, *_ = str(report).splitlines()
    where = f"in the {busy.phase}, at {busy.name} #{busy.index}"
    assert first == f"Peak {size(loud.peak_bytes)} ({loud.peak_bytes:,} bytes) {where}"
    assert f"scratch {size(busy.scratch_bytes)} ({busy.scratch_bytes / loud.peak_bytes:.0%})" in parts
    phases = {s.title: s for s in sections(report)}["Phases"].rows
    assert [row[2] for row in phases if row[0] == busy.phase] == [size(loud.peak_bytes)]


def test_without_memefficient_the_memory_is_reported_and_that_there_is_no_plan(unplanned):
    assert unplanned.plan is None and unplanned.headroom_bytes is None
    assert "MemEfficient made no plan" in str(unplanned)
    assert unplanned.peak_bytes > 0


def test_what_cannot_be_explained_says_why():
    never_called = thunder.jit(lambda x: x + 1, executors=[])
    with pytest.raises(ValueError, match="never been called"):
        explain(never_called)
    with pytest.raises(TypeError, match=r"thunder\.jit returned, not function"):
        explain(lambda x: x)
    with pytest.raises(TypeError, match=r"or a share of the device's memory .*, not 1\.5"):
        explain(never_called, budget=1.5)
    with pytest.raises(ValueError, match="positive, not -1"):
        explain(never_called, budget=-1)
    with pytest.raises(ValueError, match="'3 apples' is not a size"):
        explain(never_called, budget="3 apples")


def test_a_program_without_operations_has_a_report():
    report = Report(Prediction((), (), 64, "cpu"))
    assert report.peak is None and report.tenants == () and report.runner_ups == ()
    assert "Nothing runs" in str(report)


def test_a_budget_that_is_exceeded_is_called_so():
    report = Report(synthetic(20), budget_bytes=1)
    assert report.headroom_bytes == 1 - report.peak_bytes
    assert "does not fit into the budget, 1 B" in str(report)


def test_headroom_is_that_of_fits_and_of_the_command_line():
    """On a GPU blocks are rounded to 512 bytes; a budget that only the requested bytes fit is not enough."""
    with simulate("T4", fusion=None) as device:
        x = torch.ones(3, device="cuda")
        jitted = thunder.jit(lambda x: (x + 1, x + 2, x * x))
        report = explain(jitted, x, budget=4 * 512, bounds=False, detail=True)
        assert report.peak_bytes == 4 * 512 and report.headroom_bytes == 0
        assert sum(t.nbytes for t in report.tenants) == 4 * 512  # as the device holds them
        assert "fits into the budget, 2.00 KiB: headroom 0 B, every block rounded" in str(report)
        short = explain(jitted, x, budget=4 * 512 - 1, bounds=False)
        assert short.prediction.measured_bytes < short.budget_bytes and short.headroom_bytes == -1
        assert explain(jitted, x, budget="50%", bounds=False).budget_bytes == device.memory_bytes // 2
    answer = fits(lambda: nn.Linear(8, 8), None, [(3, 8)], device="T4")
    libraries_bytes = cublas_workspace_bytes((7, 5))  # a forward alone: one thread
    assert answer.headroom_bytes == answer.usable_bytes - libraries_bytes - Report(answer.prediction).peak_bytes


def test_the_budget_of_memefficient_is_the_reports():
    jitted = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient(budget="3MiB")])
    x = torch.randn(64)
    report = explain(jitted, x, bounds=False, detail=True)
    assert report.budget_bytes == 3 * 2**20 and "fits into the budget of MemEfficient, 3.00 MiB" in str(report)
    assert explain(jitted, x, budget="2 MiB", bounds=False).budget_bytes == 2 * 2**20
    assert "of MemEfficient" not in str(explain(jitted, x, budget="2 MiB", bounds=False, detail=True))
    whole = report.prediction
    assert explain(jitted, x, prediction=whole, bounds=False).budget_bytes is None  # it may hold what no plan saw


def test_every_refusal_is_listed_with_its_reason():
    """Two heads that cannot be chunked, for two reasons."""

    def losses(x, w, t):
        logits = x @ w.T
        couples_rows = (x @ w.T).softmax(0)
        return F.cross_entropy(logits, t) + F.cross_entropy(couples_rows, t), logits

    args = torch.randn(4096, 8), torch.randn(8192, 8, requires_grad=True), torch.zeros(4096, dtype=torch.long)
    with simulate("T4"):
        jitted = thunder.jit(losses, executors=[], transforms=[MemEfficient(strict=True)])
        report = explain(jitted, *(t.to("cuda") for t in args), bounds=False, detail=True)
    refused = report.plan.refused
    assert len({r.reason for r in refused}) == len(refused) == 2
    shown = {s.title: s for s in sections(report)}["Left as it was"].rows
    assert shown == tuple((r.what, r.reason) for r in refused)
    told = " ".join(str(report).split())
    assert all(r.reason in told and "test_report.py:" in r.reason for r in refused)


def test_rich_prints_names_with_brackets_as_they_are():
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(Report(synthetic(20, name="[red]x[/red]")))
    assert "[red]x[/red]" in console.export_text()


def test_json_says_the_same_and_is_plain(planned, tmp_path):
    planned.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["peak_bytes"] == max(data["timeline"]["live_bytes"]) == planned.peak_bytes
    assert sum(t["nbytes"] for t in data["tenants"]) == planned.peak_bytes
    assert data["plan"]["chosen"] == planned.plan.chosen
    assert len({len(column) for column in data["timeline"].values()}) == 1
    planned.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == f"{planned}\n"


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'report\.doc'.*\.json"):
        Report(synthetic(20)).save(tmp_path / "report.doc")


@pytest.mark.parametrize("through_fx", [False, True])
def test_what_only_pytorch_calls_is_named_by_its_module(through_fx, tmp_path):
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
    model = torch.nn.Sequential(layers, torch.nn.LayerNorm(16))
    torch._dynamo.reset()
    make = thunderfx if through_fx else thunder.jit
    step = make(model, executors=[], transforms=[MemEfficient(strict=True)])
    step(torch.randn(4, 8))
    report = explain(step, bounds=False, detail=True)
    text = str(report)
    assert all(name in text for name in ("module 0.0 (Linear)", "module 0.1 (GELU)", "module 1 (LayerNorm)"))
    assert not re.search(r"(activation|normalization|linear|container)\.py|<eval_with_key>", text)
    codes = [way.code for way in advice(report) if "transforms=" in way.code]
    assert codes == [f"{'thunderfx' if through_fx else 'thunder.jit'}(model, transforms=[MemEfficient(strict=True)])"]
    report.save(tmp_path / "snapshot.pickle")
    assert "module 0.1 (GELU)" in str(pickle.loads((tmp_path / "snapshot.pickle").read_bytes()))


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_at_the_peak_are_no_reason_for_updates_that_run_already(in_backward):
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)),
        torch.ones(4, 64),
    )
    optimizer = torch.optim.SGD(model.parameters())
    asked = StepInBackward(optimizer, max_norm=1.0) if in_backward else None
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(optimizer=asked)])
    prediction = predict_step(step, asked or optimizer, lambda y: y.square().mean(), x)
    said = str(explain(step, x, prediction=prediction, detail=True))
    assert ("with StepInBackward" in said, "two_pass=True" in said) == (not in_backward, in_backward)
