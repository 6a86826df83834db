"""Which card a whole training step needs: ``python -m benchmarks.cards``.

Models of 7 to 32 billion parameters in bfloat16, batch 1, checkpoints, the loss inside, tiles, updates in the backward.
Steps of three layers are planned on a simulated H100. Each further layer adds its parameters, their states and one
checkpoint. (Slopes of planned steps would not do, as plans of two and three layers may differ by more than a layer.)
Two figures come by arithmetic from the step with AdamW on the device, because its states live through all of it:

- states on the host: the peak without the bytes of both states;
- 8-bit states: one byte for each number and a float32 scale for each block of 256, for both states. The update's own
  temporaries count as none, as in bitsandbytes' one kernel.

The memory is the tensors' and cuBLAS' workspaces; what the allocator rounds up is not in it. A card fits if that is
within its memory less the CUDA context. Writes ``benchmarks/results/cards.json`` after each plan; ``--missing`` plans
only what is not in it, ``--show`` nothing. ``--check 4 32`` plans 7B with more layers, 32 in seven minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import thunder
import torch
from litgpt import Config, lora
from rich.console import Console
from torch import nn

from benchmarks.models import gpt_module
from thunder_mem import MemEfficient, StepInBackward, predict_step, simulate
from thunder_mem.memory.device_specs import DEVICES

RESULTS = Path(__file__).parent / "results" / "cards.json"
MODELS = {"7B": "Llama-2-7b-hf", "8B": "Llama-3-8B", "13B": "Llama-2-13b-hf", "32B": "Qwen2.5-32B"}
TOKENS = (4096, 16384, 65536)
TRAINS = ("all", "LoRA")
CARDS = {"24": "RTX4090", "40": "A100-40GB", "48": "L40S", "80": "H100-80GB", "141": "H200-141GB"}
RANK = 16
LAYERS = 3  # planned
BLOCK = 256  # numbers that share a scale


@dataclass(frozen=True)
class Planned:
    """A planned step with AdamW's states on the device: its peak in bytes, and where that is."""

    model: str
    trains: str
    tokens: int
    layers: int
    peak_bytes: int
    phase: str
    operation: str


@dataclass(frozen=True)
class Held:
    """What lives through a whole step, in bytes; `states_8bit_bytes` are both states' with one byte for each number."""

    parameters_bytes: int
    states_bytes: int
    states_8bit_bytes: int


def made(name: str, trains: str, tokens: int, layers: int, device: str) -> nn.Module:
    """A model; with "LoRA" only rank 16 beside all linear layers of blocks trains."""
    sizes = {"n_layer": layers, "block_size": tokens}
    if trains == "all":
        return gpt_module(Config.from_name(name, **sizes), True, True, device, torch.bfloat16)
    where = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp"), True)
    config = lora.Config.from_name(name, **sizes, lora_r=RANK, lora_alpha=2 * RANK, **where)
    model = gpt_module(config, True, True, device, torch.bfloat16, lora.GPT)
    lora.mark_only_lora_as_trainable(model)
    return model


def plan(size: str, trains: str, tokens: int, layers: int) -> Planned:
    """The step of a model with so many layers."""
    with simulate("H100-80GB"):
        model = made(MODELS[size], trains, tokens, layers, "cuda")
        optimizer = StepInBackward(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
        step = thunder.jit(model, transforms=[MemEfficient(strict=True, tile=True, optimizer=optimizer)])
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        prediction = predict_step(step, optimizer, None, ids, ids)
    event = prediction.peak_event
    return Planned(size, trains, tokens, layers, prediction.peak_bytes, event.phase, event.name)


@cache
def held(size: str, trains: str, layers: int) -> Held:
    """What a model of so many layers holds."""
    parameters = list(made(MODELS[size], trains, 1, layers, "meta").parameters())
    numbers = [p.numel() for p in parameters if p.requires_grad]
    small = sum(n + 4 * -(-n // BLOCK) for n in numbers)
    return Held(2 * sum(p.numel() for p in parameters), 4 * sum(numbers), 2 * small)


def whole(row: Planned, layers: int | None = None) -> Planned:
    """The step with all layers, or with so many: each further one adds its parameters, their states and a checkpoint.

    Example:
        >>> whole(Planned("7B", "all", 4096, 3, 6_000_000_000, "backward", "matmul")).peak_bytes
        42187783168
    """
    config = Config.from_name(MODELS[row.model])
    layers = layers or config.n_layer
    few, many = (held(row.model, row.trains, n) for n in (row.layers, layers))
    more_bytes = many.parameters_bytes + many.states_bytes - few.parameters_bytes - few.states_bytes
    more_bytes += (layers - row.layers) * 2 * row.tokens * config.n_embd
    return replace(row, layers=layers, peak_bytes=row.peak_bytes + more_bytes)


def ways(row: Planned) -> Iterator[tuple[str, int]]:
    """What trains, where the states are, and the peak."""
    if row.trains == "LoRA":
        yield "LoRA", row.peak_bytes
        return
    known = held(row.model, row.trains, row.layers)
    yield "AdamW", row.peak_bytes
    yield "AdamW, 8-bit states\\*", row.peak_bytes - known.states_bytes + known.states_8bit_bytes
    yield "AdamW, states on the host", row.peak_bytes - known.states_bytes


def smallest_card(peak_bytes: int) -> str:
    """The nominal GB of the smallest card on which a peak fits, or "none".

    Example:
        >>> smallest_card(20 * 2**30), smallest_card(200 * 2**30)
        ('24', 'none')
    """
    return next((gb for gb, name in CARDS.items() if peak_bytes <= DEVICES[name].usable_bytes), "none")


def table(rows: Sequence[Planned]) -> str:
    """The table of the docs: peaks in GiB, and the smallest card, by tokens."""
    found = {(r.model, r.trains, r.tokens): r for r in rows}
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for size, trains, tokens in product(MODELS, TRAINS, TOKENS):
        if row := found.get((size, trains, tokens)):
            for way, peak_bytes in ways(whole(row)):
                text = f"{peak_bytes / 2**30:.1f}: **{smallest_card(peak_bytes)}**"
                cells.setdefault((size, way), {})[tokens] = text
    lines = ["| model | trains | " + " | ".join(f"{t // 1024}K tokens" for t in TOKENS) + " |", "|---" * 5 + "|"]
    for (size, way), texts in cells.items():
        lines.append(f"| {size} | {way} | " + " | ".join(texts.get(t, "") for t in TOKENS) + " |")
    return "\n".join(lines)


def write(rows: Sequence[Planned], checked: Sequence[dict[str, object]]) -> None:
    about = {"command": "python -m benchmarks.cards", "torch": torch.__version__}
    RESULTS.write_text(json.dumps({**about, "checked": checked, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="plan only the steps that the results lack")
    parser.add_argument("--show", action="store_true", help="plan nothing, and print the table of the results")
    parser.add_argument("--check", type=int, nargs="*", default=(), help="plan 7B with 16K tokens and so many layers")
    given = parser.parse_args()
    console = Console()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "checked": []}
    checked, known = before["checked"], [Planned(**r) for r in before["rows"]]
    keep = given.missing or given.show or given.check
    rows = {(r.model, r.trains, r.tokens): r for r in known} if keep else {}
    wanted = [] if given.show or given.check else product(TRAINS, MODELS, TOKENS)
    for trains, size, tokens in wanted:
        if (key := (size, trains, tokens)) not in rows:
            start = time.perf_counter()
            rows[key] = row = plan(size, trains, tokens, LAYERS)
            write([*rows.values()], checked)
            console.print(f"{key}: {row.peak_bytes / 2**30:.2f} GiB, {time.perf_counter() - start:.0f} s", style="dim")
    if given.check:
        for layers in given.check:
            found, planned = whole(rows["7B", "all", 16384], layers), plan("7B", "all", 16384, layers)
            about = {"model": "7B", "trains": "all", "tokens": 16384, "layers": layers}
            both = {"planned_bytes": planned.peak_bytes, "found_bytes": found.peak_bytes}
            checked = [c for c in checked if c["layers"] != layers] + [about | both]
            write([*rows.values()], checked)
        console.print(checked)
    console.print(table([*rows.values()]), soft_wrap=True)


if __name__ == "__main__":
    main()
