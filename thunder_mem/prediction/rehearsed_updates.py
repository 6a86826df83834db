"""The updates of a compiled backward on fake tensors: what they make and what they free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from thunder_mem.fake_execution.fake_twins import Twins
from thunder_mem.optimizer.all_gradients import AllGradients
from thunder_mem.optimizer.one_parameter import group_of, step_alone
from thunder_mem.optimizer.update import Rehearsal, Update
from thunder_mem.prediction.fake_optimizer import hold_states
from thunder_mem.runtime.fake_numbers import FakeNumbers

__all__ = ["RehearsedUpdates"]


class RehearsedUpdates(Rehearsal):
    """Takes the place of updates in a predicted step.

    Args:
        twin: the wrapped optimizer over twins.
        twins: of the caller's tensors.
        first: the optimizer makes its state in this step.
        simulated: the step is one of a simulated GPU.
        states: where the states are, "device" or "host".
        waits: no gradient is used in the backward.

    Attributes:
        waits: gradients wait for `step`, as under `StepInBackward.accumulate`.
    """

    def __init__(
        self,
        twin: torch.optim.Optimizer | None,
        twins: Twins,
        *,
        first: bool,
        simulated: bool,
        states: str,
        waits: bool,
    ) -> None:
        self.twin, self.twins, self.first = twin, twins, first
        self.simulated, self.states, self.waits = simulated, states, waits
        self._spent: torch.Tensor | None = None
        self._look: AllGradients | None = None  # of a first pass: the gradients that it has looked at
        self._summed = False
        self._scale: torch.Tensor | None = None  # what a first pass found

    @property
    def kind(self) -> str:
        if self._look is not None:
            return "look at sum" if self._summed else "look"
        return "first" if self.first and not self.waits else "step"

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Updates inside only look at their gradients, and keep one number for each."""
        assert self.twin is not None
        parameters = [p for group in self.twin.param_groups for p in group["params"]]
        self._summed = any(p.grad is not None for p in parameters)
        self._look = AllGradients(1.0, None)  # which find the norm: a scaler's check would need numbers
        yield
        with self.twins.paused(), torch.no_grad():
            self._scale = self._look.verdict().scale
            self.twins.ledger.add("scale", self._scale, "computed")
            self._look = None
            self.twins.ledger.sweep()

    def step_ends(self) -> None:
        """Drop what a first pass found."""
        self._scale = None
        self.twins.ledger.sweep()

    def update(self, update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None) -> None:
        twin = self.twins.of(update.parameter)
        with self.twins.paused(), torch.no_grad():
            if self._look is not None:
                self._look.add(update.index, grad)
            elif self.waits:
                self._wait(twin)
            else:
                self._spent = twin
                if self.first:
                    self._make_state(twin)

    def finish(self) -> None:
        if self._look is not None:
            for norm in self._look.found:
                self.twins.ledger.add("norm", norm, "computed")
        if self._spent is not None:
            self._spent.grad = None
            self._spent = None
            self.twins.ledger.sweep()

    def _wait(self, p: torch.Tensor) -> None:
        if p.grad is None:
            p.grad = torch.empty_like(p, requires_grad=False)
            self.twins.ledger.add("gradient", p.grad, "gradient")

    def _make_state(self, p: torch.Tensor) -> None:
        assert self.twin is not None
        waiting, group = p.grad, group_of(self.twin, p)
        with FakeNumbers():
            step_alone(self.twin, group, p, torch.empty_like(p, requires_grad=False))
        p.grad = waiting
        made = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else None, self.twin.state[p])
        hold_states(self.twins.ledger, p, made, group, self.simulated, self.states, held=False)
