"""The benchmark's training loop under Thunder, predicted for a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace
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
    held: dict[str, Tensor] = {}  # as the loop's own names hold them, until they are given new ones
    left: dict[str, int] = {}  # and what those hold in the forward of the next iteration

    def loss_of(output: Tensor) -> Tensor:
        if loss_inside:
            loss = output / microbatches
        else:
            held["logits"] = output.reshape(-1, output.size(-1))
            left["logits"] = output.untyped_storage().nbytes()
            loss = functional.cross_entropy(held["logits"], targets.reshape(-1), ignore_index=-1) / microbatches
        left["loss"] = loss.untyped_storage().nbytes()
        return loss

    inputs = (tokens, targets) if loss_inside else (tokens,)
    prediction = predict_step(jitted, optimizer, loss_of, *inputs, accumulate=microbatches)
    # Targets that only the loss outside reads are counted from there on.
    apart = not loss_inside and targets.untyped_storage()._cdata != tokens.untyped_storage()._cdata
    unread_bytes = targets.untyped_storage().nbytes() if apart else 0
    peak = _worst(prediction, sum(left.values()))
    return replace(peak, held_bytes=peak.held_bytes + unread_bytes)


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
        alive.insert(0, ("what the loop holds of the iteration before", left_bytes))
    if event.scratch_bytes:
        alive.insert(0, ("scratch", event.scratch_bytes))
    return LoopPeak(totals[worst], prediction.held_bytes, event.phase, event.name, phases, tuple(alive[:24]))
