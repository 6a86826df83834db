"""`StepInBackward`: an optimizer whose updates run inside the compiled backward.

A compiled backward hands over all gradients at its end, so they are all alive together. As operations of the backward,
the updates use each gradient when it is complete, and its memory is free again. (torchtune's `optimizer_in_bwd` and
PyTorch's tutorial on `register_post_accumulate_grad_hook` do this in eager mode.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from thunder_mem.optimizer.all_gradients import AllGradients, FirstPass, is_on, report_to_scaler, was_unscaled
from thunder_mem.optimizer.arguments import (
    check_clipping,
    check_compiled,
    check_optimizer,
    check_states,
    check_two_pass,
)
from thunder_mem.optimizer.compiled_updates import CompiledUpdates
from thunder_mem.optimizer.host_states import load_on_host, move_to_host, settle, step_each
from thunder_mem.optimizer.one_parameter import unhooked

__all__ = ["StepInBackward"]

_SETTINGS = ("wrapped", "clip_value", "max_norm", "scaler", "two_pass", "states", "counted", "undecided", "compiled")

_OF_THE_WRAPPED = ("param_groups", "state", "defaults")


class StepInBackward(CompiledUpdates, Optimizer):
    """An optimizer that updates each parameter inside the backward, as soon as its gradient is complete.

    Pass it to the transform and use it as the optimizer of the training loop. `loss.backward()` then updates the
    parameters. `step` updates the parameters whose gradients the backward handed over in the usual way, such as those
    of a part that Thunder does not compile, and checks the rest. `.grad` stays None where the backward updates.

    Between two calls of `step` each parameter is updated once. To add up gradients of several backwards, run all but
    the last under `accumulate`. Hooks of parameters do not see gradients that the backward uses itself, nor does
    `torch.nn.utils.clip_grad_norm_`: see `clip_value` and `max_norm`.

    Args:
        optimizer: any optimizer of `torch.optim` but LBFGS, or one whose `step` treats each parameter by itself.
        clip_value: gradients are clipped to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_` does.
        max_norm: gradients are scaled as `torch.nn.utils.clip_grad_norm_` does, exactly. So all gradients of the
            backward wait for their norm, and are alive together. If the optimizer has parameters that the backward
            does not update, all wait for `step`.
        scaler: a `torch.amp.GradScaler` that scales the loss. Call ``scaler.scale(loss).backward()``,
            ``scaler.step(optimizer)`` and ``scaler.update()`` as usual. If a gradient is not finite, no parameter
            changes; all gradients of the backward wait for this check, as for `max_norm`.
        two_pass: for `max_norm` and `scaler`: no gradient waits, and the backward runs twice. The first time it only
            looks at each gradient: ``with optimizer.first_pass(): loss.backward(retain_graph=True)``.
        states: "device", or "host": the tensors of the optimizer's state that are as large as their parameter are in
            the host's memory, pinned for a GPU. Each update fetches them slice by slice and sends them back, at most
            two slices of 16 MiB (4 MiB on a CPU) of each on the device at once. Optimizers that do not update each
            element by itself take the states of one whole parameter at a time. On a GPU updates run beside the
            backward, as far as the peak or the budget has room for gradients that wait; with `max_norm` or `scaler`
            they do not. With "auto" budgets count the states that are on the device, too, and the first program with
            updates and a budget decides: the states stay if it fits beside them, and are on the host if it does not,
            or is slower.
        compiled: each update is one kernel, which `torch.compile` makes at the first step: in place, without
            temporaries, and equal within rounding. It serves the eleven optimizers that update each element by
            itself. In 16 bits it rounds once, where PyTorch's code rounds after each operation. `step` uses
            PyTorch's code for the gradients that it finds.

    Attributes:
        wrapped: the given optimizer. Its parameter groups and state are this object's, too.
        states: where its states are, "device" or "host".
        counted: whether budgets count them while they are on the device, that is, `states` was "auto".
        undecided: whether a program is still to decide where they are.

    Raises:
        TypeError: `optimizer` is no optimizer, cannot update one parameter alone, or cannot be compiled.
        ValueError: `clip_value` or `max_norm` is not positive, or both are given; `two_pass` without `max_norm` or
            `scaler`; the optimizer is made for `differentiable=True`; `compiled` goes with ``fused=True``; or
            `states` is unknown.

    Example:
        >>> import torch, thunder
        >>> from thunder_mem import MemEfficient, StepInBackward
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = StepInBackward(torch.optim.AdamW(model.parameters()))
        >>> compiled = thunder.jit(model, transforms=[MemEfficient(optimizer=optimizer)])
        >>> compiled(torch.ones(4, 8)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        clip_value: float | None = None,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        two_pass: bool = False,
        states: str = "device",
        compiled: bool = False,
    ) -> None:
        check_clipping(clip_value, max_norm)
        check_two_pass(two_pass, max_norm, scaler)
        check_states(states)
        self.clip_value = clip_value
        self.max_norm = max_norm
        self.scaler = scaler
        self.two_pass = two_pass
        self.states = "host" if states == "host" else "device"
        self.counted = self.undecided = states == "auto"
        self.compiled = compiled
        self.use(optimizer)

    # ---- the optimizer for the loop around ----

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # while the object is being made
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self.wrapped if name in _OF_THE_WRAPPED else self, name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if self.scaler is None:
            raise RuntimeError(
                "the backward uses gradients before a scaler can divide them: StepInBackward(optimizer, scaler=scaler)"
            )
        return True

    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish a training step: update the parameters whose gradients the backward handed over, if there are any.

        Args:
            closure: computes the loss and its gradients; it is called first.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: no backward ran since the last call; the backward ended in the middle; a parameter got a
                gradient from elsewhere after its update; or gradients are being accumulated.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._check_whole()
        if self._accumulating:
            raise RuntimeError("step() inside accumulate(): leave the context before the last backward")
        waiting = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not waiting and not self._updated:
            raise RuntimeError("no backward gave a gradient since the last step(): call loss.backward() before it")
        self._check_late()
        self._warn_of_late_options()
        if waiting and self._updated and self.needs_all:
            raise RuntimeError(
                f"{len(waiting)} parameters, the first of shape {tuple(waiting[0].shape)}, got gradients that the "
                "backward did not know when it updated the others: load the state from before it"
            )
        if self._first is not None and (unused := self._first.left.keys() - self._first.used):
            raise RuntimeError(
                f"{len(unused)} compiled programs had a backward in first_pass() and no second one: their gradients "
                "are in the norm, so run it before step()"
            )
        if waiting:
            self._step_waiting(waiting)
        if self.scaler is not None and is_on(self.scaler):
            report_to_scaler(self.scaler, self, self._skipped)
        self._updated.clear()
        self._pending.clear()
        self._read.clear()
        self._first, self._skipped = None, False
        return result

    def _check_late(self) -> None:
        """Raise if a parameter got a gradient after its update, as from a penalty outside of the compiled program."""
        parameters = (p for group in self.param_groups for p in group["params"])
        if late := [p for p in parameters if p.grad is not None and id(p) in self._updated]:
            self._late = (
                f"{len(late)} parameters, the first of shape {tuple(late[0].shape)}, got a gradient from outside of "
                "the compiled program after the backward had updated them: keep each parameter inside of it"
            )
            self._check_whole()

    def _step_waiting(self, waiting: Sequence[torch.nn.Parameter]) -> None:
        if self.scaler is not None and is_on(self.scaler):
            gradients = AllGradients(None, self.scaler)
            gradients.add_all([p.grad for p in waiting if p.grad is not None])
            scale, self._skipped = gradients.verdict()
            if self._skipped:
                return
            for p in waiting if not was_unscaled(self.scaler, self) else ():
                assert p.grad is not None
                p.grad.mul_(scale)
        self.clip_waiting(waiting)
        if self.states == "host":
            step_each(self.wrapped)
        else:
            unhooked(self.wrapped)()

    def clip_waiting(self, waiting: Sequence[torch.nn.Parameter]) -> None:
        """Clip the gradients that wait for `step`, in place."""
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(waiting, self.clip_value)
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(waiting, self.max_norm)

    def use(self, optimizer: Optimizer) -> None:
        """Take another optimizer in place of the wrapped one.

        `ddp` and `fsdp` of Thunder make parameters of their own, so their optimizer can only be made after the
        transform: ``optimizer.use(torch.optim.AdamW(step.parameters()))``, before the first call.

        Raises:
            TypeError: as `StepInBackward`.
        """
        if isinstance(optimizer, StepInBackward):
            raise TypeError("the optimizer is a StepInBackward already")
        check_optimizer(optimizer)
        check_compiled(self.compiled, optimizer)
        if self.states == "host":
            move_to_host(optimizer)
        self.wrapped = optimizer
        self._forget()

    def place_states(self, states: str) -> None:
        """Decide where the states are, "device" or "host", if that is undecided; states that exist move."""
        if self.undecided:
            if states == "host":
                move_to_host(self.wrapped)
            self.states, self.undecided = states, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for `step`, or fill them with zeros.

        Raises:
            RuntimeError: the backward has used gradients already, and no `step` followed.
        """
        self._check_late()
        if self._updated and self.consistent and not self._accumulating:
            raise RuntimeError(
                f"zero_grad() before step(): the backward has updated {len(self._updated)} parameters with the "
                "gradients that it would drop. Call step() after each backward; another loss that only passes through "
                "these parameters needs requires_grad_(False) for them"
            )
        self.wrapped.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backwards add to `.grad` and update nothing; the next backward outside uses the sums."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Inside, a backward only looks at its gradients: ``loss.backward(retain_graph=True)``. The next one updates.

        Raises:
            RuntimeError: without `two_pass`, inside `accumulate`, or if the backward did not show all gradients.
        """
        if not self.two_pass:
            raise RuntimeError("first_pass() is for StepInBackward(..., two_pass=True)")
        if self._accumulating:
            raise RuntimeError("first_pass() inside accumulate(): only the last backward before step() needs it")
        if self._measuring:
            raise RuntimeError("first_pass() inside first_pass()")
        self._check_whole()
        parameters = [p for group in self.param_groups for p in group["params"]]
        first = FirstPass(self.all_gradients(), self._forwards, parameters)
        self._first, self._measuring = first, True
        try:
            yield
            first.end()
        except BaseException:
            self._first = None
            self._pending.clear()  # a forward that failed does not stand in the way of the next
            raise
        finally:
            self._measuring = False

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, also with states on the host: any optimizer of the kind loads it."""
        self._check_whole()
        if self.states == "host":
            settle(self.wrapped)
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer, wherever its states were; parameters are to be loaded with it."""
        if self.states == "host":
            load_on_host(self.wrapped, state_dict)
        else:
            self.wrapped.load_state_dict(state_dict)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; programs that are compiled already leave its parameters to `step`."""
        self.wrapped.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        if self.states == "host":
            settle(self.wrapped)
        return {name: getattr(self, name) for name in _SETTINGS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.use(self.wrapped)

    def __repr__(self) -> str:
        return f"StepInBackward({self.wrapped!r})"
