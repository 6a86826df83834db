"""The benchmark's training loop on fake CPU tensors, every storage followed: the peak of eager PyTorch.

Storages are counted when an operator returns them and leave when nobody shows them any more, as PyTorch's
allocator sees them. Autograd's engine and the optimizer are the real ones, so what they hold is exact. CPU
tensors stand for CUDA ones, because the engine does not run on fake CUDA tensors; the memory of the
operators is the same, except for attention, see `_CUDA_SCRATCH` and `attention_as_on_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_mem.replay import Ledger
from thunder_mem.scratch import KERNEL_SCRATCH
from thunder_mem.simulate import apply_to

__all__ = ["LoopPeak", "attention_as_on_cuda", "benchmark_loop", "fake_cpu", "fake_peak", "held_bytes"]

_CUDA_SCRATCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: KERNEL_SCRATCH[
        "sdpafx_scaled_dot_product_efficient_attention_backward"
    ]
}
"""What the kernel that CUDA runs in an operator's place holds inside, by the operator's first two arguments."""


@dataclass(frozen=True)
class LoopPeak:
    """The most bytes alive in a training loop, and when, and who they are.

    Attributes:
        peak_bytes: parameters, optimizer state, inputs and scratch included.
        held_bytes: what is there between two iterations: parameters, buffers, optimizer state, inputs.
        phase: "forward", "loss", "backward" or "optimizer".
        operation: the operator that runs at the peak.
        phase_peak_bytes: the peak of each phase.
        alive: (name, bytes) of the largest storages at the peak, the largest first.
    """

    peak_bytes: int
    held_bytes: int
    phase: str
    operation: str
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    alive: tuple[tuple[str, int], ...] = ()


def benchmark_loop(
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    iterations: int,
    loss_inside: bool,
    microbatches: int = 1,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """What Thunder's `benchmark_litgpt` does with memory, iteration by iteration.

    The names `logits` and `loss` keep their tensors until they are given new ones, through the backward, the
    optimizer and the next forward: that is the benchmark's own code, and part of its figure.

    Args:
        model: from tokens (B, T) to logits (B, T, V), or with `loss_inside` from tokens and targets to the loss.
        optimizer: over the model's parameters.
        batch: tokens and targets, the same for every microbatch.
        iterations: optimizer steps.
        loss_inside: whether `model` returns the loss.
        microbatches: forwards and backwards of one optimizer step.
        enter: told the name of each phase as it begins.
    """
    for _ in range(iterations):
        for _ in range(microbatches):
            input_ids, targets = batch
            enter("forward")
            if loss_inside:
                loss = model(input_ids, targets) / microbatches
            else:
                logits = model(input_ids)
                logits = logits.reshape(-1, logits.size(-1))
                targets = targets.reshape(-1)
                enter("loss")
                loss = functional.cross_entropy(logits, targets, ignore_index=-1) / microbatches
            enter("backward")
            loss.backward()
        enter("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def fake_cpu() -> Iterator[FakeTensorMode]:
    """Tensors made within are fake ones on the CPU; modules can be built and moved to another dtype."""
    with mock.patch.object(nn.Module, "_apply", apply_to), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def fake_peak(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    loss_inside: bool,
    microbatches: int = 1,
    call: Callable[..., Tensor] | None = None,
) -> LoopPeak:
    """The peak of two iterations of `benchmark_loop`, the second of which finds the optimizer's state.

    Args:
        module: on fake CPU tensors; to be called within the mode that they belong to.
        optimizer, batch, loss_inside, microbatches: as in `benchmark_loop`.
        call: what computes, if it is not `module` itself: a compiled form of it.
    """
    ledger = Ledger("cpu")
    for t in (*module.parameters(), *module.buffers(), *batch):
        ledger.add("parameter" if isinstance(t, nn.Parameter) else "buffer or input", t, "parameter", held=True)
    watch = _Watch(ledger)
    with attention_as_on_cuda(), watch:
        benchmark_loop(
            module if call is None else call,
            optimizer,
            batch,
            iterations=2,
            loss_inside=loss_inside,
            microbatches=microbatches,
            enter=watch.enter,
        )
    before_bytes = held_bytes(optimizer, module, *batch)
    return LoopPeak(watch.peak_bytes, before_bytes, watch.peak_phase, watch.operation, watch.phase_peaks, watch.alive())


def held_bytes(optimizer: torch.optim.Optimizer, model: object, *tensors: Tensor) -> int:
    """Bytes of a model's parameters and buffers, an optimizer's state, and more tensors, each storage once."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    buffers = getattr(model, "buffers", None)
    held += [*(buffers() if buffers is not None else ()), *tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


class _Watch(TorchDispatchMode):
    """Follows the storages of whatever runs, and remembers the worst moment."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.phase = "forward"
        self.phase_peaks: dict[str, int] = {}
        self.peak_bytes, self.peak_phase, self.operation, self.scratch_bytes = 0, "", "", 0
        self._at_peak: list[Any] = []

    def enter(self, phase: str) -> None:
        self.phase = phase

    def alive(self, most: int = 24) -> tuple[tuple[str, int], ...]:
        """The largest blocks that were alive at the peak."""
        blocks = sorted(self._at_peak, key=lambda b: -b.nbytes)[:most]
        scratch = [("scratch", self.scratch_bytes)] if self.scratch_bytes else []
        return (*scratch, *((f"{b.names[0]} {list(b.shape)} {b.dtype}", b.nbytes) for b in blocks))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # the optimizer reads its step count
            return 0.5
        self.ledger.sweep()
        out = _random(func, args) if func.name() in _RANDOM else func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.ledger.add(func.name(), t, "computed")
        scratch_bytes = _CUDA_SCRATCH[func](args[0], args[1]) if func in _CUDA_SCRATCH else 0
        now_bytes = self.ledger.live_bytes + scratch_bytes
        self.phase_peaks[self.phase] = max(now_bytes, self.phase_peaks.get(self.phase, 0))
        if now_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase, self.operation = now_bytes, self.phase, func.name()
            self.scratch_bytes = scratch_bytes
            self._at_peak = [b for b in self.ledger.blocks if b.last is None]
        return out


_RANDOM = ("run_and_save_rng_state", "run_with_rng_state")
"""Inductor runs what may draw random numbers through these, so that a checkpoint draws the same again."""


def _random(func: Any, args: tuple[Any, ...]) -> Any:
    if func.name() == "run_with_rng_state":
        return args[1](*args[2:])
    return torch.empty(16, dtype=torch.uint8), args[0](*args[1:])  # the state of CUDA's generator


@contextmanager
def attention_as_on_cuda() -> Iterator[None]:
    """CUDA's fused attention takes dropout, which the CPU's does not: it costs no memory, so it is left out."""
    attention = functional.scaled_dot_product_attention

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            args = (args[0], 0.0, *args[2:])
        return attention(query, key, value, *args, **{**kwargs, **({} if len(args) > 1 else {"dropout_p": 0.0})})

    with mock.patch.object(functional, "scaled_dot_product_attention", without_dropout):
        yield
