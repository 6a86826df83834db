"""What a budget buys on a whole LLaMA: ``python -m benchmarks.budget``.

longchat-7b-16k with all its 32 layers, T=16384, B=1, bf16, loss outside, no checkpointing, on a simulated
H100: budgets over the range from the free plan's peak down to the smallest. For each the exact peak of the
plan, what is left unused, the recomputation by the roofline beside its lower bound and beside the greedy's
(the first point of the curve of minimum cuts that fits), and the search's seconds of CPU. Then many more, evenly
spaced: whether a larger budget ever costs more, or has a lower peak; that also for fewer layers, as other parts of
the search answer there. One budget is compiled as a user would, and its final traces predicted. Writes
``benchmarks/results/budget.json`` and ``budget.png``; with ``fewer_layers`` only what it says of fewer layers anew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import thunder
import torch
from rich.console import Console

from benchmarks import longchat
from benchmarks.models import gpt_module
from thunder_mem import MemEfficient, predict, simulate
from thunder_mem.analysis.partition_problem import Study, study_program
from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.decisions.program import Planned
from thunder_mem.memory.device_models import device_model
from thunder_mem.partition.budget_search import PartitionChoice, PartitionProblem, fit_budget
from thunder_mem.partition.min_cut_partition import min_cut_partition
from thunder_mem.partition.tradeoff_curve import TradeoffPoint
from thunder_mem.runtime.collector import collector_off

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
DEVICE = "H100-80GB"
SHARES = (0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.98)
COMPILED = (0.25,)
LAYERS, FEWER_LAYERS = 32, (1, 2, 4, 8, 16)
SWEPT = 96
GIB = 2**30


def program(layers: int) -> tuple[torch.nn.Module, torch.Tensor]:
    model = gpt_module(longchat.config(layers), False, False, "cuda", torch.bfloat16)
    return model, torch.zeros(1, longchat.TOKENS, dtype=torch.long, device="cuda")


def fresh(problem: PartitionProblem) -> PartitionProblem:
    """Nothing of it tried yet, so that every search is timed whole."""
    choices = problem.repeat_s, problem.choices, problem.sort
    return PartitionProblem(problem.graph, problem.fuse, *choices, over=problem.over)


def greedy_fit(problem: PartitionProblem, points: Sequence[TradeoffPoint], budget_bytes: int) -> PartitionChoice:
    """The first point of a curve that fits, by bisection; its last if none does."""
    low, high = 0, len(points) - 1
    while high > low:
        middle = (low + high) // 2
        if problem.trial(points[middle].rebuilt).peak_bytes <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    return problem.fit(points[high].rebuilt, 0.0, "curve")


def measure(study: Study, budget_bytes: int) -> dict[str, object]:
    problem = fresh(study.problem)
    start, start_wall = time.process_time(), time.perf_counter()
    with collector_off():  # as when a program is compiled
        fit = fit_budget(problem, budget_bytes)
    search_s, search_wall_s = time.process_time() - start, time.perf_counter() - start_wall
    planned = study.plan(fit.rebuilt)
    start = time.process_time()
    other = fresh(study.problem)
    greedy = greedy_fit(other, next(iter(other.spacings())).points, budget_bytes)
    greedy_s = time.process_time() - start
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": planned.peak_bytes,
        "unused_share": round(1 - planned.peak_bytes / budget_bytes, 6),
        "method": fit.method,
        "recompute_ms": round(fit.seconds * 1e3, 3),
        "bound_ms": round(fit.bound_seconds * 1e3, 3),
        "gap": round(1 - fit.bound_seconds / fit.seconds, 5) if fit.seconds else 0.0,
        "greedy_ms": round(greedy.seconds * 1e3, 3) if greedy.peak_bytes <= budget_bytes else None,
        "step_ms": round(plan_seconds(planned.plan, planned.source, device_model(DEVICE)) * 1e3, 2),
        "search_s": round(search_s, 2),
        "search_wall_s": round(search_wall_s, 2),
        "greedy_s": round(greedy_s, 2),
    }


def swept(study: Study, low: int, high: int) -> dict[str, object]:
    """Evenly spaced budgets: whether a larger one ever costs more or has a lower peak, and what is left unused."""
    problem = fresh(study.problem)
    budgets = [low + (high - low) * i // SWEPT for i in range(SWEPT + 1)]
    fits = [fit_budget(problem, budget_bytes) for budget_bytes in budgets]
    unused = [1 - fit.peak_bytes / budget_bytes for fit, budget_bytes in zip(fits, budgets, strict=True)]
    return {
        "budgets": len(budgets),
        "exceeded": sum(share < 0 for share in unused),
        "larger_but_dearer": sum(b.seconds > a.seconds * (1 + 1e-9) for a, b in pairwise(fits)),
        "larger_but_lower_peak": sum(b.peak_bytes < a.peak_bytes for a, b in pairwise(fits)),
        "most_unused_share": round(max(unused), 6),
    }


def compiled(layers: int, budget_bytes: int) -> dict[str, object]:
    model, tokens = program(layers)
    jitted = thunder.jit(model, transforms=[MemEfficient(chunk=False, strict=True, budget=budget_bytes)])
    prediction = predict(jitted, tokens, keep_outputs=True)  # as planned: the caller still has the logits
    peaks = {half: prediction.phase(half).peak_bytes for half in ("forward", "backward")}
    return {"budget_bytes": budget_bytes, **{f"{half}_peak_bytes": peak for half, peak in peaks.items()}}


def fewer_layers(layers: int) -> dict[str, object]:
    """The sweep of a smaller model."""
    with simulate(DEVICE):
        study, smallest, free = studied(layers)
        ends = smallest.peak_bytes, free.peak_bytes
        return {
            "layers": layers,
            "ops": len(study.problem.graph),
            "smallest_peak_bytes": ends[0],
            "free_peak_bytes": ends[1],
            **swept(study, *ends),
        }


def studied(layers: int) -> tuple[Study, Planned, Planned]:
    """The model of so many layers, and the plans at both ends of the range."""
    model, tokens = program(layers)
    study = study_program(model, (tokens,), {})
    problem = fresh(study.problem)
    smallest = study.plan(fit_budget(problem, 1).rebuilt)
    return study, smallest, study.plan(min_cut_partition(problem.graph, problem.fuse, problem.choices))


def whole_model(console: Console) -> dict:
    """Budgets of the model with all layers; each part is saved when it is there."""
    with simulate(DEVICE):
        study, smallest, free = studied(LAYERS)
        low, high = smallest.peak_bytes, free.peak_bytes
        ops = len(study.problem.graph)
        console.print(f"{ops} ops, from {low / GIB:.3f} to {high / GIB:.3f} GiB")
        rows = []
        for share in SHARES:
            rows.append({"share": share, **measure(study, int(low + (high - low) * share))})
            console.print(rows[-1])
        step_ms = plan_seconds(free.plan, free.source, device_model(DEVICE)) * 1e3
        record = {
            "command": "python -m benchmarks.budget",
            "torch": torch.__version__,
            "layers": LAYERS,
            "ops": ops,
            "smallest_peak_bytes": low,
            "free_peak_bytes": high,
            "free_step_ms": round(step_ms, 2),
            "rows": rows,
            "compiled": [],
        }
        record["sweep"] = swept(study, low, high)
        console.print(record["sweep"])
        save(record)
        del study, free, smallest
        for share in COMPILED:
            record["compiled"].append(compiled(LAYERS, int(low + (high - low) * share)))
            console.print(record["compiled"][-1])
            save(record)
        return record


def main(only: str = "") -> None:
    if only not in ("", "fewer_layers"):
        raise SystemExit(f"usage: python -m benchmarks.budget [fewer_layers], not {only!r}")
    console = Console()
    torch.set_num_threads(1)
    record = json.loads((RESULTS / "budget.json").read_text()) if only == "fewer_layers" else whole_model(console)
    record["fewer_layers"] = []
    for layers in FEWER_LAYERS:
        record["fewer_layers"].append(fewer_layers(layers))
        console.print(record["fewer_layers"][-1])
        save(record)


def save(record: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "budget.json").write_text(json.dumps(record, indent=1) + "\n")
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    rows = record["rows"]
    peaks = [row["peak_bytes"] / GIB for row in rows]
    axis.plot(peaks, [row["recompute_ms"] for row in rows], "o-", label="integer program")
    axis.plot(peaks, [row["bound_ms"] for row in rows], "_", ms=10, color="black", label="its lower bound")
    found = [row for row in rows if row["greedy_ms"] is not None]
    axis.plot([r["budget_bytes"] / GIB for r in found], [r["greedy_ms"] for r in found], "x", label="greedy")
    axis.set_xlabel("peak, GiB")
    axis.set_ylabel("recomputation, ms")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    figure.savefig(RESULTS / "budget.png", dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
