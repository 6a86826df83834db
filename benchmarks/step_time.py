"""Step time and planning time next to Thunder's own: ``python -m benchmarks.step_time``.

The small litgpt step on the CPU (T=1024, D=256, bf16), and the scaled models of the benchmark's matrix with the
loss inside: Thunder with the package's executors against the same with MemEfficient, on one thread. The two
are timed in turn within one run, so that what else the machine does falls on both, and the ratio of the medians
counts. It differs by up to a tenth between processes, by where their memory happens to lie, and which of the two
was compiled first is part of that: each program runs in four processes of its own, in two of them Thunder's first,
and the median of the four ratios stands first.
Planning's share is of `thunder.jit`'s own time: tracing, transforming and planning, without compiling regions,
which happens at the first call.
Writes ``benchmarks/results/step_time.json``; with the name of a program, and perhaps the order of compilation
(``MemEfficient thunder``), prints what one process finds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import thunder
import torch
from litgpt import GPT, Config
from rich.console import Console
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from benchmarks.litgpt.matrix import MODELS
from benchmarks.litgpt.models import CUSTOM, WithLoss, block_class, build_custom, known_models
from benchmarks.models import Program, llama_step
from thunder_mem import MemEfficient
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.cpu_attention import mem_attention_ex

RESULTS = Path(__file__).parent / "results"
EXECUTORS = [mem_attention_ex, mem_pointwise_ex]
FEWEST_STEPS, MOST_STEPS, SECONDS = 9, 41, 10  # as many as fill these seconds, of either
ORDERS = (("thunder", "MemEfficient"), ("MemEfficient", "thunder")) * 2


def scaled_model(name: str, checkpointing: bool, times_longer: int = 1, dtype: torch.dtype = torch.bfloat16) -> Program:
    """A step of the benchmark's model as it runs on a CPU, perhaps over longer sequences."""
    how = MODELS[name]
    with known_models(how.cpu_scale):
        longer = times_longer * Config.from_name(name).block_size
        config = Config.from_name(name, n_layer=how.cpu_layers, block_size=longer)
        torch.manual_seed(0)
        model = (build_custom(name, config) if name in CUSTOM else GPT(config)).to(dtype)
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


def compare(program: Program, order: Sequence[str]) -> dict[str, object]:
    """Both compiled in that order, then timed in turn."""
    transforms = {"thunder": [], "MemEfficient": [MemEfficient(strict=True)]}
    jitted, jit_ms = {}, {}
    for name in order:
        jitted[name] = thunder.jit(program.fn, executors=EXECUTORS, transforms=transforms[name])
        start = time.perf_counter()
        compiled_entry(jitted[name], program.args, {}, call=True)  # compiles, runs nothing
        jit_ms[name] = (time.perf_counter() - start) * 1e3
        for _ in range(2):
            program.step(jitted[name])
    start = time.perf_counter()
    program.step(jitted[order[0]])
    steps = max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(steps):
        for name in order:
            start = time.perf_counter()
            program.step(jitted[name])
            times[name].append(time.perf_counter() - start)
    row = {
        "program": program.name,
        "steps": steps,
        "median_ms": {name: round(statistics.median(times[name]) * 1e3, 2) for name in transforms},
        "ratio_of_medians": round(statistics.median(times["MemEfficient"]) / statistics.median(times["thunder"]), 4),
        "ratio_of_minima": round(min(times["MemEfficient"]) / min(times["thunder"]), 4),
    }
    if order[0] == "thunder":  # what a process does once is done by then
        planned_ms = planning_ms(jitted["MemEfficient"])
        share = round(planned_ms / jit_ms["MemEfficient"], 4)
        row |= {"planning_ms": planned_ms, "jit_ms": round(jit_ms["MemEfficient"]), "planning_share": share}
    return row


def programs() -> dict[str, Callable[[], Program]]:
    """How to make each program."""
    small = {f"llama, checkpointing {on}": lambda on=on: llama_step(checkpointing=on == "on") for on in ("on", "off")}
    models = {
        f"{name}, checkpointing {on}": lambda name=name, on=on: scaled_model(name, on == "on")
        for on in ("on", "off")
        for name in MODELS
    }
    return small | models


def in_processes(name: str) -> dict[str, object]:
    """The row of one program: the median of its ratios, and what its processes found."""
    found = []
    for order in ORDERS:
        command = [sys.executable, "-m", "benchmarks.step_time", name, *order]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append({"first": order[0], **json.loads(output.splitlines()[-1])})
    (program,) = {row.pop("program") for row in found}
    ratio = statistics.median(row["ratio_of_medians"] for row in found)
    return {"program": program, "median_ratio": round(ratio, 4), "processes": found}


def main(name: str = "", *order: str) -> None:
    torch.set_num_threads(1)
    if name:
        print(json.dumps(compare(programs()[name](), order or ORDERS[0])))
        return
    RESULTS.mkdir(exist_ok=True)
    rows: list[dict[str, object]] = []
    record = {"command": "python -m benchmarks.step_time", "threads": 1, "torch": torch.__version__, "rows": rows}
    for name in programs():
        rows.append(in_processes(name))
        Console().print(rows[-1])
        (RESULTS / "step_time.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
