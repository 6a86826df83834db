"""What a step gains where its peak has room for values of checkpoints: ``python -m benchmarks.kept_results``.

longchat-7b-16k in bfloat16, batch 1, checkpoints and the loss inside, on a simulated H100. The modelled time of forward
and backward, and their peak, when the backward repeats all that checkpoints offer, and when it receives what the peak
has room for. Writes ``benchmarks/results/kept_results.json`` after each row; layers and tokens after the module's name
replace the rows: ``2x16384``. All 32 layers take ten minutes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import thunder
import torch
from rich.console import Console

from benchmarks.longchat import config
from benchmarks.models import gpt_module
from thunder_mem import MemEfficient, simulate
from thunder_mem.decisions import pipeline
from thunder_mem.decisions.kept_results import KEPT, with_kept_results
from thunder_mem.decisions.program import Planned
from thunder_mem.prediction.compiled_call import compiled_entry

RESULT = Path(__file__).parent / "results" / "kept_results.json"
ROWS = ("2x16384", "4x4096", "32x16384")


@dataclass(frozen=True)
class Row:
    """One step under both plans."""

    layers: int
    tokens: int
    repeating_ms: float
    keeping_ms: float
    repeating_bytes: int
    keeping_bytes: int
    kept: str


def measure(layers: int, tokens: int) -> Row:
    plans: list[Planned] = []

    def noted(planned: Planned) -> Planned:
        plans[:] = planned, with_kept_results(planned)
        return plans[1]

    with simulate("H100-80GB"), patch.object(pipeline, "with_kept_results", noted):
        batch = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        model = gpt_module(config(layers), True, True, "cuda", torch.bfloat16)
        compiled_entry(thunder.jit(model, transforms=[MemEfficient(strict=True)]), (batch, batch), {}, call=True)
        times = [round(1e3 * planned.final_seconds, 1) for planned in plans]
    kept = next((d.how for d in plans[1].plan.decisions if d.what == KEPT), "")
    return Row(layers, tokens, *times, *(planned.peak_bytes for planned in plans), kept)


def main(*rows: str) -> None:
    record = {"command": "python -m benchmarks.kept_results", "device": "simulated H100-80GB"}
    before = json.loads(RESULT.read_text())["rows"] if rows and RESULT.exists() else []
    found = {(row["layers"], row["tokens"]): row for row in before}
    for row in rows or ROWS:
        layers, tokens = map(int, row.split("x"))
        found[layers, tokens] = asdict(measure(layers, tokens))
        Console().print(found[layers, tokens])
        RESULT.write_text(json.dumps(record | {"rows": list(found.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
