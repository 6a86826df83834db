"""Figures of Thunder's own benchmark of litgpt's models, `benchmark_litgpt`.

The figure is `torch.cuda.max_memory_allocated` of the whole loop, in GB of 10**9 bytes. It is predicted by the same
script, with `--device simulate:...`. Of Thunder itself there is the figure of issue #1337, as Thunder 0.2.6 still has
that fusion pass. The compiled figures of pull request 1616 are of passes that Thunder 0.2.6 does not have.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from benchmarks.litgpt.command import parse
from benchmarks.litgpt.harness import run
from benchmarks.published.case import Case, Predicted
from thunder_mem.fusers import fake_regions
from thunder_mem.runtime.output_layout import Output, lay_out

__all__ = ["CASES"]

_ISSUES = "https://github.com/Lightning-AI/lightning-thunder"


def _predicted(device: str, options: str) -> Predicted:
    command = f"{options} --checkpoint_activations True --micro_batch_size 1"
    given, arguments = parse([*command.split(), "--device", f"simulate:{device}"])
    with (
        contextlib.redirect_stdout(io.StringIO()),  # the benchmark's own summary
        mock.patch.object(fake_regions, "lay_out", written_out),
    ):
        peak = run(given, **arguments).loop_peak
    return Predicted(peak.peak_bytes, peak.library_bytes)


def written_out(
    outputs: Iterable[Output | None], inputs: Sequence[torch.Tensor], devices: Iterable[torch.device | str]
) -> list[torch.Tensor | None]:
    """The results of a region by nvFuser in 2024: it also wrote those that only show another result anew."""
    seen: set[tuple[str, int]] = set()
    apart: list[Output | None] = []
    for number, out in enumerate(outputs, start=len(inputs)):
        apart.append(out if out is None or out.where not in seen else _alone(out, number))
        if out is not None and out.where[0] == "new":
            seen.add(out.where)
    return lay_out(apart, inputs, devices)


def _alone(out: Output, number: int) -> Output:
    stride = tuple(math.prod(out.shape[i + 1 :]) for i in range(len(out.shape)))
    nbytes = math.prod(out.shape) * out.dtype.itemsize
    return replace(out, where=("written", number), storage_bytes=nbytes, stride=stride, offset=0)


def _case(
    where: str,
    when: str,
    published: float,
    options: str,
    *,
    simulated: str,
    by: str = "eager",
    how: str = "--compile eager",
) -> Case:
    predict, device = partial(_predicted, simulated, f"{options} {how}"), f"not named; {simulated} assumed"
    configuration = f"benchmark_litgpt, {by}, checkpointing, `{options}`"
    source, url = f"lightning-thunder, {when}", f"{_ISSUES}/{where}"
    return Case(source, url, configuration, device, published, "GB", predict)


CASES = (
    _case(
        "issues/1337", "2024-10", 10.55, "--model_name longchat-7b-16k --n_layers 2",
        simulated="H100-80GB",
    ),
    _case(
        "issues/1337", "2024-10", 12.36, "--model_name longchat-7b-16k --n_layers 2",
        simulated="H100-80GB", by="Thunder, whose nvFuser then wrote transposes of results",
        how="--compile thunder --fusion_type dataflow --fusion nvfuser",
    ),
    _case(
        "pull/1616", "2025-01-08", 17.55, "--model_name Qwen2.5-7B --n_layers 4 --block_size 4096",
        simulated="A100-80GB",
    ),
    _case(
        "pull/1616", "2025-01-08", 10.37, "--model_name stablecode-completion-alpha-3b --n_layers 4",
        simulated="A100-80GB",
    ),
)  # fmt: skip
