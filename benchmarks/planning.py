"""How planning grows with the program: ``python -m benchmarks.planning``.

litgpt LLaMA-style training steps of 2 to 80 layers (small widths; the joint trace's length is what
counts), compiled by Thunder with MemEfficient, nothing run. Splits the planner's time into reading
traces, deciding, and emitting, beside the verifier's, that of the fusion pass of Thunder's that planning
replaces, on the same trace, and the whole of Thunder's compile time. So for the small steps of `benchmarks.models`
with checkpoints, whose stretches may run in tiles: then two programs are arranged, and Thunder's autograd runs
once more for the second, which is not the planner's time. All in seconds of this process' CPU.
``python -m benchmarks.planning steps`` measures only the small steps again. Writes
``benchmarks/results/planning.json`` and ``planning.png``.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from unittest import mock

import matplotlib
import thunder
import torch
from rich.console import Console
from thunder.core.trace import TraceCtx

from benchmarks.models import Program, llama_step
from thunder_mem import MemEfficient
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.decisions import partition_choice, pipeline, refine, stages
from thunder_mem.decisions import program as programs
from thunder_mem.planning import executor
from thunder_mem.planning.fallback import Original
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
LAYERS = (2, 8, 18, 32, 80)
LINES = (
    ("planning_s", "planning, whole"),
    ("arrange_s", "of which deciding"),
    ("verify_rewrite_s", "verifying the plan (optional beyond 2,000 ops)"),
    ("thunders_fusion_pass_s", "Thunder's own fusion pass"),
)


def measure(program: Program) -> dict[str, float]:
    spent = dict.fromkeys(("lower_plan", "unfused", "read_trace", "arrange", "emit", "verify_rewrite"), 0.0)
    own_pass_s = 0.0
    ops: list[int] = []

    def time_own_pass(trace: TraceCtx) -> None:
        nonlocal own_pass_s
        start = time.process_time()
        mem_pointwise_ex.fusion_pass(trace)
        own_pass_s = time.process_time() - start

    def timed(room: ModuleType | type, name: str):
        inner = getattr(room, name)

        def call(*args, **kwargs):
            if name == "lower_plan":
                time_own_pass(args[0])
            start = time.process_time()
            result = inner(*args, **kwargs)
            spent[name] += time.process_time() - start
            if name == "read_trace":
                ops.append(len(result.graph))
            return result

        return mock.patch.object(room, name, call)

    jitted = thunder.jit(
        program.fn, executors=[mem_attention_ex, mem_pointwise_ex], transforms=[MemEfficient(verify=True, strict=True)]
    )
    with ExitStack() as stack:
        stack.enter_context(timed(executor, "lower_plan"))
        stack.enter_context(timed(Original, "unfused"))
        for room in (programs, refine, stages):
            stack.enter_context(timed(room, "read_trace"))
        for room in (partition_choice, refine):
            stack.enter_context(timed(room, "arrange"))
        stack.enter_context(timed(stages, "emit"))
        stack.enter_context(timed(pipeline, "verify_rewrite"))
        start = time.process_time()
        compiled_entry(jitted, program.args, {}, call=True)
        jit_s = time.process_time() - start - own_pass_s
    planning_s = spent.pop("lower_plan") - spent["verify_rewrite"] - spent["unfused"]
    return {
        "ops": ops[0],
        "planning_s": round(planning_s, 3),
        **{f"{name}_s": round(seconds, 3) for name, seconds in spent.items()},
        "thunders_fusion_pass_s": round(own_pass_s, 3),
        "jit_s": round(jit_s, 2),
        "share": round(planning_s / jit_s, 4),
    }


def deep(layers: int) -> Program:
    return llama_step(layers=layers, tokens=64, width=32, heads=2, mlp_width=64, checkpointing=False)


def steps() -> list[dict[str, float | str]]:
    """The two small steps with checkpoints."""
    rows: list[dict[str, float | str]] = []
    for inside in (True, False):
        program = llama_step(vocab=8000 if inside else 256, loss_inside=inside)
        rows.append({"program": program.name, **measure(program)})
        Console().print(rows[-1])
    return rows


def draw(rows: list[dict[str, float]]) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ops = [row["ops"] for row in rows]
    for name, label in LINES:
        axis.plot(ops, [row[name] for row in rows], marker="o", label=label)
    axis.set_xlabel("ops in the joint trace")
    axis.set_ylabel("seconds of CPU")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    figure.savefig(RESULTS / "planning.png", dpi=130)


def main() -> None:
    torch.set_num_threads(1)
    measure(deep(1))  # imports and caches
    record = {"command": "python -m benchmarks.planning", "torch": torch.__version__}
    if sys.argv[1:] == ["steps"]:
        old = json.loads((RESULTS / "planning.json").read_text())
        record = old | {"steps_command": f"{record['command']} steps", "steps": steps()}
    elif sys.argv[1:]:
        sys.exit("usage: python -m benchmarks.planning [steps]")
    else:
        rows = []
        for count in LAYERS:
            rows.append({"layers": count, **measure(deep(count))})
            Console().print(rows[-1])
        record |= {"rows": rows, "steps": steps()}
        draw(rows)
    (RESULTS / "planning.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
