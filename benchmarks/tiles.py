"""What tiles save on a simulated H100: ``python -m benchmarks.tiles``.

Two layers, bfloat16, checkpoints, the loss inside, with and without tiles: the most bytes that the device holds in the
forward and in the backward, and both with AdamW's states beside them (twice the parameters). Writes
``benchmarks/results/tiles.json``; what has a row there is not run again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import thunder
import torch
from litgpt import GPT, Config
from rich.console import Console
from rich.table import Table

from benchmarks import longchat
from benchmarks.experts import MaskedMixtral
from benchmarks.models import gpt_module
from tests.fuzzing.quick_thunder import interpreted_quickly
from thunder_mem import MemEfficient, last_plan
from thunder_mem.prediction.predict import predict
from thunder_mem.prediction.simulate import simulate

RESULTS = Path(__file__).parent / "results" / "tiles.json"
PROGRAMS = (
    ("longchat-7b-16k", 16384),
    ("Llama-3-8B", 16384),
    ("Llama-3-8B", 131072),
    ("Qwen2.5-7B", 65536),
    ("Mixtral-8x7B-v0.1", 65536),
)


@dataclass(frozen=True)
class Row:
    """One program; `tiles` are its decisions, and all sizes are bytes."""

    model: str
    tokens: int
    tile: bool
    forward_peak_bytes: int
    backward_peak_bytes: int
    states_bytes: int
    tiles: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The higher of both, with the states."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes) + self.states_bytes

    @property
    def above_bytes(self) -> int:
        """That peak above parameters, gradients and states."""
        return self.peak_bytes - 2 * self.states_bytes


def measure(name: str, tokens: int, tile: bool) -> Row:
    """The predicted peaks of one program."""
    own = name == "longchat-7b-16k"
    config = longchat.config(2) if own else Config.from_name(name, n_layer=2, block_size=tokens)
    kind = MaskedMixtral if config.n_expert else GPT
    with simulate("H100-80GB"), interpreted_quickly():
        model = gpt_module(config, True, True, "cuda", torch.bfloat16, kind)
        step = thunder.jit(model, transforms=[MemEfficient(strict=True, tile=tile)])
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        prediction = predict(step, ids, ids)
    peaks = (prediction.phase(half).peak_bytes for half in ("forward", "backward"))
    states_bytes = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    tiles = tuple(d.how for d in last_plan(step).decisions if d.what == "tiles")
    return Row(name, tokens, tile, *peaks, states_bytes, tiles)


def main() -> None:
    console = Console()
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []
    for name, tokens in PROGRAMS:
        for tile in (False, True):
            if any((row.model, row.tokens, row.tile) == (name, tokens, tile) for row in rows):
                continue
            with console.status(f"{name}, {tokens} tokens, tile={tile}"):
                rows.append(measure(name, tokens, tile))
            about = {"command": "python -m benchmarks.tiles", "torch": torch.__version__}
            RESULTS.write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    view = Table(title="2 layers, checkpoints, loss inside, AdamW's states included: GB (simulated H100)")
    for column in ("model", "tokens", "tile", "forward", "backward", "above parameters, gradients, states"):
        view.add_column(column)
    for r in rows:
        peaks = (r.forward_peak_bytes + r.states_bytes, r.backward_peak_bytes + r.states_bytes, r.above_bytes)
        view.add_row(r.model, f"{r.tokens:,}", str(r.tile), *(f"{p / 1e9:.2f}" for p in peaks))
    console.print(view)


if __name__ == "__main__":
    main()
