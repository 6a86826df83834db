"""What the host has to start for chunk loops on a GPU that is not there: ``python -m benchmarks.loop_calls``.

The loss heads of the benchmark matrix at full size (16,384 tokens, bfloat16, activation checkpointing, the loss
inside, two layers), and the stretches that run in tiles there, on a simulated H100. Each row is one run of the loop by
which gradients come: its calls, how long the host takes for them by the device model, and how long the device works by
the roofline. Equal loops have one row. Writes ``benchmarks/results/loop_calls.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import thunder
import torch
from litgpt import GPT, Config
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from benchmarks.litgpt.matrix import MODELS
from benchmarks.litgpt.models import CUSTOM, WithLoss, block_class, build_custom, known_models
from thunder_mem import MemEfficient
from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.chunk_loop.price import device_seconds, host_calls
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.memory.device_models import device_model
from thunder_mem.prediction.simulate import simulate

__all__ = ["Row", "measure", "row_of"]

RESULTS = Path(__file__).parent / "results"
DEVICE = "H100-80GB"
LAYERS = 2


@dataclass(frozen=True)
class Row:
    """A loop of a model's plan.

    Attributes:
        loops: how many equal ones the plan has.
        depth, width: of a head's product; None for a stretch in tiles, which has several.
        wide_bytes: of the results of a chunk's products.
        host_share: of the device's time, the share that the host takes.
    """

    model: str
    loops: int
    rows: int
    depth: int | None
    width: int | None
    mode: str
    chunks: int
    chunk_rows: int
    block_rows: int
    wide_bytes: int
    scratch_bytes: int
    calls: int
    host_s: float
    device_s: float
    host_share: float


def row_of(model: str, plan: LoopPlan) -> Row:
    """The row of a loop, with the calls of the run that computes its gradients."""
    device = device_model(DEVICE)
    calls = host_calls(plan, backward=True)
    host_s, device_s = calls * device.launch_s, device_seconds(plan, device, backward=True)
    gemm = None if plan.is_stretch else plan.gemms[0]
    return Row(
        model=model,
        loops=1,
        rows=plan.n,
        depth=gemm and gemm.depth,
        width=gemm and gemm.width,
        mode=plan.mode,
        chunks=plan.chunks,
        chunk_rows=plan.chunk_rows,
        block_rows=plan.block_rows,
        wide_bytes=plan.chunk_rows * (plan.wide_row_bytes if plan.is_stretch else plan.row_bytes),
        scratch_bytes=plan.backward_scratch_bytes,
        calls=calls,
        host_s=host_s,
        device_s=device_s,
        host_share=host_s / device_s,
    )


def measure(name: str) -> list[Row]:
    """Plan a model of the matrix; one row for each of its chunk loops, or for several equal ones."""
    how = MODELS[name]
    with known_models(), simulate(DEVICE):
        config = Config.from_name(name, n_layer=LAYERS)
        with torch.device("cuda"):
            model = (build_custom(name, config) if name in CUSTOM else GPT(config)).to(torch.bfloat16)
            tokens = torch.zeros(how.batch, config.block_size, dtype=torch.long)
        layer = block_class(name)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, layer)
        )
        jitted = thunder.jit(WithLoss(model), transforms=[MemEfficient(strict=True)])
        thunder.compile_data(jitted).get_computation_and_inputs(tokens, tokens)
        loops = [loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)]
    rows = Counter(row_of(name, plan) for plan in dict.fromkeys(loop.plan for loop in loops))
    return [replace(row, loops=count) for row, count in rows.items()]


def main() -> None:
    console, rows = Console(), []
    for name in MODELS:
        with console.status(name):
            rows += measure(name)
    view = Table(title=f"Loss heads and stretches of the matrix's models on a simulated {DEVICE}")
    columns = (
        "model",
        "loops",
        "rows x D x V",
        "chunks",
        "rows, block",
        "calls",
        "host ms",
        "device ms",
        "host's share",
    )
    for column in columns:
        view.add_column(column)
    for row in rows:
        view.add_row(
            row.model,
            str(row.loops),
            f"{row.rows} in tiles" if row.depth is None else f"{row.rows} x {row.depth} x {row.width}",
            str(row.chunks),
            f"{row.chunk_rows}, {row.block_rows}",
            str(row.calls),
            f"{row.host_s * 1e3:.2f}",
            f"{row.device_s * 1e3:.1f}",
            f"{row.host_share:.1%}",
        )
    console.print(view)
    command = "python -m benchmarks.loop_calls"
    record = {"command": command, "torch": torch.__version__, "device": DEVICE, "rows": [asdict(r) for r in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "loop_calls.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
