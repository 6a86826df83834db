"""What updates inside the backward save on a simulated H100: ``python -m benchmarks.step_in_backward``.

A whole training step with AdamW: bfloat16, checkpoints, the loss inside. Each program runs with `optimizer.step()`
after the backward, and with `StepInBackward`; with tiles and without.

Writes ``benchmarks/results/step_in_backward.json``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import thunder
import torch
from litgpt import Config
from rich.console import Console
from rich.table import Table

from benchmarks import longchat
from benchmarks.models import gpt_module
from thunder_mem import MemEfficient, StepInBackward, predict_step, simulate

RESULTS = Path(__file__).parent / "results" / "step_in_backward.json"
PROGRAMS = (("longchat-7b-16k", 2, 16384), ("Llama-3-8B", 2, 16384))


@dataclass(frozen=True)
class Row:
    """One step; all sizes are bytes. `floor_bytes` are its parameters and the optimizer's states."""

    model: str
    layers: int
    tokens: int
    tile: bool
    in_backward: bool
    peak_bytes: int
    phase: str
    operation: str
    floor_bytes: int


def measure(name: str, layers: int, tokens: int, tile: bool, in_backward: bool) -> Row:
    """The predicted peak of one step."""
    own = name == "longchat-7b-16k"
    config = longchat.config(layers) if own else Config.from_name(name, n_layer=layers, block_size=tokens)
    with simulate("H100-80GB"):
        model = gpt_module(config, True, True, "cuda", torch.bfloat16)
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = StepInBackward(adamw) if in_backward else adamw
        transform = MemEfficient(strict=True, tile=tile, optimizer=optimizer if in_backward else None)
        step = thunder.jit(model, transforms=[transform])
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        prediction = predict_step(step, optimizer, None, ids, ids)
    floor_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    event = prediction.peak_event
    return Row(name, layers, tokens, tile, in_backward, prediction.peak_bytes, event.phase, event.name, floor_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of all models, in place of their own number; writes no results")
    parser.add_argument("--models", nargs="*", help="names; writes no results")
    given = parser.parse_args()
    console = Console()
    rows = []
    for name, layers, tokens in PROGRAMS:
        if given.models and name not in given.models:
            continue
        for tile in (False, True):
            for in_backward in (False, True):
                with console.status(f"{name}, {tokens} tokens, tile={tile}, in backward={in_backward}"):
                    rows.append(measure(name, given.layers or layers, tokens, tile, in_backward))
    view = Table(title="AdamW step, checkpoints, loss inside: GB (simulated H100)")
    for column in ("model", "layers", "tokens", "tile", "update", "peak", "at", "parameters and states"):
        view.add_column(column)
    for r in rows:
        update = "in the backward" if r.in_backward else "step()"
        sizes = f"{r.peak_bytes / 1e9:.2f}", f"{r.phase}: {r.operation}", f"{r.floor_bytes / 1e9:.2f}"
        view.add_row(r.model, str(r.layers), f"{r.tokens:,}", str(r.tile), update, *sizes)
    console.print(view)
    if not (given.layers or given.models):
        command = "python -m benchmarks.step_in_backward"
        record = {"command": command, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
