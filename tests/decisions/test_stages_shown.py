"""The stages of a compilation report themselves, with how many regions are left to compile."""

import io

import pytest
import thunder
import torch
from rich.console import Console

from thunder_mem import MemEfficient, predict
from thunder_mem.regions import compiled_region
from thunder_mem.rendering.progress import Progress, showing


def lines_of(run):
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with showing(Progress(console, clock=lambda: 0.0, after_s=0.0, wakes=False)):
        run()
    return [line.removeprefix("thunder_mem: ") for line in console.file.getvalue().splitlines()]


def test_stages_of_tracing_planning_and_a_budget():
    x = torch.randn(64, 16, requires_grad=True)
    w = torch.randn(16, 16, requires_grad=True)

    def program(x, w):
        for _ in range(4):
            x = (x @ w).softmax(-1)
        return x.sum()

    jitted = thunder.jit(program, executors=[], transforms=[MemEfficient(budget=1, on_infeasible="warn")])
    with pytest.warns(UserWarning, match="no plan keeps the peak within 1 byte"):
        lines = lines_of(lambda: predict(jitted, x, w))
    wanted = ["tracing by Thunder", "planning", "planning: what to save", "planning: reuse buffers", "cutting loss"]
    wanted += ["searching within the budget, attempt 1 of 4 at most", "planning: kernels of regions"]
    missing = [part for part in wanted if not any(line.startswith(part) for line in lines)]
    assert not missing, "; ".join(lines)
    assert lines[0] == "tracing by Thunder" and lines.count("planning") == 1  # around all others


def test_regions_count_down(monkeypatch):
    """Without Inductor, which would take seconds for each."""
    monkeypatch.setattr(compiled_region, "_compile", lambda unfused, args: unfused)
    monkeypatch.setattr(compiled_region, "_expected", type(compiled_region._expected)())

    def program(x, w):
        return ((x.sin() * 2) @ w).cos().exp() @ w

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    jitted = thunder.jit(program, executors=["mem_pointwise"], transforms=[MemEfficient(reuse=False)])
    lines = lines_of(lambda: jitted(x, w))
    left = [line for line in lines if line.startswith("compiling regions, ")]
    assert left == ["compiling regions, 2 left", "compiling regions, 1 left"]
    assert not compiled_region._expected
    assert lines_of(lambda: jitted(x, w)) == []
