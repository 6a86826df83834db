"""Predict what others measured: ``python -m benchmarks.published``; seconds a row, nothing is computed.

Writes ``benchmarks/results/published.json`` and, from it, the table ``docs/guides/published.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.published import liger, litgpt, thunder
from benchmarks.published.case import UNITS, Case

__all__ = ["CASES", "main", "page"]

CASES = (*liger.CASES, *litgpt.CASES, *thunder.CASES)

RESULTS = Path(__file__).parents[1] / "results" / "published.json"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "published.md"
_INTRODUCTION = """\
# Predictions held against the world

The table compares published peaks (`torch.cuda.max_memory_allocated` on GPUs) with what `estimate` predicts for the \
same code, and `predict_step` for what Thunder compiled. Nothing is fitted: tensors count as PyTorch's own storages, \
rounded as its allocator rounds, and libraries are cuBLAS's workspaces. Made by `python -m benchmarks.published`.

| configuration | device | measured | predicted | of that, libraries | difference |
|---|---|---:|---:|---:|---:|
"""


def main() -> None:
    console = Console(soft_wrap=True)
    rows = []
    for case in CASES:
        rows.append(_row(case))
        console.print(rows[-1]["configuration"], f"{rows[-1]['difference']:+.2%}")
    about = {"command": "python -m benchmarks.published", "torch": torch.__version__}
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(page(rows))


def _row(case: Case) -> dict[str, Any]:
    predicted = case.predict()
    return {
        "source": case.source,
        "url": case.url,
        "configuration": case.configuration,
        "device": case.device,
        "published": case.published,
        "unit": case.unit,
        "predicted_bytes": predicted.nbytes,
        "library_bytes": predicted.library_bytes,
        "difference": round(predicted.nbytes / case.published_bytes - 1, 6),
        "cause": case.cause,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """The table of the docs."""
    lines = []
    for row in rows:
        size = UNITS[row["unit"]]
        figures = [f"{row['published']:.2f} {row['unit']}", f"{row['predicted_bytes'] / size:.2f}"]
        figures += [f"{row['library_bytes'] / size:.2f}" if row["library_bytes"] else "", f"{row['difference']:+.2%}"]
        source = f"{row['configuration']} ([{row['source']}]({row['url']}))"
        lines.append(f"| {source} | {row['device']} | {' | '.join(figures)} |")
    return _INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
