"""The updates of a compiled backward on fake tensors: what they make and what they free."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_mem.optimizer.one_parameter import group_of, step_alone
from thunder_mem.optimizer.update import Rehearsal, Update
from thunder_mem.prediction.fake_twins import Scalars, Twins

__all__ = ["RehearsedUpdates"]


class RehearsedUpdates(Rehearsal):
    """Takes the place of updates in a predicted step.

    Args:
        twin: the wrapped optimizer over twins.
        twins: of the caller's tensors.
        first: the optimizer makes its state in this step.

    Attributes:
        waits: gradients wait, as under `StepInBackward.accumulate`.
    """

    def __init__(self, twin: torch.optim.Optimizer | None, twins: Twins, first: bool) -> None:
        self.twin, self.twins, self.first = twin, twins, first
        self._spent: torch.Tensor | None = None

    def update(self, update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None) -> None:
        twin = self.twins.of(update.parameter)
        with self.twins.paused(), torch.no_grad():
            if self.waits:
                self._wait(twin)
            else:
                self._spent = twin
                if self.first:
                    self._make_state(twin)

    def finish(self) -> None:
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
        waiting = p.grad
        with Scalars():
            step_alone(self.twin, group_of(self.twin, p), p, torch.empty_like(p, requires_grad=False))
        p.grad = waiting
        for name, t in self.twin.state[p].items():
            if isinstance(t, FakeTensor):
                self.twins.ledger.add(f"optimizer.{name}", t, "optimizer state")
