"""The longest sequence of Llama-3-8B on one H100: ``python -m benchmarks.longest_sequence``.

All 32 layers with LoRA of rank 16 beside the linear layers of the blocks, AdamW, bfloat16, batch 1, checkpoints and the
loss inside, on a simulated H100 of 80 GB: Thunder's benchmark loop under each compiler. The search is that of
`largest_sequence`, in steps of 1,024 tokens. It plans two and three layers, and each further layer adds their
difference. Writes ``benchmarks/results/longest_sequence.json`` after each plan; what has a row is not run again.
``--check 32`` plans all layers at the longest sequences that were found, in half an hour.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import thunder
import torch
from rich.console import Console
from thunder.core.transform_common import Transform

from benchmarks import cards
from benchmarks.litgpt.fake_loop import LoopPeak, fake_cpu, fake_peak
from benchmarks.litgpt.inductor_loop import inductor_peak
from benchmarks.litgpt.predicted_loop import predicted_peak
from tests.fuzzing.quick_thunder import interpreted_quickly
from thunder_mem import MemEfficient, simulate
from thunder_mem.analysis.capacity import largest_fitting
from thunder_mem.memory.device_specs import DEVICES

RESULTS = Path(__file__).parent / "results" / "longest_sequence.json"
MODEL, DEVICE, LAYERS, FEW, STEP = "Llama-3-8B", "H100-80GB", 32, (2, 3), 1024
LIMIT = 2**20
BY_THUNDER: dict[str, Callable[[], list[Transform]]] = {
    "Thunder": list,
    "MemEfficient(tile=False)": lambda: [MemEfficient(strict=True, tile=False)],
    "MemEfficient": lambda: [MemEfficient(strict=True)],
}
WAYS = ("eager", "torch.compile", *BY_THUNDER)


@dataclass(frozen=True)
class Planned:
    """The peak in bytes of a loop with so many layers, with cuBLAS' workspaces, and where it is."""

    way: str
    layers: int
    tokens: int
    peak_bytes: int
    phase: str
    operation: str
    seconds: float


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and the peaks in bytes there and one step beyond."""

    way: str
    tokens: int
    peak_bytes: int
    beyond_bytes: int


def plan(way: str, layers: int, tokens: int) -> Planned:
    """The loop of a model with so many layers."""
    start = time.perf_counter()
    peak = _by_thunder(way, layers, tokens) if way in BY_THUNDER else _by_pytorch(way, layers, tokens)
    seconds = round(time.perf_counter() - start, 1)
    return Planned(way, layers, tokens, peak.peak_bytes + peak.library_bytes, peak.phase, peak.operation, seconds)


def _by_thunder(way: str, layers: int, tokens: int) -> LoopPeak:
    with simulate(DEVICE), interpreted_quickly():
        model = cards.made(MODEL, "LoRA", tokens, layers, "cuda")
        step = thunder.jit(model, transforms=BY_THUNDER[way]())
        return predicted_peak(step, _adamw(model), _batch(tokens, "cuda"), loss_inside=True)


def _by_pytorch(way: str, layers: int, tokens: int) -> LoopPeak:
    peak_of = fake_peak if way == "eager" else inductor_peak
    with fake_cpu():
        model = cards.made(MODEL, "LoRA", tokens, layers, "cpu")
        return peak_of(model, _adamw(model), _batch(tokens, "cpu"), loss_inside=True, device=DEVICE)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def _batch(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, tokens, dtype=torch.long, device=device), torch.zeros(
        1, tokens, dtype=torch.long, device=device
    )


def of_layers(layers: int, few: Sequence[Planned]) -> int:
    """The peak with more layers than two that were planned: equal layers add equal bytes.

    Example:
        >>> few = [Planned("eager", n, 1024, 100 + 10 * n, "backward", "mm", 0.0) for n in (2, 3)]
        >>> of_layers(32, few)
        420
    """
    two, three = few
    return three.peak_bytes + (layers - three.layers) * (three.peak_bytes - two.peak_bytes) // (
        three.layers - two.layers
    )


def longest(way: str, planned: Callable[[int, int], Planned]) -> Longest:
    """The longest sequence that fits.

    Args:
        way: one of `WAYS`.
        planned: the loop with so many layers and tokens.
    """
    peaks: dict[int, int] = {}

    def headroom_bytes(count: int) -> int:
        peaks[count] = of_layers(LAYERS, [planned(layers, count * STEP) for layers in FEW])
        return DEVICES[DEVICE].usable_bytes - peaks[count]

    count = largest_fitting(headroom_bytes, LIMIT // STEP, first=64)
    return Longest(way, count * STEP, peaks[count], peaks[count + 1])


def table(rows: Sequence[Longest]) -> str:
    """The table of the docs.

    Example:
        >>> print(table([Longest("eager", 2048, 84 * 10**9, 85 * 10**9)]))
        | | longest sequence, tokens | peak there, GB |
        |---|---|---|
        | eager | 2,048 | 84.0 |
    """
    lines = ["| | longest sequence, tokens | peak there, GB |", "|---|---|---|"]
    for row in rows:
        name = f"`{row.way}`" if row.way.startswith("MemEfficient") else row.way
        lines.append(f"| {name} | {row.tokens:,} | {row.peak_bytes / 1e9:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=int, help="plan so many layers at the longest sequences, and compare")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="to check")
    given = parser.parse_args()
    console = Console()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    plans = {(p.way, p.layers, p.tokens): p for p in (Planned(**row) for row in before.get("plans", []))}
    rows = {row.way: row for row in (Longest(**row) for row in before.get("rows", []))}

    def planned(way: str, layers: int, tokens: int) -> Planned:
        key = way, layers, tokens
        if key not in plans:
            with console.status(f"{way}, {layers} layers, {tokens:,} tokens"):
                plans[key] = plan(*key)
            console.print(plans[key], style="dim")
            _write(rows.values(), plans.values())
        return plans[key]

    for way in WAYS:
        if way not in rows:
            rows[way] = longest(way, partial(planned, way))
            _write(rows.values(), plans.values())
    for way in given.ways if given.check else ():
        tokens = rows[way].tokens
        found = of_layers(given.check, [planned(way, n, tokens) for n in FEW])
        console.print(f"{way}: {planned(way, given.check, tokens).peak_bytes:,} bytes planned, {found:,} found")
    console.print(table([rows[way] for way in WAYS]), soft_wrap=True)


def _write(rows: Iterable[Longest], plans: Iterable[Planned]) -> None:
    about = {"command": "python -m benchmarks.longest_sequence", "torch": torch.__version__, "device": DEVICE}
    found = {"rows": [asdict(r) for r in rows], "plans": [asdict(p) for p in plans]}
    RESULTS.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
