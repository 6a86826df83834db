"""`thunder-mem` as a user types it: answers, exit codes, and one clear line for whatever is wrong."""

import html
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import thunder
import torch

from thunder_mem.command_line import main, predictions
from thunder_mem.command_line.arguments import read_words, split_target
from thunder_mem.command_line.program import UsageError, load_target, parse_input
from thunder_mem.costs.measured import COSTS
from thunder_mem.memory.units import parse_bytes, size
from thunder_mem.prediction.predict import predict
from thunder_mem.transforms import MemEfficient

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, thunder
from thunder_mem import MemEfficient

print("this must not get between the JSON")

def mlp():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))

def build():
    return mlp(), torch.ones(32, 64)

def step():
    model = mlp()
    return {
        "model": model, "args": torch.ones(32, 64), "loss": lambda out: out.square().mean(),
        "optimizer": torch.optim.SGD(model.parameters()),
    }

def chain():
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Softmax(-1))]
    return torch.nn.Sequential(*layers), torch.ones(1024, 64)

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(4, 8)

    def forward(self, x):
        return self.layer(x)[0].sum()

def recurrent():
    return Recurrent(), torch.ones(3, 2, 4)

def deep():
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(4096, 4096), torch.nn.Softmax(-1))]
    return torch.nn.Sequential(*layers), torch.ones(65536, 4096)

def product(a, b):
    return (a @ b).relu().sum()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x, *, mask):
        return self.last(x) * mask

jitted = thunder.jit(mlp(), executors=[])
budgeted = thunder.jit(mlp(), executors=[], transforms=[MemEfficient(budget="1GiB")])
number = 3

def raises():
    return {}["nothing here"]

def untraceable(x):
    return x.nosuchmethod()

def quits():
    raise SystemExit(4)

def raises_twice():
    raise RuntimeError("one line\\nand another")

def strange_args():
    return mlp(), "ab"

def strange_kwargs():
    return {"model": mlp(), "kwargs": 3}

def strange_loss():
    return {"model": mlp(), "args": torch.ones(32, 64), "loss": 3}

def sad():
    model = mlp()

    def loss(out):
        raise RuntimeError("no loss today")

    return {"model": model, "args": torch.ones(3, 64), "loss": loss, "optimizer": torch.optim.SGD(model.parameters())}

def uncalled():
    return {"model": mlp(), "args": torch.ones(32, 64), "optimizer": torch.optim.AdamW}

def fx():
    from thunder.dynamo import thunderfx
    return thunderfx(mlp(), executors=[], transforms=[MemEfficient()]), torch.ones(32, 64)

def broken():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(), mlp()
        def forward(self, x):
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)
    return Broken(), torch.ones(32, 64)

def odd():
    return {"model": mlp(), "arguments": ()}
"""
PLAIN = ["--fusion", "none"]  # compiles nothing, so it is quick


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "torn.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(script, capsys):
    def run(*words):
        code = main([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_predict_says_what_predict_says(run):
    code, out, _ = run("predict", "train.py:build", "--json", *PLAIN)
    data = json.loads(out)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    expected = predict(
        thunder.jit(model, executors=[], transforms=[MemEfficient()]), torch.ones(32, 64), keep_outputs=True
    )
    assert code == 0 and data["fits"] and data["limits"] == []
    assert (data["peak_bytes"], data["held_bytes"]) == (expected.peak_bytes, expected.held_bytes)
    assert data["scratch_bytes"] == expected.scratch_bytes
    assert list(data["phases"]) == ["forward", "backward"]


@pytest.mark.slow
def test_options_of_mem_efficient(run, script):
    def received(*words):
        code, out, _ = run(*words, "--json", *PLAIN)
        return code, json.loads(out)

    words = ["frontier", "train.py:chain", "--points", "1"]
    (_, free), (_, asked) = received(*words), received(*words, "--recompute", "Linear+Softmax+:recompute:-1")
    assert asked["points"][0]["saved_bytes"] < free["points"][0]["saved_bytes"]
    (script / "config.json").write_text('["Linear+Tanh+:none:-1"]')
    assert received("predict", "train.py:build", "--recompute", "config.json", "--costs", "measured")[0] == 0
    assert run("plan", "train.py:build", "--recompute", "Linear+Tanh+:recompute:-1", *PLAIN)[0] == 0
    for words, message in (
        (["train.py:build", "--recompute", "Tanh"], "'Tanh' is neither"),
        (["train.py:build", "--recompute", "missing.json"], "missing.json cannot be read"),
        (["train.py:build", "--recompute", "Gelu+:1:-1"], "Gelu+ matches nothing"),
        (["train.py:build", "--recompute", "Tanh+:1:-1", "--plain"], "which --plain leaves out"),
        (["train.py:jitted", "--input", "4x64", "--recompute", "Tanh+:1:-1"], "jitted already: give recompute= to"),
    ):
        code, _, error = run("predict", *words, *PLAIN)
        assert code == 2 and message in error


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words, code, says",
    [
        ([], 0, ()),
        (["--budget", "1GiB"], 0, ("fits into 1.00 GiB of the budget",)),
        (["--budget", "100KiB"], 1, ("does NOT fit into 100.00 KiB of the budget", "too much")),
        (["--device", "T4"], 0, ("of T4: headroom", "rounded up to 512 B", "fragmentation")),
        (
            ["--device", "t4", "--budget", "100KiB"],
            1,
            ("fits into 13.97 GiB of T4", "8.12 MiB", "does NOT fit"),
        ),
    ],
)
def test_exit_codes_tell_whether_it_fits(run, words, code, says):
    answer = run("predict", "train.py:build", *words, *PLAIN)
    assert answer[0] == code
    assert answer[1].startswith("Peak ") and all(part in answer[1] for part in says)


@pytest.mark.slow
def test_a_budget_buys_memory_with_time(run):
    free = json.loads(run("predict", "train.py:chain", "--device", "T4", "--json")[1])
    limit_bytes = free["peak_bytes"] * 9 // 10
    code, out, _ = run("predict", "train.py:chain", "--device", "T4", "--json", "--budget", limit_bytes)
    data = json.loads(out)
    assert code == 0 and data["peak_bytes"] <= limit_bytes < free["peak_bytes"]
    assert data["budget"]["recompute_ms"] > 0 and free["budget"] is None
    plain = run("predict", "train.py:chain", "--device", "T4", "--plain", "--budget", limit_bytes)
    assert plain[0] == 1


@pytest.mark.parametrize("beside", [0, 3, 40])
def test_what_fits_a_budget_fits_every_larger_one(monkeypatch, beside):
    """Plans keep their own figure within a budget, but the step needs `beside` more where little was recomputed."""
    asked = []

    def compiled(program, question, budget):
        asked.append(budget)
        plan = 100 if budget is None else max(30, min(100, budget))
        method = "smallest" if plan == 30 else "curve"
        return SimpleNamespace(
            peak_bytes=plan + 20 + (beside if 30 < plan < 100 else 0),
            limit_bytes=question.limit,
            fits=plan + 20 + (beside if 30 < plan < 100 else 0) <= question.limit,
            plan=SimpleNamespace(budget=SimpleNamespace(method=method)),
            jitted=None,
        )

    monkeypatch.setattr(predictions, "_compiled", compiled)
    monkeypatch.setattr(predictions, "predict", lambda *_, **__: SimpleNamespace(peak_bytes=100))
    program = SimpleNamespace(is_jitted=False, args=(), kwargs={}, optimizer=None)
    for limit in range(10, 130):
        asked.clear()
        given = {"plain": False, "optimizer": None, "inference": False, "step_in_backward": False, "states": "device"}
        found = predictions.ask(program, SimpleNamespace(**given, limit=limit, options={}))
        assert found.fits == (limit >= 50) and len(asked) <= 4


def test_a_plan_of_a_program_that_thunder_alone_refuses_stands_alone(run):
    code, out, _ = run("plan", "train.py:recurrent", *PLAIN)
    assert code == 0 and "with MemEfficient; there is no figure for Thunder alone" in out
    assert "Thunder alone: the function cannot be traced" in out


def test_its_object_has_no_figures_of_thunder_alone(run):
    data = json.loads(run("plan", "train.py:recurrent", "--json", *PLAIN)[1])
    assert data["thunder_alone"] is None and data["peak_bytes"] > 0


@pytest.mark.slow
def test_a_plan_within_a_budget_says_what_it_costs(run):
    free = json.loads(run("plan", "train.py:chain", "--json", *PLAIN)[1])
    budget = ["--budget", free["peak_bytes"] * 9 // 10, *PLAIN]
    code, out, _ = run("plan", "train.py:chain", "--json", *budget)
    data = json.loads(out)
    assert code == 0 and data["peak_bytes"] <= budget[1] and data["budget"]["recompute_ms"] > 0
    assert [d["what"] for d in data["plan"]["decisions"]].count("budget") == 1
    assert "bought by computing again" in run("plan", "train.py:chain", *budget)[1]


@pytest.mark.slow
def test_the_frontier_is_data_a_table_and_a_picture(run):
    code, out, _ = run("frontier", "train.py:chain", "--json", "--points", 3, *PLAIN)
    data = json.loads(out)
    peaks = [p["peak_bytes"] for p in data["points"]]
    assert code == 0 and data["fits"] and len(peaks) > 1 and peaks == sorted(peaks, reverse=True)
    asked = ["--points", 3, "--save", "frontier.svg", *PLAIN]
    code, out, _ = run("frontier", "train.py:chain", "--budget", peaks[-1], *asked)
    assert code == 0 and f"budget={peaks[-1]}" in out and "fits into" in out
    assert Path("frontier.svg").read_text().startswith("<?xml")
    code, out, _ = run("frontier", "train.py:chain", "--budget", peaks[-1] - 1, "--points", 3, *PLAIN)
    assert code == 1 and "nothing fits into" in out


@pytest.mark.slow
def test_the_frontier_may_use_the_hosts_memory(run):
    asked = ["frontier", "train.py:deep", "--json", "--points", 2, "--device", "H100-80GB"]
    alone, with_copies = (json.loads(run(*asked, *more)[1])["points"] for more in ([], ["--offload"]))
    assert all(p["host_bytes"] == 0 for p in alone) and with_copies[-1]["host_bytes"] > 0
    assert with_copies[-1]["peak_bytes"] < alone[-1]["peak_bytes"]
    code, _, error = run("frontier", "train.py:deep", "--offload", "3x")
    assert code == 2 and "only:PATTERN" in error


@pytest.mark.slow
def test_a_training_step(run):
    phases = ["forward", "loss", "backward", "optimizer"]
    own = json.loads(run("predict", "train.py:step", "--json", *PLAIN)[1])
    assert list(own["phases"]) == phases
    adamw = ["--optimizer", "AdamW"]
    given = json.loads(run("predict", "train.py:step", *adamw, "--json", *PLAIN)[1])
    weights_bytes = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert given["held_bytes"] == own["held_bytes"] + 2 * weights_bytes + 4 * 4
    twice = json.loads(
        run("predict", "train.py:build", *adamw, "--loss", "mean", "--accumulate", 2, "--json", *PLAIN)[1]
    )
    assert list(twice["phases"]) == phases and twice["held_bytes"] == given["held_bytes"]
    inside = json.loads(run("predict", "train.py:step", *adamw, "--step-in-backward", "--json", *PLAIN)[1])
    assert list(inside["phases"]) == phases[:-1] and inside["peak_bytes"] < given["peak_bytes"]
    away = ["predict", "train.py:step", *adamw, "--step-in-backward", "--states", "host"]
    found = json.loads(run(*away, "--json", *PLAIN)[1])
    assert found["host_bytes"] == 2 * weights_bytes == inside["held_bytes"] - found["held_bytes"]
    link_ms = f"{found['state_transfers']['link_s'] * 1e3:.3g} ms on the link"
    assert f"the optimizer's states take {link_ms}" in " ".join(run(*away, *PLAIN)[1].split())


def test_inputs_from_the_command_line(run):
    inputs = ["--input", "16x8", "--input", "8x4"]
    assert "backward" not in run("predict", "train.py:product", *inputs, *PLAIN)[1]
    assert "backward" in run("predict", "train.py:product", *inputs, "--grad", *PLAIN)[1]
    named = ["--input", "4x8:float32", "--input", "mask=4x8:bool"]
    assert "backward" in run("predict", "train.py:Net", *named, *PLAIN)[1]
    assert "backward" not in run("predict", "train.py:Net", *named, "--inference", *PLAIN)[1]
    assert run("predict", "train.py:jitted", "--input", "2x64")[0] == 0


@pytest.mark.slow
def test_explain_writes_what_it_is_asked_for(run, script):
    files = ["--html", "report.html", "--save", "snapshot.pickle", "--save", "report.json"]
    code, out, err = run("explain", "train.py:build", "--detail", *files, *PLAIN)
    assert code == 0 and "Alive at the peak" in out and "How to get lower" in out
    assert err == "this must not get between the JSON\n"
    report = json.loads((script / "report.json").read_text())
    assert (script / "report.html").read_text().startswith("<!doctype html>")
    assert (script / "snapshot.pickle").stat().st_size > 1000
    code, out, _ = run("explain", "train.py:build", "--json", "--budget", "1GiB", *PLAIN)
    data = json.loads(out)
    assert (data["peak_bytes"], data["budget_bytes"], data["fits"]) == (report["peak_bytes"], 2**30, True)
    assert data["optimality"] and data["tenants"]
    assert json.loads(run("explain", "train.py:build", "--json", "--no-bounds", *PLAIN)[1])["optimality"] == []


def test_explain_prints_five_lines(run):
    code, out, _ = run("explain", "train.py:build", *PLAIN)
    assert code == 0 and len(out.splitlines()) == 5
    first, when, holders, *ways = out.splitlines()
    assert "; eager PyTorch " in first and "; Thunder alone " in first
    assert when.startswith("  in the backward, at ") and "module 0 " in holders
    assert all(way.startswith("  up to ") and ":" in way for way in ways)
    on_gpu = run("explain", "train.py:build", "--device", "T4", "--budget", "1GiB", *PLAIN)[1]
    assert "on the GPU\n" in on_gpu and on_gpu.count("headroom") == 2


@pytest.mark.slow
def test_explain_has_one_headroom(run):
    code, out, _ = run("explain", "train.py:build", "--budget", "100KiB", "--device", "T4", "--no-bounds", *PLAIN)
    data = json.loads(run("explain", "train.py:build", "--budget", "100KiB", "--device", "T4", "--json", *PLAIN)[1])
    assert code == 1 and out.count("headroom") == 2  # of the budget and of the device
    assert data["headroom_bytes"] == data["limits"][1]["headroom_bytes"] < 0
    assert data["peak_bytes"] + data["library_bytes"] == data["allocated_peak_bytes"]
    own = json.loads(run("explain", "train.py:budgeted", "--no-bounds", "--json", "--input", "2x64")[1])
    assert own["budget_bytes"] == 2**30 and own["limits"] == []


def test_explain_of_a_step_without_memefficient(run):
    code, out, _ = run("explain", "train.py:step", "--plain", "--detail", *PLAIN)
    assert code == 0
    assert "MemEfficient made no plan" in out and "optimizer" in out


@pytest.mark.slow
def test_plan_is_before_and_after(run):
    code, out, _ = run("plan", "train.py:chain", "--device", "T4")
    assert code == 0
    assert "by Thunder alone" in out and "saved for the backward" in out and "Arrangements compared" in out
    data = json.loads(run("plan", "train.py:chain", "--device", "T4", "--json")[1])
    assert data["planned"]["peak_bytes"] <= data["thunder_alone"]["peak_bytes"]
    assert "order" in [d["what"] for d in data["plan"]["decisions"]]


@pytest.mark.slow
def test_compare_runs_each_compiler(run, script):
    code, out, _ = run("compare", "train.py:step", "--html", "page.html", *PLAIN)
    assert code == 0 and out.startswith("A training step on cpu")
    assert "MemEfficient" in out and "gradients within" in out
    assert "Side by side" in (script / "page.html").read_text()
    code, out, _ = run("compare", "train.py:build", "--json", "--optimizer", "SGD", "--loss", "mean", *PLAIN)
    data = json.loads(out)
    ours = data["rows"][-1]
    assert code == 0 and data["fits"] and data["best"] in ("eager", "Thunder", "MemEfficient")
    assert [row["name"] for row in data["rows"]] == ["eager", "Thunder", "MemEfficient"]
    limit = ["--budget", ours["peak_bytes"] - 1]
    assert run("compare", "train.py:build", "--optimizer", "SGD", "--loss", "mean", *limit, *PLAIN)[0] == 1
    inputs = ["--input", "16x8", "--input", "8x4"]
    assert run("compare", "train.py:product", *inputs, *PLAIN)[1].startswith("A forward")
    assert run("compare", "train.py:product", *inputs, "--grad", *PLAIN)[1].startswith("A training step")
    assert run("compare", "train.py:product", *inputs, "--grad", "--inference", *PLAIN)[1].startswith("A forward")


def test_compare_takes_torch_compile_and_refuses_what_is_compiled(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn: lambda *args: 1 / 0)
    code, out, _ = run("compare", "train.py:build", "--torch-compile", "--json", *PLAIN)
    failures = {row["name"]: row["failure"] for row in json.loads(out)["rows"]}
    assert code == 0 and failures["torch.compile"] == "ZeroDivisionError: division by zero"
    code, _, err = run("compare", "train.py:jitted", "--input", "2x64")
    assert code == 2 and "the model is compiled already" in err
    assert "unrecognized arguments: --device" in run("compare", "train.py:build", "--device", "T4")[2]


WRONG = {
    "no such file": (["nofile.py:f"], "there is no file 'nofile.py'"),
    "no name": (["train.py"], "'train.py' is no target"),
    "no such name": (["train.py:nosuch"], "has no 'nosuch'; it defines Net, Recurrent, broken, build"),
    "a syntax error": (["torn.py:f"], "the script raises SyntaxError at torn.py:1"),
    "a factory that raises": (["train.py:raises"], r"raises\(\) raises KeyError at train.py:\d+: 'nothing here'"),
    "a message of two lines": (["train.py:raises_twice"], r"raises RuntimeError at train.py:\d+: one line and another"),
    "a jitted model without inputs": (["train.py:jitted"], r"comes without arguments for the call \(input\)"),
    "a factory that exits": (["train.py:quits"], r"quits\(\) exits by itself \(code 4\)"),
    "no program": (["train.py:number"], "is an int, not a model"),
    "an optimizer's class": (["train.py:uncalled"], "train.py:uncalled .* AdamW is the class: call it"),
    "an odd key": (["train.py:odd"], "takes the keys model, args, kwargs, loss, optimizer, but it has 'arguments'"),
    "no args": (["train.py:strange_args"], "args of train.py:strange_args is a str, not a tensor or a tuple"),
    "no kwargs": (["train.py:strange_kwargs"], "kwargs of train.py:strange_kwargs is an int, not a dict"),
    "no loss": (["train.py:strange_loss"], "loss of train.py:strange_loss is an int, not a function"),
    "a loss that raises": (["train.py:sad"], r"the loss raises RuntimeError at train.py:\d+: no loss today"),
    "an input for nobody": (["train.py:product", "--input", "3"], "traced: TypeError: product.. is missing 1 required"),
    "an input too large": (
        ["train.py:product", "--input", "99999999x99999999"],
        "cannot be made: with --device nothing",
    ),
    "a wrong dtype": (
        ["train.py:product", "--input", "3x4:int64", "--input", "4x4"],
        r"traced at \S*train.py:\d+: Runt",
    ),
    "no inputs": (["train.py:product"], r"comes without arguments for the call \(a, b\)"),
    "inputs twice": (["train.py:build", "--input", "3"], "brings its arguments itself"),
    "no shape": (["train.py:product", "--input", "3xy"], "'3xy' is not a shape"),
    "no dtype": (["train.py:product", "--input", "3:int77"], "unknown dtype 'int77'"),
    "no name of an argument": (["train.py:product", "--input", "a b=3"], "'a b' is not the name of an argument"),
    "untraceable": (["train.py:untraceable", "--input", "3"], r"cannot be traced at \S*train.py:\d+: AttributeError"),
    "shapes that do not match": (["train.py:product", "--input", "3x4", "--input", "5x6"], "cannot be traced at"),
    "no such device": (["train.py:build", "--device", "H1000"], "unknown device 'H1000': .*H100-80GB"),
    "no such fusion": (["train.py:build", "--fusion", "xla"], "'xla'.*mem_pointwise.*nvfuser.*torchcompile.*none"),
    "no budget": (["train.py:build", "--budget", "40Gi"], "'40Gi' is not a size"),
    "nothing of a budget": (["train.py:build", "--budget", "0GiB"], "a size is above 0"),
    "no microbatch": (["train.py:build", "--accumulate", "0"], "a number from 1 up, not '0'"),
    "no such optimizer": (["train.py:build", "--optimizer", "Adam7"], "no optimizer 'Adam7'; it has Adam, ASGD"),
    "no optimizer to step": (["train.py:build", "--step-in-backward"], "--step-in-backward needs an optimizer"),
    "states of no update": (
        ["train.py:build", "--optimizer", "SGD", "--states", "host"],
        "--states host is for updates in the backward: give --step-in-backward, too",
    ),
    "states nowhere": (["train.py:build", "--states", "disk"], "invalid choice: 'disk'"),
    "nothing to train": (
        ["train.py:product", "--input", "3x4", "--input", "4x3", "--optimizer", "SGD"],
        "there is nothing that SGD could train",
    ),
    "no scalar": (["train.py:build", "--optimizer", "SGD"], "the loss has to be a scalar tensor"),
    "a step without gradients": (["train.py:step", "--inference"], "--inference has no training step"),
    "jitted and plain": (["train.py:jitted", "--input", "2x64", "--plain"], "jitted already"),
    "an option nobody knows": (["train.py:build", "--frobnicate"], "unrecognized arguments: --frobnicate"),
}


def test_fusion_is_by_name(run):
    def peak_bytes(*words):
        return json.loads(run("predict", "train.py:build", "--device", "T4", "--json", *words)[1])["peak_bytes"]

    assert peak_bytes() == peak_bytes("--fusion", "mem_pointwise") <= peak_bytes("--fusion", "nvfuser")
    code, out, error = run("predict", "train.py:build", "--fusion", "nvfuser")
    assert (code, out) == (2, "") and "nvFuser needs a GPU" in error


@pytest.mark.parametrize("words, message", WRONG.values(), ids=WRONG.keys())
def test_whatever_is_wrong_is_one_line(run, words, message):
    code, out, err = run("predict", *words, *PLAIN)
    said = err.replace("this must not get between the JSON\n", "")
    assert (code, out) == (2, "")
    assert re.search(message, said), said
    assert said.count("\n") == 1 and said.startswith("thunder-mem") and "Traceback" not in said


@pytest.mark.parametrize(
    "words, says",
    [
        (["untraceable", "--input", "3"], "Thunder alone fails too; --debug"),
        (["untraceable", "--input", "3", "--plain"], "--debug shows where"),
        (["build", "--recompute", "Gelu+:1:-1"], "matches nothing"),
    ],
)
def test_a_failure_says_whether_thunder_alone_fails_too(run, words, says):
    code, _, err = run("predict", f"train.py:{words[0]}", *words[1:], *PLAIN)
    assert code == 2 and says in err and ("Thunder alone" in err) == ("Thunder alone" in says), err
    if "--plain" not in words:
        code, _, err = run("frontier", f"train.py:{words[0]}", *words[1:], *PLAIN)
        assert code == 2 and says in err, err


def test_a_failure_of_memefficient_alone_is_named_as_its_own(run, monkeypatch):
    monkeypatch.setattr("thunder_mem.transforms.mem_efficient.pruned", lambda *_: torch.ones(2) @ torch.ones(3))
    code, _, err = run("predict", "train.py:build", *PLAIN)
    assert code == 2 and "Thunder alone compiles it (--plain), so MemEfficient is at fault" in err, err


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", "train.py:jitted", "--input", "2x64"], "jitted already, so there is no before and after"),
        (["explain", "train.py:build", "--html", "/no/such/folder/x.html"], "there is no folder '/no/such/folder'"),
        (
            ["explain", "train.py:build", "--save", "report.doc"],
            "cannot write 'report.doc': the ending is one of .html",
        ),
        (
            ["predict", "train.py:build", "--html", "report.png"],
            "cannot write 'report.png': the ending is one of .html",
        ),
        (["plan", "train.py:build", "--html", "folder.html"], "cannot write 'folder.html': it is a folder"),
        (["frontier", "train.py:build", "--html", "/no/such/folder/x.html"], "there is no folder '/no/such/folder'"),
        (["frontier", "train.py:build", "--points", "0"], "a number from 1 up, not '0'"),
        (
            ["frontier", "train.py:build", "--points", "1", "--save", "x.pickle"],
            "the ending is one of .html, .png, .svg, .pdf",
        ),
        (["frontier", "train.py:product", "--input", "3x4", "--input", "4x3", *PLAIN], "the call has no backward"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_whatever_is_wrong_with_a_command(run, script, words, message):
    (script / "folder.html").mkdir()
    code, _, err = run(*words)
    assert code == 2 and message in err and "Traceback" not in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words, says",
    [
        (["predict", "train.py:build"], ("Phases", "Alive at the peak", "of the budget")),
        (
            ["explain", "train.py:build", "--no-bounds", "--detail"],
            ("Alive at the peak", "How to get lower", "into the budget"),
        ),
        (["plan", "train.py:build"], ("Thunder alone", "Before and after each decision", "of the budget")),
        (["frontier", "train.py:chain", "--points", "2"], ("Memory against time", "budget=", "of the budget")),
    ],
)
def test_every_command_writes_a_page(run, script, words, says):
    code, out, _ = run(*words, "--budget", "1GiB", "--html", "page.html", *PLAIN)
    text = (script / "page.html").read_text()
    assert code == 0 and text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert html.escape(out.splitlines()[0]) in text and all(part in text for part in says)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert drawings and all(ElementTree.fromstring(drawing) is not None for drawing in drawings)
    assert not re.search(r"<script|<link|src=|href=", text)


@pytest.mark.slow
def test_a_model_goes_through_thunderfx(run):
    torch._dynamo.reset()
    code, out, _ = run("predict", "train.py:build", "--fx", "--json", *PLAIN)
    found, same = json.loads(out), json.loads(run("predict", "train.py:fx", "--json")[1])
    assert code == 0 and found["peak_bytes"] == same["peak_bytes"]
    code, out, _ = run("plan", "train.py:build", "--fx", *PLAIN)
    assert code == 0 and "by Thunder alone" in out
    code, out, _ = run("explain", "train.py:broken", "--fx", "--no-bounds", *PLAIN)
    assert code == 0 and "ThunderFX made 2 subgraphs" in out and "graph 0 breaks at" in out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words, says",
    [
        (["predict", "train.py:broken", "--fx"], "2 subgraphs of this program.*; thunder-mem explain shows"),
        (["predict", "train.py:build", "--fx", "--device", "T4"], "nothing runs on a simulated device"),
        (["predict", "train.py:build", "--fx", "--optimizer", "SGD"], "leave the optimizer out"),
        (["plan", "train.py:fx"], "is jitted already"),
        (["frontier", "train.py:fx"], "this is a program of ThunderFX: name the model"),
    ],
)
def test_what_thunderfx_cannot_do_is_said(run, words, says):
    torch._dynamo.reset()
    code, _, err = run(*words, *PLAIN)
    assert code == 2 and re.search(says, err) and "Traceback" not in err, err


def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(run):
    code, out, err = run("predict", "train.py:quits", "--html", "nosuch/page.html", *PLAIN)
    assert (code, out) == (2, "") and "there is no folder 'nosuch'" in err and "between the JSON" not in err


def test_debug_shows_the_traceback(run):
    code, _, err = run("predict", "train.py:raises", "--debug")
    assert code == 2 and "Traceback" in err and 'return {}["nothing here"]' in err


def test_help_teaches(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(part in out for part in ("SCRIPT:NAME", "exit codes", "a factory", "predict", "explain", "plan"))
    code, out, _ = run("explain", "--help")
    assert code == 0 and "H100-80GB" in out and "--budget SIZE" in out


def test_stages_on_a_terminal_and_silence_elsewhere(run, monkeypatch):
    _, out, err = run("predict", "train.py:build", *PLAIN)
    assert err == "this must not get between the JSON\n" and "\x1b" not in out
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes the stream for a terminal
    monkeypatch.setenv("THUNDER_MEM_PROGRESS", "1")
    _, out, err = run("predict", "train.py:build", *PLAIN)
    assert "running train.py:build" in err and "\x1b" in err
    assert "\x1b" in out


@pytest.mark.slow
def test_as_a_process_of_its_own(script):
    command = [
        sys.executable,
        "-m",
        "thunder_mem",
        "predict",
        "train.py:build",
        "--device",
        "T4",
        "--budget",
        "1KiB",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Peak ") and done.stderr == "this must not get between the JSON\n"


def test_the_entry_point_is_there():
    (entry,) = re.findall(r'^thunder-mem = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert getattr(importlib.import_module(entry[0]), entry[1]) is main


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["predic", "train.py:build"], 2, "invalid choice: 'predic'"),
        (["predict", "train.py:biuld"], 2, "train.py has no 'biuld'; it defines build, "),
        (["predict", "trian.py:build"], 2, "there is no file 'trian.py'"),
        (["predict", "train.py:build", "--device", "H100-80BG"], 2, "unknown device 'H100-80BG'"),
        (["predict", "train.py:build", "--budget", "40Gi"], 2, "'40Gi' is not a size"),
        (["predict", "train.py:build", "--devise", "T4"], 2, "thunder-mem predict: .*mean --device[?]"),
        (["predict", "train.py:build", "extra"], 2, "arguments: extra [(]thunder-mem predict --help"),
        (["predict", "train.py:build", "--optimizer", "Adamm"], 2, "no optimizer 'Adamm'; it has Adam, ASGD"),
        (["predict", "train.py:build", "--recompute", "Gelu+:recomput:-1"], 2, "the strategy is none or recompute or"),
        (["predict", "train.py:build", "--recompute", "none.json"], 2, "--recompute none.json cannot be read"),
        (["frontier", "train.py:build", "--offload", "Ge lu"], 2, "with a pattern as recompute_table names them"),
        (["predict", "train.py:build", "--html", "/no/such/folder/x.html"], 2, "there is no folder '/no/such/folder'"),
        (["frontier", "train.py:build", "--save", "x.pgn"], 2, "cannot write 'x.pgn': the ending is one of"),
        (["predict", "--help"], 0, ""),
        (["--version"], 0, ""),
    ],
)
def test_what_is_mistyped_is_answered_before_pytorch_is_imported(script, words, code, message):
    program = (
        "import sys; from thunder_mem.command_line import main; code = main(sys.argv[1:]); slow = "
        "{'torch', 'thunder', 'numpy', 'rich', 'scipy'} & set(sys.modules); sys.exit(str(slow) if slow else code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code and re.search(message, done.stderr), done.stderr
    assert done.stderr.count("\n") == (code == 2), done.stderr


@pytest.mark.slow
def test_thunders_imports_are_silent(script):
    command = [sys.executable, "-m", "thunder_mem", "predict", "train.py:build", "--device", "T4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stderr == "this must not get between the JSON\n", done.stderr


def test_names_that_a_script_makes_are_looked_for_when_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text("for i in range(2):\n    globals()[f'build_{i}'] = abs\n")
    assert split_target("made.py:build_1") == ("made.py", "build_1")
    with pytest.raises(UsageError, match=r"made\.py has no 'build_2'"):
        load_target("made.py:build_2")


def test_costs_are_those_of_memefficient(script):
    assert [read_words(["predict", "train.py:build", "--costs", cost]).costs for cost in COSTS] == list(COSTS)


def test_inputs_are_zeros_of_their_shape():
    name, t = parse_input("tokens=2,3:int64")
    assert (name, tuple(t.shape), t.dtype, t.sum().item()) == ("tokens", (2, 3), torch.int64, 0)
    assert parse_input("scalar:bf16")[1].shape == () and parse_input("4", grad=True)[1].requires_grad
    assert not parse_input("4:int32", grad=True)[1].requires_grad
    with pytest.raises(UsageError):
        parse_input("x=")


def test_sizes():
    assert [parse_bytes(s) for s in ("1GiB", "1gb", "1.5 KiB", "12", 7)] == [2**30, 10**9, 1536, 12, 7]
    for wrong in ("", "GiB", "-1GiB", "0", "1XB", "1e3", True, "1 2", "1.5", "2.0 B"):
        with pytest.raises(ValueError, match=r"size"):
            parse_bytes(wrong)
    assert [size(n) for n in (0, 1023, 1024, 2**50)] == ["0 B", "1023 B", "1.00 KiB", "1024.00 TiB"]
