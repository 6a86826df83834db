"""Figures of Thunder's own benchmark of litgpt's models, `benchmark_litgpt`: those of eager PyTorch.

The figure is `torch.cuda.max_memory_allocated` of the whole loop, in GB of 10**9 bytes. It is predicted by the same
script, with `--device simulate:...`. What stands beside these figures for Thunder itself, of 2024 and early 2025, is
of its fusion passes at that time, which Thunder 0.2.6 does not have.
"""

from __future__ import annotations

import contextlib
import io
from functools import partial

from benchmarks.litgpt.command import parse
from benchmarks.litgpt.harness import run
from benchmarks.published.case import Case, Predicted

__all__ = ["CASES"]

_ISSUES = "https://github.com/Lightning-AI/lightning-thunder"


def _eager(device: str, options: str) -> Predicted:
    command = f"{options} --checkpoint_activations True --micro_batch_size 1 --compile eager"
    given, arguments = parse([*command.split(), "--device", f"simulate:{device}"])
    with contextlib.redirect_stdout(io.StringIO()):  # the benchmark's own summary
        peak = run(given, **arguments).loop_peak
    return Predicted(peak.peak_bytes, peak.library_bytes)


def _case(where: str, when: str, published: float, options: str, *, simulated: str) -> Case:
    predict, device = partial(_eager, simulated, options), f"not named; {simulated} assumed"
    configuration = f"benchmark_litgpt, eager, checkpointing, `{options}`"
    return Case(f"lightning-thunder, {when}", f"{_ISSUES}/{where}", configuration, device, published, "GB", predict)


CASES = (
    _case(
        "issues/1337", "2024-10", 10.55, "--model_name longchat-7b-16k --n_layers 2",
        simulated="H100-80GB",
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
