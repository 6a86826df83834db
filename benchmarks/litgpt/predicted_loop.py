"""The benchmark's training loop under Thunder, predicted for a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.litgpt.fake_loop import LoopPeak, loop_peak
from thunder_mem.prediction.training_step import predict_step

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
    peak = loop_peak(prediction, sum(left.values()))
    return replace(peak, held_bytes=peak.held_bytes + unread_bytes)
