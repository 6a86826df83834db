"""The five lines of a report: figures of the report, modules that hold the peak, and code that runs."""

import copy
import re
from dataclasses import replace

import pytest
import thunder
import torch
from torch import nn

from tests.programs.report_cases import Stack, synthetic
from thunder_mem import MemEfficient, StepInBackward, Tiles, explain, predict, predict_step
from thunder_mem.memory.units import size
from thunder_mem.prediction.predict import Prediction
from thunder_mem.rendering.document import Document, Section
from thunder_mem.rendering.text import WIDTH, to_text
from thunder_mem.report import Report
from thunder_mem.report.advice import advice
from thunder_mem.report.brief import brief
from thunder_mem.report.facts import CATEGORIES, Facts
from thunder_mem.report.owners import modules_of

NAMES = {
    "thunder": thunder,
    "torch": torch,
    "MemEfficient": MemEfficient,
    "StepInBackward": StepInBackward,
    "Tiles": Tiles,
}


@pytest.fixture(scope="module")
def stack():
    return Stack(), torch.randn(256, 16)


@pytest.fixture(scope="module")
def report(stack):
    model, x = stack
    return explain(thunder.jit(model, executors=[], transforms=[MemEfficient()]), x, bounds=False)


@pytest.mark.slow
def test_it_names_the_peak_beside_eagers_and_thunders(stack, report):
    model, x = stack
    lines = str(report).splitlines()
    alone = predict(thunder.jit(model, executors=[]), x, keep_outputs=True)
    assert report.thunder_bytes == alone.peak_bytes > report.peak_bytes
    assert lines[0] == (
        f"At most {size(report.peak_bytes)} on the CPU; eager PyTorch {size(report.eager_bytes)}; "
        f"Thunder alone {size(alone.peak_bytes)}"
    )
    assert len(lines) == 5 and all(len(line) <= WIDTH for line in lines)
    assert report.peak.op in lines[1] and "report_cases.py:44: x = x + block" in lines[1]


def test_holders_are_modules_and_sum_to_the_peak(report):
    facts = Facts(report.prediction)
    modules = modules_of(facts, report.paths)
    storages = report.prediction.storages
    for i, storage in enumerate(storages):
        if storage.name in report.paths:
            assert report.paths[storage.name].startswith(f"{modules[i]}.")
    saved = [modules[i] for i, s in enumerate(storages) if facts.category(s) == CATEGORIES[1] and s.nbytes == 2**16]
    assert saved == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]  # the results of tanh, behind those layers
    line = str(report).splitlines()[2]
    assert line.startswith("  held by blocks.#.0 ")
    units = {"B": 1, "KiB": 2**10}
    found = [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (B|KiB)\b", line)]
    assert sum(found) == pytest.approx(report.peak_bytes, rel=1e-3)


@pytest.mark.slow
def test_ways_are_code_that_runs(stack, report):
    model, x = stack
    names = {**NAMES, "model": copy.deepcopy(model)}
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    ways = [way for way in advice(report) if way.code]
    assert {way.code.split("(")[0] for way in ways} >= {"thunder.jit", "MemEfficient"}
    for way in ways:
        eval(way.code, names)
    budget = next(way for way in ways if "budget=" in way.code)
    lower = thunder.jit(model, executors=[], transforms=[eval(budget.code, names)])
    assert explain(lower, x, bounds=False, detail=True).peak_bytes < report.peak_bytes
    printed = [line for line in str(report).splitlines() if line.startswith("  up to ")]
    assert len(printed) == 2 and all(any(way.code in line for way in ways) for line in printed)


def test_ways_of_a_hugging_face_model_are_options_of_memory_efficient(report):
    theirs = replace(report, compiled_by="memory_efficient")
    codes = [way.code for way in advice(theirs) if "fficient" in way.code]
    assert codes and all(code.startswith("memory_efficient(model") for code in codes), codes
    assert all(len(line) <= WIDTH for line in brief(theirs))


def test_a_whole_step_has_ways_for_its_optimizer():
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient()])
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    step = predict_step(jitted, adamw, torch.sum, x)
    found = explain(jitted, x, prediction=step, bounds=False)
    lines = str(found).splitlines()
    assert found.eager_bytes is None and found.thunder_bytes is None
    assert lines[0] == f"At most {size(found.peak_bytes)} on the CPU"
    assert lines[1].startswith("  in the optimizer, at ") and "the optimizer's state " in lines[2]
    for way in advice(found):
        exec(way.code, {**NAMES, "model": model, "optimizer": adamw})
    assert "torch.optim.Adafactor(model.parameters())" in {way.code for way in advice(found)}


def test_what_went_wrong_and_budgets_have_lines_too(monkeypatch):
    x = torch.randn(64)
    alone = explain(thunder.jit(lambda x: (x * 2).sin(), executors=[]), x, bounds=False, budget=1)
    first, *_, last = brief(alone)
    assert "under Thunder alone" in first and last.startswith("does not fit into the budget, 1 B")
    assert "MemEfficient made no plan" not in str(alone)
    monkeypatch.setattr("thunder_mem.planning.executor.lower_plan", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        failed = explain(thunder.jit(lambda x: x.sin(), executors=[], transforms=[MemEfficient()]), x, bounds=False)
    assert "ZeroDivisionError" in brief(failed)[-1]
    assert brief(Report(Prediction((), (), 64, "cpu"))) == ("Nothing runs: the caller's 64 B are all there is",)
    assert len(brief(Report(synthetic(20)))) >= 3


def test_detail_prints_everything(report):
    with pytest.raises(TypeError, match="detail is True or False, not 'yes'"):
        explain(thunder.jit(torch.sin), torch.ones(2), detail="yes")
    full = replace(report, detail=True)
    assert "Alive at the peak" in str(full) and "Alive at the peak" not in str(report)
    assert "<table>" in full._repr_html_() and "<table>" not in report._repr_html_()
    assert report.to_page() == full.to_page() and "Alive at the peak" in report.to_page()


def test_files_have_everything(report, tmp_path):
    report.save(tmp_path / "report.txt")
    assert "Alive at the peak" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("stack", [None, 1])
def test_tables_take_a_hundred_columns_and_lose_nothing(stack):
    words = " ".join(f"word{i}" for i in range(60))
    rows = tuple((f"{i}", words, "x" * 150, words[i:]) for i in range(3))
    section = Section("Wide", ("n", "one", "two", "three"), rows, (0,), words, stack)
    text = to_text(Document(("a headline " + words,), (section,)))
    assert max(map(len, text.splitlines())) == WIDTH
    kept = "".join(text.split())
    assert kept.count("x" * 10) >= 3
    for i in range(60):
        assert text.count(f"word{i}") >= 3
    narrow = to_text(Document(("line",), (Section("Narrow", ("n", "one"), (("1", "a"),), (0,)),)))
    assert narrow == "line\n\nNarrow\n  n  one\n  1  a"
    assert to_text(Document(("code " * 40, "more"), ())) == f"{'code ' * 40}\n  more"
