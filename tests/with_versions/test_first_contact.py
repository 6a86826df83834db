"""What a newcomer does first, with the versions that are installed here."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thunder
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder_mem
from docs import python_blocks
from tests.with_versions.programs import PROGRAMS
from thunder_mem import MemEfficient, StepInBackward, compare, explain, last_plan, measure_peak, predict, predict_step
from thunder_mem.prediction.training_step import training_step

pytestmark = pytest.mark.slow  # on the versions that all other tests have, too
ROOT = Path(__file__).parents[2]
PLAIN = ["language model", "checkpoints", "bfloat16", "convolutions", "writes"]


def losses(outputs):
    return sum(t.sum() for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad)


def trained(model, compiled, args):
    """The results and gradients of two steps, the second of which runs what the first has compiled."""
    found = []
    for _ in range(2):
        out = compiled(*args)
        losses(out).backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        model.zero_grad()
    return found


def check_against_eager(name, executors):
    model, args = PROGRAMS[name]()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    wide = tuple(a.double() if a.is_floating_point() else a for a in args)
    step = thunder.jit(model, transforms=[MemEfficient(strict=True)], **executors)
    ours, theirs, reference = trained(model, step, args), trained(eager, eager, args), trained(exact, exact, wide)
    assert last_plan(step) is not None
    for mine, its, true in zip(ours, theirs, reference, strict=True):
        rounding = torch.finfo(its.dtype).eps * true.abs().max() if its.is_floating_point() else 0
        allowed = 4 * (its - true).abs().max() + 16 * rounding
        assert mine.dtype == its.dtype and (mine - true).abs().max() <= allowed


@pytest.mark.parametrize("name", PLAIN)
def test_results_and_gradients_are_eagers(name):
    check_against_eager(name, {"executors": []})


def test_results_and_gradients_are_eagers_with_fusion():
    check_against_eager("writes", {})


def test_after_a_compiler_that_failed_within_vmap_compare_goes_on():
    """Thunder leaves open what it entered."""

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.vmap(lambda row: row * 2)(self.layer(x))

    found = compare(Mapped(), torch.randn(3, 4), executors=[], repeats=1)
    assert found["eager"].failure == ""
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


@pytest.mark.parametrize("name", PLAIN)
def test_predicted_equals_measured(name):
    model, args = PROGRAMS[name]()
    step = thunder.jit(model, executors=[], transforms=[MemEfficient()])

    def run():
        training_step(step, None, losses, *args)

    predicted = predict_step(step, None, losses, *args).measured_bytes
    run()
    model.zero_grad()
    assert predicted == measure_peak(run)
    model.zero_grad()
    assert predict(step, *args).peak_bytes > 0


def test_a_budget_is_kept():
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)) for _ in range(6)))
    rows = torch.randn(4096, 64)
    step = thunder.jit(deep, executors=[], transforms=[MemEfficient(budget="8 MiB")])
    step(rows).sum().backward()
    assert last_plan(step).budget.peak_bytes <= 8 * 2**20


def test_the_backward_updates():
    model, args = PROGRAMS["language model"]()
    twin = copy.deepcopy(model)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    ours = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(optimizer=ours)])
    for compiled, optimizer in ((step, ours), (twin, theirs)):
        compiled(*args).backward()
        optimizer.step()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_thunderfx():
    from thunder.dynamo import thunderfx

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x).sin()
            torch._dynamo.graph_break()
            return x.exp()

    model, x = Broken(), torch.randn(4, 8)
    step = thunderfx(model, executors=[], transforms=[MemEfficient()])
    torch.testing.assert_close(step(x), model(x))
    step(x).sum().backward()
    assert "graph_break()" in str(explain(step, detail=True))


def test_a_model_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    from thunder_mem.integrations.transformers import memory_efficient

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, tokens = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)), torch.randint(2000, (2, 64))
    eager = copy.deepcopy(model)
    for one in (eager, memory_efficient(model, executors=[])):
        one(input_ids=tokens, labels=tokens).loss.backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", ["README.md", "docs/first_steps.md", "docs/index.md"])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """What they print is compared with the versions that this package is developed on; here, what needs the least."""
    monkeypatch.chdir(tmp_path)
    printed = "\n".join(text for _, text in python_blocks.run((ROOT / page).read_text(encoding="utf-8"), page))
    assert printed == "" or "MemEfficient needs the least memory" in printed


def test_torch_compile_beside_it():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(512, 64)
    found = compare(model, x, executors=[], torch_compile=True, repeats=1)
    assert [row.name for row in found.rows if row.failure] == []


def test_the_import_warns_of_no_version():
    """And says nothing but what Thunder itself says."""
    program = (
        "import thunder_mem.compat, thunder; from thunder_mem import MemEfficient, __version__; print(__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == thunder_mem.__version__
    assert not re.search(r"thunder_mem works with|pip install", done.stderr)


def test_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef build():\n    return {'model': torch.nn.Linear(64, 64), 'args': torch.randn(32, 64)}\n"
    )
    command = [sys.executable, "-m", "thunder_mem", "predict", "train.py:build"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "peak" in done.stdout.lower()
