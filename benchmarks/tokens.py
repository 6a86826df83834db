"""How the peak of a step grows with the tokens of a sequence: ``python -m benchmarks.tokens``.

Two layers of Llama-3-8B in bfloat16 on a simulated H100: Thunder's benchmark loop with AdamW, checkpoints and the loss
inside, with one sequence of 16K to 512K tokens. The table counts the bytes above parameters, gradients
and AdamW's states, in KB a token. Writes ``benchmarks/results/tokens.json``, and the picture of the guide on tiles;
what has a row is not run again.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.litgpt.rows import metrics_here

RESULTS = Path(__file__).parent / "results" / "tokens.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "tokens.svg"
TOKENS = tuple(2**k for k in range(14, 20))
STEP = (
    *("--model_name", "Llama-3-8B", "--n_layers", "2", "--micro_batch_size", "1"),
    *("--checkpoint_activations", "True", "--loss_inside", "True", "--device", "simulate:H100-80GB"),
)
_MEM = ("--compile", "thunder", "--mem_efficient", "True")
COMPILERS = {
    "eager": ("--compile", "eager"),
    "torch.compile": ("--compile", "inductor"),
    "MemEfficient(tile=False)": (*_MEM, "--mem_tile", "False"),
    "MemEfficient": _MEM,
}
_COLOURS = ("#8c8c8c", "#e0a030", "#e58c99", "#bb3344")


@dataclass(frozen=True)
class Row:
    """One run; `fixed_bytes` are parameters, their gradients and the optimizer's states."""

    compiler: str
    tokens: int
    peak_bytes: int
    fixed_bytes: int
    command: str

    @property
    def token_bytes(self) -> float:
        """Bytes of the peak above what is fixed, for each token."""
        return (self.peak_bytes - self.fixed_bytes) / self.tokens


def measure(compiler: str, tokens: int) -> Row:
    """The peak of one training loop.

    Raises:
        RuntimeError: the loop failed.
    """
    arguments = [*STEP, "--block_size", str(tokens), *COMPILERS[compiler]]
    metrics = metrics_here(arguments)
    if "error" in metrics:
        raise RuntimeError(f"{compiler}, {tokens} tokens: {metrics['error']}")
    # The loop holds parameters and two states each, so a gradient is a third of that.
    fixed_bytes = metrics["held_bytes"] * 4 // 3
    return Row(
        compiler, tokens, metrics["peak_bytes"], fixed_bytes, f"python -m benchmarks.litgpt {shlex.join(arguments)}"
    )


def main() -> None:
    console = Console()
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []
    for tokens in TOKENS:
        for compiler in COMPILERS:
            if not any((row.compiler, row.tokens) == (compiler, tokens) for row in rows):
                rows.append(measure(compiler, tokens))
                record = {"command": "python -m benchmarks.tokens", "rows": [asdict(row) for row in rows]}
                RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    console.print(_table(rows))
    _draw(rows)


def _table(rows: list[Row]) -> Table:
    table = Table(title="KB a token above parameters, gradients and states, and the peak in GB")
    table.add_column("tokens")
    for compiler in COMPILERS:
        table.add_column(compiler, justify="right")
    for tokens in TOKENS:
        of = {row.compiler: row for row in rows if row.tokens == tokens}
        cells = (f"{of[c].token_bytes / 1e3:.1f} ({of[c].peak_bytes / 1e9:.1f})" for c in COMPILERS)
        table.add_row(f"{tokens // 1024}K", *cells)
    return table


def _draw(rows: list[Row]) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "thunder_mem"  # the same names in every run
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for compiler, colour in zip(COMPILERS, _COLOURS, strict=True):
        mine = [row for row in rows if row.compiler == compiler]
        sizes = [row.tokens // 1024 for row in mine]
        axes.plot(sizes, [row.peak_bytes / 1e9 for row in mine], marker="o", color=colour, label=compiler)
    axes.axhline(85.0, color="black", linewidth=0.8, linestyle=":")
    axes.text(TOKENS[0] // 1024, 88, "an H100's memory", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([t // 1024 for t in TOKENS], [f"{t // 1024}K" for t in TOKENS])
    axes.set_yticks([8, 16, 32, 64, 128, 256, 512], ["8", "16", "32", "64", "128", "256", "512"])
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("peak of a step, GB")
    axes.set_title("Two layers of Llama-3-8B, checkpoints, loss inside, AdamW (simulated)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
