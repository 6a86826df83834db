"""longchat-7b-16k with two layers, as issue #1337 of lightning-thunder has it: measured, predicted, compared."""

from __future__ import annotations

from typing import Any

from benchmarks.litgpt.matrix import COMPILERS, Case
from benchmarks.litgpt.rows import metrics_here, metrics_of

__all__ = ["COLUMNS", "compared", "run"]

_NO_REUSE = ("--mem_reuse", "False")
_ITERATIONS = 8

COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in COMPILERS if not name.startswith("MemEfficient smallest")},
    "MemEfficient, mem_pointwise, no reuse": ("MemEfficient, mem_pointwise", _NO_REUSE),
}
"""What compiles, of `matrix.COMPILERS`, and further options."""


def run(name: str, device: str, timeout_s: float) -> dict[str, Any]:
    """The benchmark's figures for a column, on "cuda" or a simulated device; `error` where it failed.

    On a GPU it has a process of its own, for at most `timeout_s`, as what it leaves there would count for the next.
    """
    compiler, more = COLUMNS[name]
    arguments = [*Case("longchat-7b-16k", True, False, compiler).arguments(device, _ITERATIONS), *more]
    return metrics_of(arguments, timeout_s) if device == "cuda" else metrics_here(arguments)


def compared(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A column's prediction with, where it was measured, what it is off by.

    Args:
        predicted: figures of a simulated run.
        measured: those of a run on the GPU; empty if there is none.

    Returns:
        `predicted`, and for "allocated" and "reserved" a row of both figures in bytes and their quotient less 1.
    """
    if "error" in predicted or "peak_bytes" not in measured:
        return predicted
    figures = {
        "allocated": (predicted["peak_bytes"] + predicted["library_bytes"], measured["peak_bytes"]),
        "reserved": (predicted["reserved_peak_bytes"], measured["reserved_peak_bytes"]),
    }
    rows = {
        name: {"predicted_bytes": said, "measured_bytes": was, "difference": round(said / was - 1, 6)}
        for name, (said, was) in figures.items()
    }
    return {**predicted, **rows}
