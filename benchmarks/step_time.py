"""Step time and planning time next to Thunder's own: ``python -m benchmarks.step_time``.

The small litgpt step on the CPU (T=1024, D=256, bf16), Thunder with the package's executors against the
same with MemEfficient. The two are timed in turn within one run, so that what else the machine does
falls on both; the ratio of the medians counts. Planning's share is of `thunder.jit`'s own time: tracing,
transforming and planning, without compiling regions, which happens at the first call.
Writes ``benchmarks/results/step_time.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import thunder
import torch
from rich.console import Console

from benchmarks.models import llama_step
from thunder_mem import MemEfficient
from thunder_mem.attention import mem_attention_ex
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.predict import compiled_entry

RESULTS = Path(__file__).parent / "results"
EXECUTORS = [mem_attention_ex, mem_pointwise_ex]
STEPS = 41


def planning_ms(jitted: object) -> int:
    return thunder.compile_stats(jitted).thunder_mem_planning_ms


def compare(checkpointing: bool) -> dict[str, object]:
    program = llama_step(checkpointing=checkpointing)
    plain = thunder.jit(program.fn, executors=EXECUTORS)
    ours = thunder.jit(program.fn, executors=EXECUTORS, transforms=[MemEfficient(strict=True)])
    for compiled in (plain, ours):
        for _ in range(2):
            program.step(compiled)
    times: dict[str, list[float]] = {"thunder": [], "MemEfficient": []}
    for _ in range(STEPS):
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
        "median_ms": {name: round(statistics.median(t) * 1e3, 2) for name, t in times.items()},
        "ratio_of_medians": round(statistics.median(times["MemEfficient"]) / statistics.median(times["thunder"]), 4),
        "ratio_of_minima": round(min(times["MemEfficient"]) / min(times["thunder"]), 4),
        "planning_ms": planning_ms(again),
        "jit_ms": round(jit_ms),
        "planning_share": round(planning_ms(again) / jit_ms, 4),
    }


def main() -> None:
    torch.set_num_threads(2)
    rows = [compare(checkpointing) for checkpointing in (True, False)]
    Console().print(rows)
    RESULTS.mkdir(exist_ok=True)
    record = {"command": "python -m benchmarks.step_time", "steps": STEPS, "torch": torch.__version__, "rows": rows}
    (RESULTS / "step_time.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
