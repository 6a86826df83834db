"""The peak of a compiled function before it runs, from its final traces, storage by storage.

`predict` takes the forward and backward traces that Thunder would execute, from any transforms and executors, and runs
them on fake tensors (`replay.py`). On a CPU every operation also runs once, alone, to measure its scratch
(`scratch.py`), so that the prediction equals a measurement to the byte. On a device simulated by `simulate.py` nothing
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from thunder_mem.fake_execution.grad_accumulation import accumulate
from thunder_mem.fake_execution.replay import Block, Event, Ledger, PredictionError, replay
from thunder_mem.fake_execution.scratch import ProbingRunner, SimulatedRunner
from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.optimizer.state_transfers import StateTransfers
from thunder_mem.optimizer.update import is_update, update_of
from thunder_mem.optimizer.variants import StepVariant
from thunder_mem.prediction.compiled_call import compiled_entry, splits_autograd
from thunder_mem.prediction.fake_inputs import device_type_of, to_fake
from thunder_mem.prediction.library_memory import LibraryMemory, library_memory, unknown_library_memory
from thunder_mem.prediction.tangents import checked_tangents, fill_with_zeros, passed_through
from thunder_mem.runtime.scratch_cache import save_tables
from thunder_mem.trace.missing_tangents import makes_missing_tangents

__all__ = ["Held", "Prediction", "PredictionError", "predict"]


@dataclass(frozen=True)
class Held:
    """A storage that is alive at some event.

    Attributes:
        nbytes: bytes of the whole storage.
        name: the first tensor on it; `aliases` are the others.
        shape, dtype, device: of that first tensor.
        kind: "argument", "tangent", "computed", or in a training step "gradient", "optimizer", ...
        born: index of the event that made it, -1 if it existed before.
        last: index of the last event in which it is alive.
    """

    nbytes: int
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    born: int
    last: int


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a call, event by event. All sizes are in bytes.

    There is one notion of a peak, `peak_bytes`: the most bytes on the device, as in plans, budgets and reports. It
    has three parts: the storages alive at `peak_event`, including the caller's; that operation's scratch; and on a
    GPU the allocator's rounding of every block.

    Attributes:
        timeline: every operation in execution order.
        storages: every storage and its lifetime.
        held_bytes: the caller's storages (parameters, inputs), included in every total.
        device_type: "cpu" or "cuda": only this device's storages count.
        assumptions: of the figures, in sentences.
        library: on CUDA, memory that libraries keep on the device once these operations have run. No other figure
            here includes it, but `caching_allocator.allocate` does.
        step_variants: of a whole step whose optimizer steps behind the backward: what its variants hold.
    """

    timeline: tuple[Event, ...]
    storages: tuple[Held, ...]
    held_bytes: int
    device_type: str
    assumptions: tuple[str, ...] = ()
    library: tuple[LibraryMemory, ...] = ()
    step_variants: tuple[StepVariant, ...] = ()

    @cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """Per event, the device's bytes while it runs: every block as its allocator gives it, and scratch."""
        if self.device_type == "cpu":
            return tuple(e.live_bytes + e.scratch_bytes for e in self.timeline)
        born, dies, before = self.lives()
        pads = [block_bytes(s.nbytes, self.device_type) - s.nbytes for s in self.storages]
        pad_bytes = sum(pads[i] for i in born.get(before, ()))
        held = []
        for e in self.timeline:
            pad_bytes += sum(pads[i] for i in born.get(e.index, ()))
            held.append(e.live_bytes + pad_bytes + block_bytes(e.scratch_bytes, self.device_type))
            pad_bytes -= sum(pads[i] for i in dies.get(e.index, ()))
        return tuple(held)

    def lives(self) -> tuple[dict[int, list[int]], dict[int, list[int]], int]:
        """The storages by the event that makes them and by their last; and the event before the first."""
        before = self.timeline[0].index - 1 if self.timeline else -1
        born: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for i, storage in enumerate(self.storages):
            born.setdefault(max(storage.born, before), []).append(i)
            dies.setdefault(storage.last, []).append(i)
        return born, dies, before

    @cached_property
    def peak_event(self) -> Event | None:
        """The first event with the most bytes on the device; None for an empty program."""
        return max(zip(self.device_bytes, self.timeline, strict=True), key=lambda e: e[0], default=(0, None))[1]

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes on the device, including the caller's storages, scratch and the allocator's rounding."""
        return max(self.device_bytes, default=self.held_bytes)

    @property
    def scratch_bytes(self) -> int:
        """The part of the peak that `peak_event` holds only while it runs."""
        return 0 if self.peak_event is None else block_bytes(self.peak_event.scratch_bytes, self.device_type)

    @property
    def measured_bytes(self) -> int:
        """The figure of `measure_peak`: the most bytes requested at once, above the caller's storages."""
        return max((e.live_bytes + e.scratch_bytes for e in self.timeline), default=self.held_bytes) - self.held_bytes

    @property
    def library_bytes(self) -> int:
        """The bytes that libraries keep on the device: the sum of `library`."""
        return sum(kept.nbytes for kept in self.library)

    @property
    def host_bytes(self) -> int:
        """The most bytes of offloaded values and optimizer states in the host's memory at once.

        No other figure includes them.
        """
        return max((e.host_bytes for e in self.timeline), default=0)

    @property
    def state_transfers(self) -> StateTransfers:
        """Modelled seconds of the copies of optimizer states on the host, each update once."""
        ran = [update_of(e.bsym) for e in self.timeline if e.bsym is not None and is_update(e.bsym)]
        return sum((u.transfers for u in dict.fromkeys(ran) if u.transfers is not None), StateTransfers())

    @property
    def launches(self) -> int:
        """The kernels that the traces start on a GPU, without those of a loss or an optimizer; 0 on a CPU."""
        return sum(e.launches for e in self.timeline)

    @property
    def held_at_peak(self) -> tuple[Held, ...]:
        """Every storage alive at `peak_event`, the largest first."""
        return () if self.peak_event is None else self.held_at(self.peak_event.index)

    def held_at(self, event: int) -> tuple[Held, ...]:
        """Every storage alive while the event of that index runs, the largest first."""
        alive = [s for s in self.storages if s.born <= event <= s.last]
        return tuple(sorted(alive, key=lambda s: (-s.nbytes, s.born, s.name)))

    def phase(self, name: str) -> Prediction:
        """The part of the timeline that belongs to one phase, with the same storages.

        Raises:
            ValueError: there is no such phase.
        """
        events = tuple(e for e in self.timeline if e.phase == name)
        if not events:
            raise ValueError(f"there is no phase {name!r} here, only {', '.join(map(repr, self.phases)) or 'none'}")
        return replace(self, timeline=events)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases, in order."""
        return tuple(dict.fromkeys(e.phase for e in self.timeline))


def predict(
    jitted: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    tangents: Sequence[torch.Tensor | None] | None = None,
    keep_outputs: bool = False,
) -> Prediction:
    """Predict the peak of one call of a jitted function and, if it has one, of its backward.

    The phases are "forward" and "backward". "accumulate" follows if autograd must copy or add gradients to make
    them `.grad`: gradients with another layout than their parameter, shared ones, and those with a `.grad` already.

    Args:
        jitted: the result of `thunder.jit`. It is compiled for `args` if necessary, but not run. On a CPU single
            operations run, each once, on zeros, to measure their scratch. A ThunderFX program must have one
            subgraph; call it once, and predict it without arguments.
        args: the call's arguments, real or (under `simulate`) fake. Without any, the last compilation
            is predicted, with inputs that are dense and share no memory.
        kwargs: the call's keyword arguments.
        tangents: gradients of the outputs, made after the forward, which the caller holds during the backward:
            one for each distinct returned tensor, in the order of the result (dicts by insertion), with that
            tensor's shape, dtype and device. None for an output without a gradient (integers), or one that
            the loss does not use: autograd, or the backward of `MemEfficient`, makes zeros for it. The default
            is dense tangents that only the backward holds, so that it may free them.
        keep_outputs: whether the caller also holds the outputs during the backward. The frame of
            `torch.autograd.backward(outputs, tangents)` does; `loss_of(outputs).backward()` does not.

    An eager loss, and the scalar that `loss.backward()` makes, belong to no trace. The exact prediction of
    ``loss_of(jitted(*args)).backward()`` is ``predict_step(jitted, None, loss_of, *args)``.

    Raises:
        TypeError: `jitted` is not a function jitted by Thunder.
        ValueError: it was never called and no arguments are given. Or its tensors live on the meta device,
            which has no memory, on several GPUs, or on the CPU while a GPU is simulated. Or the tangents do
            not match the outputs.
        PredictionError: it cannot be traced, or an operation has no prediction.
    """
    ledger, runner, assumptions = run_prediction(jitted, args, dict(kwargs or {}), tangents, keep_outputs)
    return finish(ledger, (*assumptions, *runner.assumptions), split_autograd=splits_autograd(jitted))


def finish(
    ledger: Ledger,
    assumptions: Sequence[str],
    capability: tuple[int, int] | None = None,
    *,
    split_autograd: bool = True,
) -> Prediction:
    """Close a ledger: storages that are still alive stay alive to the end.

    Args:
        ledger: with all events.
        assumptions: of the figures.
        capability: of the GPU, if it is one; by default the present one's, real or simulated.
        split_autograd: see `library_memory`.
    """
    save_tables()
    end = len(ledger.events) - 1
    on_gpu = ledger.device_types[0] == "cuda"
    unknown: tuple[str, ...] = ()
    library: tuple[LibraryMemory, ...] = ()
    if on_gpu:
        unknown = unknown_library_memory(ledger.events)
        capability = capability or torch.cuda.get_device_capability()
        library = library_memory(ledger.events, capability, split_autograd=split_autograd)
    return Prediction(
        timeline=tuple(ledger.events),
        storages=tuple(_held(block, end) for block in ledger.blocks),
        held_bytes=sum(b.nbytes for b in ledger.blocks if b.held),
        device_type=ledger.device_types[0],
        assumptions=tuple(dict.fromkeys((*assumptions, *unknown))),
        library=library,
    )


def _held(block: Block, end: int) -> Held:
    last = end if block.last is None or block.held else block.last
    name, *aliases = block.names
    return Held(
        block.nbytes, name, tuple(aliases), block.shape, block.dtype, block.device, block.kind, block.born, last
    )


def run_prediction(
    jitted: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: Sequence[torch.Tensor | None] | None,
    keep_outputs: bool,
) -> tuple[Ledger, ProbingRunner | SimulatedRunner, list[str]]:
    entry, inputs, assumptions = compiled_entry(jitted, args, kwargs, call=bool(args or kwargs))
    forward = entry.computation_traces[-1]
    backward = entry.backward_traces[-1] if entry.backward_fn is not None else None
    mode, inputs = to_fake(inputs)
    device_type = device_type_of(inputs)
    runner = SimulatedRunner() if device_type == "cuda" else ProbingRunner()
    ledger = Ledger(device_type)
    _add_all(ledger, [p.name for p in forward.args], inputs, "argument")

    result = replay(forward, inputs, mode, ledger, "forward", runner)
    ledger.sweep()
    if backward is None:
        return ledger, runner, assumptions
    data, (saved_tensors, saved_other) = result
    outputs = data["output"] if keep_outputs else None
    passed = passed_through(data["flat_output"], inputs)
    layouts = [(t.shape, t.dtype, t.device) for t in data["flat_output"]]
    del result, data
    given = to_fake(checked_tangents(backward, tangents, mode), mode)[1]
    _add_all(ledger, [f"tangent{i}" for i in range(len(given))], given, "tangent")
    theirs = list(given) if tangents is not None else None
    # The gradient of an output that is an input goes to that input; the compiled backward gets zeros for it.
    direct = [(at, given[i]) for i, at in passed.items() if given[i] is not None]
    for i in passed:
        given[i] = None
    if all(t is None for t in given) and direct:
        ledger.sweep()
        kept = accumulate(inputs, [None] * len(inputs), mode, ledger, direct=direct, probe=device_type == "cpu")
        del outputs, theirs, kept
        return ledger, runner, assumptions
    missing = [i for i, t in enumerate(given) if t is None]
    if not makes_missing_tangents(backward):
        fill_with_zeros(given, layouts, mode)
    _add_all(ledger, [f"zeros{i}" for i in missing], [given[i] for i in missing], "tangent")
    # As the trace calls them; an output that has no gradient has no name there.
    named = [(p.name, t) for p, t in zip(backward.args[1], given, strict=True) if p is not None]
    _add_all(ledger, [name for name, _ in named], [t for _, t in named], "tangent")
    del named
    saved = [list(saved_tensors), saved_other]
    del saved_tensors, saved_other
    ledger.sweep()
    caller_holds = (outputs, theirs)
    del outputs, theirs
    grads = list(replay(backward, [saved, given], mode, ledger, "backward", runner))
    kept = accumulate(inputs, grads, mode, ledger, direct=direct, probe=device_type == "cpu")
    del caller_holds, kept
    return ledger, runner, assumptions


def _add_all(ledger: Ledger, names: Sequence[str], values: Sequence[Any], kind: str) -> None:
    # A function of its own, so that no loop variable keeps the last tensor alive.
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor):
            ledger.add(name, value, kind, held=kind == "argument")
            if kind == "argument" and value.is_leaf and value.grad is not None:
                ledger.add(f"{name}.grad", value.grad, "gradient", held=True)
