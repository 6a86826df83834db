"""Updates in the backward on a GPU: results, peaks beside predictions, and times, for each way to run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import thunder
import torch

from benchmarks.gpu.probes import executors_with, layers, mean_square, median_ms
from thunder_mem import MemEfficient, StepInBackward, measure_peak, predict_step
from thunder_mem.prediction.training_step import training_step

__all__ = ["WAYS", "updates"]

_STEPS = 5
_TOLERANCE = 0.2  # SGD moves these weights so little that float32 rounds off a tenth of it, with PyTorch's own step too

WAYS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any] | None]] = {
    "AdamW, foreach": (partial(torch.optim.AdamW, foreach=True), None),
    "AdamW, fused": (partial(torch.optim.AdamW, fused=True), None),
    "AdamW in backward": (torch.optim.AdamW, {}),
    "AdamW in backward, fused": (partial(torch.optim.AdamW, fused=True), {}),
    "AdamW in backward, compiled": (torch.optim.AdamW, {"compiled": True}),
    "SGD in backward, compiled": (partial(torch.optim.SGD, lr=100.0, momentum=0.9), {"compiled": True}),
    "SGD, foreach": (partial(torch.optim.SGD, lr=100.0, momentum=0.9, foreach=True), None),
    "RMSprop in backward, compiled": (torch.optim.RMSprop, {"compiled": True}),
    "RMSprop, foreach": (partial(torch.optim.RMSprop, foreach=True), None),
}
"""The optimizer, and how it runs in the backward; None for its own `step` after eager's backward."""


def updates(name: str, device: str) -> dict[str, Any]:
    """Five steps of eight layers: a parameter's largest relative distance from eager float64, peaks, and a time."""
    on_gpu = device == "cuda"
    width, rows = (4096, 8192) if on_gpu else (64, 256)
    make, how = WAYS[name]
    x = torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(1))
    exact = layers(8, width, device).double()
    plain = make(exact.parameters())
    for _ in range(_STEPS):
        training_step(exact, plain, mean_square, x.double())
    expected = [p.detach().float() for p in exact.parameters()]
    started = [p.detach().clone() for p in layers(8, width, device).parameters()]
    del exact, plain

    model = layers(8, width, device)
    optimizer: Any = make(model.parameters())
    step: Any = model
    if how is not None:
        optimizer = StepInBackward(optimizer, **how)
        transform = MemEfficient(strict=True, verify=True, optimizer=optimizer)
        step = thunder.jit(model, executors=executors_with("mem_pointwise"), transforms=[transform])
    run = partial(training_step, step, optimizer, mean_square, x)
    for _ in range(_STEPS):
        run()
    pairs = zip(model.parameters(), expected, started, strict=True)
    error = max(float((p.detach() - e).norm() / (e - s).norm()) for p, e, s in pairs)
    found: dict[str, Any] = {"distance": error, "right": error < _TOLERANCE}
    if on_gpu:
        found |= {"peak_bytes": measure_peak(run, device="cuda"), "median_ms": median_ms(run)}
    if how is not None:
        found["predicted_bytes"] = predict_step(step, optimizer, mean_square, x).measured_bytes
        found["right"] &= found.get("peak_bytes", found["predicted_bytes"]) == found["predicted_bytes"]
    return found
