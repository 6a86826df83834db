"""The benchmark's training loop under Thunder, predicted for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thunder_mem.benchmarks.fake_loop import LoopPeak
from thunder_mem.predict import Prediction
from thunder_mem.training_step import predict_step

__all__ = ["predicted_peak"]


def predicted_peak(
    jitted: Any,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    loss_inside: bool,
    microbatches: int = 1,
) -> LoopPeak:
    """The peak of `fake_loop.benchmark_loop` for a function compiled by Thunder, in its second iteration or later.

    Args:
        jitted: from tokens to logits, or with `loss_inside` from tokens and targets to the loss.
        optimizer, batch, microbatches: as there; to be called within `simulate`.
    """
    tokens, targets = batch
    if loss_inside:
        prediction = predict_step(jitted, optimizer, None, tokens, targets, accumulate=microbatches)
        return _worst(prediction, 0)

    held: dict[str, Tensor] = {}

    def loss_of(output: Tensor) -> Tensor:
        # As the loop's own names: the logits of one microbatch are there until those of the next are.
        held["logits"] = output.reshape(-1, output.size(-1))
        return functional.cross_entropy(held["logits"], targets.reshape(-1), ignore_index=-1)

    prediction = predict_step(jitted, optimizer, loss_of, tokens, accumulate=microbatches)
    return _worst(prediction, held["logits"].untyped_storage().nbytes())


def _worst(prediction: Prediction, left_bytes: int) -> LoopPeak:
    """The peak with scratch, where `left_bytes` of the iteration before are there until the first forward is over."""
    first_loss = next((e.index for e in prediction.timeline if e.phase != "forward"), 0)
    totals = [e.live_bytes + e.scratch_bytes + (left_bytes if e.index < first_loss else 0) for e in prediction.timeline]
    phases: dict[str, int] = {}
    for event, total in zip(prediction.timeline, totals, strict=True):
        phases[event.phase] = max(total, phases.get(event.phase, 0))
    worst = max(range(len(totals)), key=totals.__getitem__)
    event = prediction.timeline[worst]
    alive = [(f"{h.name} {list(h.shape)} {h.dtype}", h.nbytes) for h in prediction.held_at(event.index)]
    if worst < first_loss and left_bytes:
        alive.insert(0, ("logits of the iteration before", left_bytes))
    if event.scratch_bytes:
        alive.insert(0, ("scratch", event.scratch_bytes))
    return LoopPeak(totals[worst], prediction.held_bytes, event.phase, event.name, phases, tuple(alive[:24]))
