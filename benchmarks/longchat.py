"""longchat-7b-16k at full size, without a GPU: ``python -m benchmarks.longchat``.

Two layers, T=16384, B=1, bf16, on a simulated H100, with and without activation checkpointing, the loss
inside or outside of the compiled function. The exact peaks of the final forward and backward traces, in
GiB, parameters included (a tangent of the logits too, where the loss is outside), and how long planning
took next to the whole of Thunder's compilation. Thunder stands here twice: as it is, and without the step of its
fusion pass that computes a region's inputs again from what others keep (`rematerialize`), which by itself takes a
third off what its backward holds. Writes ``benchmarks/results/longchat.json``.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import thunder
import torch
from litgpt import Config
from rich.console import Console
from rich.table import Table

from benchmarks.models import gpt_module
from thunder_mem import MemEfficient
from thunder_mem.prediction.predict import predict
from thunder_mem.prediction.simulate import simulate

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
TOKENS = 16384
COMPILERS = {
    "Thunder consecutive": {},
    "Thunder dataflow": {"fusion_type": "dataflow"},
    "Thunder consecutive, no rematerialize": {},
    "Thunder dataflow, no rematerialize": {"fusion_type": "dataflow"},
    "MemEfficient(chunk=False)": {"transforms": [MemEfficient(chunk=False, strict=True)]},
    "MemEfficient": {"transforms": [MemEfficient(strict=True)]},
}


@dataclass(frozen=True)
class Row:
    checkpointing: bool
    loss_inside: bool
    compiler: str
    forward_peak_bytes: int
    backward_peak_bytes: int
    planning_s: float
    compile_s: float


def config(layers: int) -> Config:
    """longchat-7b-16k, which litgpt no longer lists."""
    return Config(
        name="longchat-7b-16k",
        block_size=TOKENS,
        vocab_size=32000,
        padding_multiple=64,
        n_layer=layers,
        n_head=32,
        n_embd=4096,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
        intermediate_size=11008,
        rope_condense_ratio=8,
    )


def measure(checkpointing: bool, loss_inside: bool, compiler: str, layers: int = 2) -> Row:
    plain = patch("thunder.executors.torch_compile.rematerialize", lambda trace: trace)
    with simulate("H100-80GB"), plain if compiler.endswith("no rematerialize") else nullcontext():
        model = gpt_module(config(layers), checkpointing, loss_inside, "cuda", torch.bfloat16)
        jitted = thunder.jit(model, **COMPILERS[compiler])
        tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
        start = time.perf_counter()
        prediction = predict(jitted, *((tokens, tokens) if loss_inside else (tokens,)))
        took_s = time.perf_counter() - start
    planning_ms = getattr(thunder.compile_stats(jitted), "thunder_mem_planning_ms", 0)
    peaks = [prediction.phase(half).peak_bytes for half in ("forward", "backward")]
    return Row(checkpointing, loss_inside, compiler, *peaks, planning_ms / 1e3, round(took_s, 1))


def main() -> None:
    console = Console()
    rows = []
    for checkpointing in (True, False):
        for loss_inside in (False, True):
            for compiler in COMPILERS:
                with console.status(f"{compiler}, checkpointing {checkpointing}, loss inside {loss_inside}"):
                    rows.append(measure(checkpointing, loss_inside, compiler))
    view = Table(title="longchat-7b-16k, 2 layers, T=16384: peaks of the final traces, GiB (simulated)")
    for column in ("checkpointing", "loss", "compiler", "forward", "backward", "planning s", "jit and predict s"):
        view.add_column(column)
    for row in rows:
        view.add_row(
            "on" if row.checkpointing else "off",
            "inside" if row.loss_inside else "outside",
            row.compiler,
            f"{row.forward_peak_bytes / GIB:.3f}",
            f"{row.backward_peak_bytes / GIB:.3f}",
            f"{row.planning_s:.2f}",
            f"{row.compile_s:.1f}",
        )
    console.print(view)
    record = {"command": "python -m benchmarks.longchat", "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "longchat.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
