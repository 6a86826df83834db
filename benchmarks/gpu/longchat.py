"""longchat-7b-16k with two layers, as issue #1337 of lightning-thunder has it: measured, predicted, compared."""

from __future__ import annotations

from typing import Any

from benchmarks.litgpt.matrix import Case
from benchmarks.litgpt.rows import metrics_here, metrics_of

__all__ = ["COLUMNS", "compared", "run"]

_ITERATIONS = 8
_OURS = ("MemEfficient, mem_pointwise", "MemEfficient, nvFuser")
_ALL = ("eager", "torch.compile", *_OURS, "Thunder dataflow, nvFuser", "Thunder dataflow, mem_pointwise")
_CUDNN = ("--cudnn_attention", "True")
_FURTHER = {
    "no reuse": ("--mem_reuse", "False"),
    "optimizer in backward": ("--optimizer_in_backward", "True"),
    "cuDNN attention": _CUDNN,
    "cuDNN attention, optimizer in backward": (*_CUDNN, "--optimizer_in_backward", "True"),
}

COLUMNS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    **{name: (name, True, ()) for name in _ALL},
    **{f"{name}, {how}": (name, True, more) for how, more in _FURTHER.items() for name in _OURS},
    "Thunder dataflow, mem_pointwise, cuDNN attention": ("Thunder dataflow, mem_pointwise", True, _CUDNN),
    **{f"{name}, loss outside": (name, False, ()) for name in _ALL},
}
"""What compiles, of `matrix.COMPILERS`, whether the loss is inside, further options; the most telling first."""


def run(name: str, device: str, timeout_s: float) -> dict[str, Any]:
    """The benchmark's figures for a column, on "cuda" or a simulated device; `error` where it failed.

    On a GPU it has a process of its own, for at most `timeout_s`, as what it leaves there would count for the next.
    """
    compiler, loss_inside, more = COLUMNS[name]
    arguments = [*Case("longchat-7b-16k", True, loss_inside, compiler).arguments(device, _ITERATIONS), *more]
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
