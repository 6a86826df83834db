"""The peak of a whole training step: forward, loss, backward and optimizer, with all gradients.

`training_step` is the step, as plain code. `predict_step` runs the same code on fake tensors under PyTorch's own
autograd engine and optimizer. So the real code decides which tensors are held, and for how long. Only the compiled
forward and backward are replaced by a replay of their traces. Autograd does not run on fake CUDA tensors. So on a
simulated GPU all code outside the traces works on CPU twins, and a block of memory lives as long as either twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from thunder.executors.torch_autograd import connect_to_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from thunder_mem.fake_execution.fake_twins import Leaves, Twins, Watch
from thunder_mem.fake_execution.replay import Ledger, replay
from thunder_mem.fake_execution.scratch import ProbingRunner, SimulatedRunner
from thunder_mem.optimizer.host_states import step_each
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.optimizer.update import is_update, rehearsed, update_of
from thunder_mem.optimizer.variants import step_variants
from thunder_mem.prediction.compiled_call import compiled_entry, splits_autograd
from thunder_mem.prediction.fake_inputs import device_type_of, mode_of
from thunder_mem.prediction.fake_optimizer import hold_states, make_state, next_scalars, twin_optimizer
from thunder_mem.prediction.predict import Prediction, finish
from thunder_mem.prediction.rehearsed_updates import RehearsedUpdates
from thunder_mem.trace.missing_tangents import makes_missing_tangents, without_zeros_for
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["check_loss", "check_steps", "instead_of_optimizer", "predict_step", "training_step"]


def training_step(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer | _Phases | None,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
) -> None:
    """One optimizer step over `accumulate` equal microbatches, the gradients cleared at its end.

    A `StepInBackward` gets its first pass, if it takes two, and its scaler scales the loss.

    Args:
        model: called with `args` and `kwargs`.
        optimizer: over the model's parameters; None for forward, loss and backward alone: the gradients stay.
        loss_fn: from the model's result to the scalar loss; None if the model returns the loss.
        accumulate: number of microbatches.
        set_to_none: drop the gradients at the end; otherwise they stay, filled with zeros.
    """
    in_backward = isinstance(optimizer, StepInBackward | _Phases)
    two_pass, scaler = (optimizer.two_pass, optimizer.scaler) if in_backward else (False, None)  # type: ignore[union-attr]
    for left in reversed(range(accumulate)):
        # An optimizer that steps in the backward has to know which backward is the last.
        with optimizer.accumulate() if left and in_backward else nullcontext():  # type: ignore[union-attr]
            if loss_fn is None:
                loss = model(*args, **(kwargs or {}))
            else:
                loss = loss_fn(model(*args, **(kwargs or {})))
            loss = loss if scaler is None else scaler.scale(loss)
            if two_pass and not left:
                with optimizer.first_pass():  # type: ignore[union-attr]
                    loss.backward(retain_graph=True)
            loss.backward()
    if optimizer is not None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)


def predict_step(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    first: bool = False,
) -> Prediction:
    """Predict `training_step(model, optimizer, loss_fn, *args, ...)` without changing the caller's objects.

    Args:
        model, optimizer, loss_fn, args, kwargs, accumulate, set_to_none: as in `training_step`. `model` is a
            result of `thunder.jit`. Any optimizer of `torch.optim` works that needs no closure; with None this
            is the exact prediction of ``loss_fn(model(*args)).backward()``.
        first: predict the very first step, in which the optimizer makes its state. By default the next step is
            predicted, from the counts in the present state, or the second step if there is no state yet.

    Returns:
        The prediction, with the phases "forward", "loss" (if it runs operations) and "backward". With an
        optimizer "optimizer" follows and, unless `set_to_none`, "zero_grad".
        `held_bytes` counts parameters, buffers, inputs, optimizer state and, unless `set_to_none`, gradients,
        which are held before the step. States on the host are in `host_bytes` instead. It also counts present
        gradients of parameters outside the optimizer,
        or of all parameters without one. Other tensors of the loss do not count, nor do the numbers of a
        `StepInBackward`'s scaler, some tens of bytes.

    Raises:
        TypeError, ValueError, PredictionError: as `predict`; also for an optimizer that needs a closure,
            and a loss that is no scalar or does not depend on a parameter.
    """
    check_steps("predict_step", optimizer, accumulate)
    entry, inputs, assumptions = compiled_entry(model, args, dict(kwargs or {}), call=True)
    if entry.backward_fn is None:
        raise ValueError("nothing that the model takes or owns requires a gradient, so there is no step to predict")
    updates = [update_of(b) for b in entry.backward_traces[-1].bound_symbols if is_update(b)]
    if updates and updates[0].updates.optimizer is not optimizer:
        raise ValueError(
            "the compiled backward updates its parameters itself: give predict_step the StepInBackward with which the "
            "model was compiled"
        )
    if gone := [update.label for update in updates if not update.group]:
        raise ValueError(f"{gone[0]} is in no parameter group any more: compile the model again")

    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    if any(not t.is_leaf for t in tensors):
        raise ValueError(
            "an argument was computed from a tensor with a gradient, so the step is only a part of one: "
            "give predict_step t.detach().requires_grad_(), or ask predict about this call"
        )
    simulated = device_type_of(inputs) == "cuda"
    ledger = Ledger("cuda", "cpu") if simulated else Ledger("cpu")
    runner = SimulatedRunner() if simulated else ProbingRunner()
    mode = mode_of(inputs)
    twins = Twins(mode, ledger)
    parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    for t in parameters:
        twins.hold(t, "parameter", with_grad=False)  # a step begins without, or with what `make_state` makes
    for t in _owned(model):
        twins.hold(t, "parameter")
    for t in tensors:
        twins.hold(t, "argument")
    watch = Watch(ledger, probe=not simulated, twins=twins)
    stand_in = _Model(entry, inputs, mode, ledger, runner, watch, twins)
    ours = optimizer if isinstance(optimizer, StepInBackward) else None
    states = "device" if ours is None else ours.states
    optimizer = optimizer if ours is None else ours.wrapped
    waits = ours is not None and any(ours.misses_gradients(update.updates) for update in updates)
    device_type = "cuda" if simulated else "cpu"
    variants = () if ours is not None or optimizer is None else step_variants(optimizer, device_type)
    twin = None if optimizer is None else twin_optimizer(optimizer, twins, simulated)
    rehearsal = RehearsedUpdates(twin, twins, first=first, simulated=simulated, states=states, waits=waits)

    def watched_loss(output: Any) -> torch.Tensor:
        with Leaves(twins):
            loss = output if loss_fn is None else loss_fn(output)
        check_loss("predict_step", loss)
        watch.phase = "backward"
        return loss

    with mode, twins.gradients_within():
        if optimizer is not None and twin is not None:
            if not first:
                with torch.device("cpu"):
                    # A gradient that the backward uses is gone at the step's end.
                    used = () if waits else (twins.of(update.parameter) for update in updates)
                    make_state(twin, twins, set_to_none, used)
                watch.scalars = next_scalars(optimizer, twin, twins)
            elif isinstance(optimizer, torch.optim.ASGD):
                watch.fraction = 1.0  # a state that the first step makes and reads: it is 1 for a million steps
            for group in twin.param_groups:
                for p in group["params"]:
                    hold_states(ledger, p, twin.state.get(p, {}), group, simulated, states)
        with watch, rehearsed(rehearsal):
            training_step(
                stand_in,
                None if twin is None else _Phases(twin, watch, rehearsal, ours),
                watched_loss,
                kwargs=None,
                accumulate=accumulate,
                set_to_none=set_to_none,
            )
    ledger.sweep()
    notes = [] if first or optimizer is None else ["the optimizer has its state already"]
    return replace(
        finish(ledger, (*assumptions, *runner.assumptions, *notes), split_autograd=splits_autograd(model)),
        step_variants=variants,
    )


def check_steps(asked: str, optimizer: object, accumulate: object = 1) -> None:
    """Check the optimizer and the number of microbatches of a step.

    Args:
        asked: the function that the user called, which messages name.
        optimizer, accumulate: its arguments.

    Raises:
        TypeError: the optimizer is none, or needs a closure.
        ValueError: `accumulate` is no number of microbatches.
    """
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(f"{asked} takes a torch.optim optimizer or None, {instead_of_optimizer(optimizer)}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(f"LBFGS calls the model from a closure, as often as it likes: {asked} cannot follow its step")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate is the number of microbatches, an int from 1 up, not {accumulate!r}")


def check_loss(asked: str, loss: Any) -> None:
    """Refuse a loss that cannot be differentiated.

    Args:
        asked: the function that the user called, which the message names.
        loss: the result of the model or of its loss function.

    Raises:
        ValueError: it is no scalar tensor, or depends on nothing that requires a gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"the loss has to be a scalar tensor, but it is {what}: give {asked} a loss_fn")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on anything that requires a gradient")


def instead_of_optimizer(optimizer: Any) -> str:
    """The end of a sentence: the argument given in place of an optimizer, and what to do."""
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = optimizer.__name__
        return f"and {name} is the class: call it with the parameters, {name}(model.parameters())"
    return f"not {type(optimizer).__name__}"


class _Model:
    """Stands in for the compiled model: the same traces, autograd function and epilogue, on twins."""

    def __init__(
        self,
        entry: Any,
        inputs: list[Any],
        mode: FakeTensorMode,
        ledger: Ledger,
        runner: ProbingRunner | SimulatedRunner,
        watch: Watch,
        twins: Twins,
    ) -> None:
        self.entry, self.inputs, self.mode, self.ledger = entry, inputs, mode, ledger
        self.runner, self.watch, self.twins = runner, watch, twins
        self.simulated = "cuda" in ledger.device_types
        for proxy, t in zip(entry.computation_traces[-1].args, inputs, strict=True):
            if isinstance(t, torch.Tensor):
                twins.name(t if self.simulated else twins.of(t), proxy.name)

    def __call__(self) -> Any:
        leaves = [self.twins.of(t) if isinstance(t, torch.Tensor) else t for t in self.inputs]
        given = [
            t if isinstance(t, torch.Tensor) and self.simulated else leaf
            for t, leaf in zip(self.inputs, leaves, strict=True)
        ]
        with self.twins.paused():
            self.ledger.sweep()  # the last gradients of the microbatch before have gone
            data, (saved, other) = replay(
                self.entry.computation_traces[-1], given, self.mode, self.ledger, "forward", self.runner
            )
            twin = _mirror_once(self.twins, zip(given, leaves, strict=True))
            flat_output = tuple(twin(t) for t in data["flat_output"])
            output = tree_map(twin, data["output"])
            del data, given, twin
            connect_to_autograd(
                backward_fn=self._backward,
                flat_args=leaves,
                flat_output=flat_output,
                saved_tensors=saved,
                saved_other=other,
                return_none_instead_of_grads=self.entry.return_none_instead_of_grads,
                disable_split_autograd=False,
                is_differentiable_outputs=None,
            )
            if makes_missing_tangents(self.entry.backward_traces[-1]):
                without_zeros_for(flat_output)
        del saved, other, flat_output
        self.watch.phase = "loss"
        return _returned(self.entry, output)

    def _backward(self, saved: list[Any], tangents: list[Any]) -> tuple[Any, ...]:
        self.watch.phase = "backward"
        with self.twins.paused():
            if self.simulated:
                on_cuda = [self.twins.to_cuda(t) if isinstance(t, torch.Tensor) else t for t in tangents]
                tangents.clear()
                tangents = on_cuda
                del on_cuda
            self.ledger.sweep()
            grads = replay(
                self.entry.backward_traces[-1], [saved, tangents], self.mode, self.ledger, "backward", self.runner
            )
            twin = _mirror_once(self.twins, ())
            return tuple(twin(g) for g in grads)


def _mirror_once(twins: Twins, known: Iterable[tuple[Any, Any]]) -> Callable[[Any], Any]:
    """A function that gives each tensor one twin, also on repeated use; `known` ones have theirs."""
    made: dict[int, tuple[Any, Any]] = {id(t): (t, twin) for t, twin in known}

    def twin(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) not in made:
            made[id(t)] = (t, twins.to_cpu(t))
        return made[id(t)][1]

    return twin


def _returned(entry: Any, output: Any) -> Any:
    """The epilogue's result for the computation's output, without its writes to the caller's module."""
    epilogue = entry.epilogue_traces[-1]
    trace = rebuilt(epilogue, [b for b in epilogue.bound_symbols if not str(b.sym.id).startswith("PrimIDs.PACK_")])
    names = [name for name, _ in trace.siginfo().args]
    values = dict.fromkeys(names)
    values.update(zip(names[len(names) - len(output) :], output, strict=True))
    return trace.python_callable()(*values.values())


class _Phases:
    """The twin optimizer, which reports its phase to the watch. A scaler's own numbers are not predicted."""

    scaler = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watch: Watch,
        rehearsal: RehearsedUpdates,
        ours: StepInBackward | None,
    ) -> None:
        self.optimizer, self.watch, self.rehearsal, self.ours = optimizer, watch, rehearsal, ours
        self.two_pass = ours is not None and ours.two_pass

    def first_pass(self) -> AbstractContextManager[None]:
        return self.rehearsal.first_pass()

    def accumulate(self) -> AbstractContextManager[object]:
        return mock.patch.object(self.rehearsal, "waits", True)

    def step(self) -> None:
        self.watch.phase = "optimizer"
        with torch.device("cpu"):  # where the twins are, whatever device the caller makes tensors on by default
            waiting = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            if self.ours is not None and waiting:
                self.ours.clip_waiting(waiting)
            if self.rehearsal.states == "host":
                step_each(self.optimizer, "cpu" if self.watch.probe else "cuda")
            else:
                self.optimizer.step()
        self.rehearsal.step_ends()

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.watch.phase = "zero_grad"
        self.optimizer.zero_grad(set_to_none=set_to_none)


def _owned(model: Any) -> list[torch.Tensor]:
    """The parameters and buffers of a jitted module, including those that no trace reads."""
    module = getattr(model, "_model", None)
    return [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
