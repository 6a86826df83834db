"""The benchmark's training loop in eager PyTorch, followed on fake tensors as `estimate` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from thunder_mem.analysis.estimate import follow
from thunder_mem.fake_execution.fake_twins import Twins
from thunder_mem.fake_execution.replay import Ledger
from thunder_mem.memory.device_specs import device_spec
from thunder_mem.prediction.caching_allocator import allocate
from thunder_mem.prediction.fake_inputs import mode_of
from thunder_mem.prediction.predict import Prediction
from thunder_mem.prediction.simulate import apply_to

__all__ = ["LoopPeak", "benchmark_loop", "fake_cpu", "fake_peak", "held_bytes", "loop_peak"]


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
        library_bytes: what libraries keep on the GPU, see `library_memory.py`; beside all of the above.
        reserved_bytes: by the allocator's model, what `torch.cuda.max_memory_reserved` would say; an estimate.
    """

    peak_bytes: int
    held_bytes: int
    phase: str
    operation: str
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    alive: tuple[tuple[str, int], ...] = ()
    library_bytes: int = 0
    reserved_bytes: int = 0


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
    device: str = "H100-80GB",
) -> LoopPeak:
    """The peak of two iterations of `benchmark_loop`, the second of which finds the optimizer's state.

    Args:
        module: on fake CPU tensors; to be called within the mode that they belong to.
        optimizer, batch, loss_inside, microbatches: as in `benchmark_loop`.
        call: what computes, if it is not `module` itself: a compiled form of it.
        device: the GPU that the CPU tensors stand for.
    """
    twins = Twins(mode_of(batch), Ledger("cuda", "cpu"))
    for t in (*module.parameters(), *module.buffers(), *batch):
        twins.hold(t, "parameter" if isinstance(t, nn.Parameter) else "buffer or input")

    def loop(enter: Callable[[str], None]) -> None:
        how = {"iterations": 2, "loss_inside": loss_inside, "microbatches": microbatches, "enter": enter}
        benchmark_loop(module if call is None else call, optimizer, batch, **how)  # type: ignore[arg-type]

    peak = loop_peak(follow(loop, twins, device_spec(device)))
    return replace(peak, held_bytes=held_bytes(optimizer, module, *batch))


def loop_peak(prediction: Prediction, left_bytes: int = 0) -> LoopPeak:
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
    held, kept = prediction.held_bytes, prediction.library_bytes
    reserved_bytes = allocate(prediction).reserved_peak_bytes
    return LoopPeak(totals[worst], held, event.phase, event.name, phases, tuple(alive[:24]), kept, reserved_bytes)


def held_bytes(optimizer: torch.optim.Optimizer, model: object, *tensors: Tensor) -> int:
    """Bytes of a model's parameters and buffers, an optimizer's state, and more tensors, each storage once."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    buffers = getattr(model, "buffers", None)
    held += [*(buffers() if buffers is not None else ()), *tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
