"""What it costs to plan and predict a step of longchat-7b-16k: ``python -m benchmarks.predict_longchat``.

All 32 layers, T=16384, B=1, bf16, activation checkpointing, the loss inside, on a simulated H100. One
process compiles with Thunder alone, another with MemEfficient and then predicts forward and backward,
and the whole AdamW step. Processor seconds (other programs may share the machine), wall seconds, and
the most memory of the host that the process held. Writes ``benchmarks/results/predict_longchat.json``;
numbers after the module's name replace the 32 layers, and then nothing is written.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import thunder
import torch
from rich.console import Console

from benchmarks.longchat import TOKENS, config
from benchmarks.models import gpt_module
from thunder_mem import MemEfficient
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.prediction.predict import predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step

RESULTS = Path(__file__).parent / "results"
LAYERS = 32
GIB = 2**30


def work(layers: int, with_plan: bool) -> dict[str, float]:
    """Compile, with the plan also predict, and return what that took; runs in a process of its own."""
    torch.set_num_threads(1)
    spent: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        spent[f"{name}_s"] = round(time.process_time() - processor, 2)
        spent[f"{name}_wall_s"] = round(time.perf_counter() - wall, 2)

    def build(count: int):
        model = gpt_module(config(count), True, True, "cuda", torch.bfloat16)
        return thunder.jit(model, transforms=[MemEfficient(strict=True)] if with_plan else [])

    with simulate("H100-80GB"):
        tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
        warm = build(1)  # imports and caches
        compiled_entry(warm, (tokens, tokens), {}, call=True)
        start_bytes = _resident_bytes()
        step = build(layers)
        with timed("compile"):
            compiled_entry(step, (tokens, tokens), {}, call=True)
        if with_plan:
            with timed("predict"):
                prediction = predict(step, tokens, tokens)
            with timed("predict_step"):
                whole = predict_step(step, torch.optim.AdamW(step.parameters()), None, tokens, tokens)
            spent["planning_s"] = thunder.compile_stats(step).thunder_mem_planning_ms / 1e3
            spent["peak_gib"] = round(prediction.peak_bytes / GIB, 3)
            spent["step_peak_gib"] = round(whole.peak_bytes / GIB, 3)
            spent["operations"] = len(prediction.timeline)
    spent["host_gib"] = round(_resident_bytes() / GIB, 2)
    spent["host_before_gib"] = round(start_bytes / GIB, 2)
    return spent


def _resident_bytes() -> int:
    """The most that this process ever held, in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run(layers: int, with_plan: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.predict_longchat", "--work", str(layers), str(int(with_plan))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(layers: int) -> None:
    console = Console()
    with console.status("Thunder alone"):
        alone = _run(layers, False)
    with console.status("MemEfficient and prediction"):
        planned = _run(layers, True)
    ratio = (planned["compile_s"] + planned["predict_s"]) / alone["compile_s"]
    record = {
        "command": "python -m benchmarks.predict_longchat",
        "torch": torch.__version__,
        "layers": layers,
        "tokens": TOKENS,
        "thunder": alone,
        "thunder_mem": planned,
        "times_thunders_own": round(ratio, 2),
    }
    console.print(record)
    if layers == LAYERS:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "predict_longchat.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(int(sys.argv[2]), bool(int(sys.argv[3])))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS)
