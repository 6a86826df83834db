"""The benchmark's training loop for real, on a CPU: its peak, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.litgpt.fake_loop import LoopPeak, benchmark_loop, held_bytes
from thunder_mem.runtime.measure import measure_curve

__all__ = ["measured_peak"]


def measured_peak(
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    loss_inside: bool,
    microbatches: int = 1,
) -> LoopPeak:
    """The peak of two iterations on this machine's CPU, what was there before included.

    Args:
        model: compiled, and called before, so that nothing is compiled in here.
        optimizer: has taken a step, so that its state is there.
        batch, loss_inside, microbatches: as in `benchmark_loop`.
    """

    def loop() -> None:
        benchmark_loop(model, optimizer, batch, iterations=2, loss_inside=loss_inside, microbatches=microbatches)

    before_bytes = held_bytes(optimizer, model, *batch)
    return LoopPeak(before_bytes + measure_curve(loop).peak_bytes, before_bytes, "", "")
