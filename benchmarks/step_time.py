"""Step time and planning time next to Thunder's own: ``python -m benchmarks.step_time``.

The small litgpt step on the CPU (T=1024, D=256, bf16), and the scaled models of the benchmark's matrix with the
loss inside: Thunder with the package's executors against the same with MemEfficient, on one thread. The two
are timed in turn within one run, so that what else the machine does falls on both, and the ratio of the medians
counts. It differs by up to a tenth between processes, by where their memory happens to lie: each program runs in
three processes of its own, and the middle ratio stands first.
Planning's share is of `thunder.jit`'s own time: tracing, transforming and planning, without compiling regions,
which happens at the first call.
Writes ``benchmarks/results/step_time.json``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import thunder
import torch
from litgpt import GPT, Config
from rich.console import Console
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from benchmarks.models import Program, llama_step
from thunder_mem import MemEfficient
from thunder_mem.attention import mem_attention_ex
from thunder_mem.benchmarks.matrix import MODELS
from thunder_mem.benchmarks.models import CUSTOM, WithLoss, block_class, build_custom, known_models
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.predict import compiled_entry

RESULTS = Path(__file__).parent / "results"
EXECUTORS = [mem_attention_ex, mem_pointwise_ex]
STEPS, STEPS_OF_A_MODEL, ROUNDS = 41, 9, 3


def scaled_model(name: str, checkpointing: bool) -> Program:
    """A step of the benchmark's model as it runs on a CPU."""
    how = MODELS[name]
    with known_models(how.cpu_scale):
        config = Config.from_name(name, n_layer=how.cpu_layers)
        torch.manual_seed(0)
        model = (build_custom(name, config) if name in CUSTOM else GPT(config)).to(torch.bfloat16)
    if checkpointing:
        block = block_class(name)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))
    tokens, targets = torch.randint(0, config.vocab_size, (2, how.cpu_batch, config.block_size))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    label = f"{name}, scaled, loss inside, checkpointing {'on' if checkpointing else 'off'}"
    return Program(label, WithLoss(model), (tokens, targets), trains=True)


def planning_ms(jitted: object) -> int:
    return thunder.compile_stats(jitted).thunder_mem_planning_ms


def compare(program: Program, steps: int) -> dict[str, object]:
    plain = thunder.jit(program.fn, executors=EXECUTORS)
    ours = thunder.jit(program.fn, executors=EXECUTORS, transforms=[MemEfficient(strict=True)])
    for compiled in (plain, ours):
        for _ in range(2):
            program.step(compiled)
    times: dict[str, list[float]] = {"thunder": [], "MemEfficient": []}
    for _ in range(steps):
        for name, compiled in (("thunder", plain), ("MemEfficient", ours)):
            start = time.perf_counter()
            program.step(compiled)
            times[name].append(time.perf_counter() - start)
    again = thunder.jit(program.fn, executors=EXECUTORS, transforms=[MemEfficient(strict=True)])
    start = time.perf_counter()
    compiled_entry(again, program.args, {}, call=True)  # compiles, runs nothing
    jit_ms = (time.perf_counter() - start) * 1e3
    return {
        "program": program.name,
        "steps": steps,
        "median_ms": {name: round(statistics.median(t) * 1e3, 2) for name, t in times.items()},
        "ratio_of_medians": round(statistics.median(times["MemEfficient"]) / statistics.median(times["thunder"]), 4),
        "ratio_of_minima": round(min(times["MemEfficient"]) / min(times["thunder"]), 4),
        "planning_ms": planning_ms(again),
        "jit_ms": round(jit_ms),
        "planning_share": round(planning_ms(again) / jit_ms, 4),
    }


def programs() -> dict[str, Callable[[], tuple[Program, int]]]:
    """How to make each program, and its steps."""
    small = {
        f"llama, checkpointing {on}": lambda on=on: (llama_step(checkpointing=on == "on"), STEPS)
        for on in ("on", "off")
    }
    models = {
        f"{name}, checkpointing {on}": lambda name=name, on=on: (scaled_model(name, on == "on"), STEPS_OF_A_MODEL)
        for on in ("on", "off")
        for name in MODELS
    }
    return small | models


def in_processes(name: str) -> dict[str, object]:
    """The row of one program: its middle round, and the ratios of all."""
    command = [sys.executable, "-m", "benchmarks.step_time", name]
    outputs = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in range(ROUNDS)]
    found = sorted((json.loads(text.splitlines()[-1]) for text in outputs), key=lambda row: row["ratio_of_medians"])
    return {**found[ROUNDS // 2], "ratios": [row["ratio_of_medians"] for row in found]}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    if names:
        for name in names:
            program, steps = programs()[name]()
            print(json.dumps(compare(program, steps)))
        return
    RESULTS.mkdir(exist_ok=True)
    rows: list[dict[str, object]] = []
    record = {"command": "python -m benchmarks.step_time", "threads": 1, "torch": torch.__version__, "rows": rows}
    for name in programs():
        rows.append(in_processes(name))
        Console().print(rows[-1])
        (RESULTS / "step_time.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
