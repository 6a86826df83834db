"""What one can choose to recompute of longchat-7b-16k, 2 layers: ``python -m benchmarks.recompute_figures``.

T=16384, B=1, bf16, loss outside, no checkpointing, on a simulated H100: the peaks under whole
configurations (layer by layer, and ready policies), then every pattern of `recompute_table` with its bytes,
its time and what it does to the peak. Writes ``benchmarks/results/recompute_figures.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import thunder
import torch
from rich.console import Console

from benchmarks import longchat
from benchmarks.models import gpt_module
from thunder_mem import MemEfficient, policies, recompute_table, simulate
from thunder_mem.analysis.partition_problem import study_program
from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.memory.device_models import device_model
from thunder_mem.partition.min_cut_partition import min_cut_partition, saved_storages

RESULTS = Path(__file__).parent / "results"
DEVICE = "H100-80GB"
WAYS: dict[str, Any] = {
    "default": None,
    "layerwise": "layerwise",
    "save_only_matmul_outputs": policies.save_only_matmul_outputs,
    "save_only_attention_outputs": policies.save_only_attention_outputs,
    "first_of(save_between_layers, save_only_attention_outputs)": policies.first_of(
        policies.save_between_layers, policies.save_only_attention_outputs
    ),
    "every_second_matmul": policies.every_second_matmul,
}


def program() -> tuple[torch.nn.Module, torch.Tensor]:
    model = gpt_module(longchat.config(2), False, False, "cuda", torch.bfloat16)
    return model, torch.zeros(1, longchat.TOKENS, dtype=torch.long, device="cuda")


def measure(way: str) -> dict[str, Any]:
    model, tokens = program()
    jitted = thunder.jit(model, transforms=[MemEfficient(chunk=False, strict=True, recompute=WAYS[way])])
    study = study_program(jitted, (tokens,), {})
    problem = study.problem
    rebuilt = min_cut_partition(problem.graph, problem.fuse, problem.choices)
    planned = study.plan(rebuilt)
    return {
        "recompute": way,
        "forward_peak_bytes": planned.plan.candidate.forward_peak_bytes,
        "backward_peak_bytes": planned.plan.candidate.backward_peak_bytes,
        "received_bytes": sum(problem.graph.storages[s].nbytes for s in saved_storages(problem.graph, rebuilt)),
        "step_ms": round(plan_seconds(planned.plan, planned.source, device_model(DEVICE)) * 1e3, 2),
    }


def main() -> None:
    record: dict[str, Any] = {
        "command": "python -m benchmarks.recompute_figures",
        "torch": torch.__version__,
        "device": DEVICE,
        "ways": [],
    }
    with simulate(DEVICE):
        for way in WAYS:
            record["ways"].append(measure(way))
            Console().print(record["ways"][-1])
            save(record)
        model, tokens = program()
        table = recompute_table(model, tokens)
        print(table)
    fields = ("config", "now", "shapes", "count", "saved_bytes", "peak_change_bytes", "ms", "ms_per_gib")
    record["patterns"] = [{field: row[field] for field in fields} for row in table.to_json()["rows"]]
    save(record)


def save(record: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "recompute_figures.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
