"""A step of a program that any compiler may have compiled: its call, its loss, and the tensors that it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from thunder_mem.comparison.differences import Observed, observed
from thunder_mem.comparison.kept_state import storage_bytes, tensors_inside
from thunder_mem.fake_execution.stand_ins import owned_by
from thunder_mem.prediction.training_step import training_step

__all__ = ["CompilesItself", "Step", "compiles_itself", "step_of"]


class CompilesItself(Protocol):
    """The forward of a model that compiles itself, as `memory_efficient` of `thunder_mem.integrations` makes it.

    Attributes:
        plain: the step's program as another compiler gets it.
        ours: the same with `MemEfficient`, which compiles in its first call.
    """

    @property
    def plain(self) -> torch.nn.Module: ...

    def ours(self, *args: Any, **kwargs: Any) -> Any: ...


def compiles_itself(model: Any) -> CompilesItself | None:
    """The forward of such a model; None for all others."""
    forward = getattr(model, "forward", None)
    return forward if hasattr(forward, "plain") and hasattr(forward, "ours") else None


@dataclass(frozen=True)
class Step:
    """A call of a program, and what belongs to it.

    Attributes:
        args, kwargs: of the call.
        loss_fn: from the result to the scalar loss, or None.
        optimizer: steps at the end, or None.
        modules, optimizers, others: all that the program owns or refers to; `others` also has the arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Tensor] | None
    optimizer: torch.optim.Optimizer | None
    modules: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    others: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors at present, with the optimizers' state."""
        return tensors_inside(self.modules, self.optimizers, self.others)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that a backward gives a gradient."""
        return [t for t in self.tensors if t.is_leaf and t.requires_grad]

    @property
    def device(self) -> torch.device:
        """The device of the first tensor on a GPU, else the CPU."""
        return next((t.device for t in self.tensors if t.is_cuda), torch.device("cpu"))

    @property
    def held_bytes(self) -> int:
        """The bytes of all tensors on the device at present."""
        return storage_bytes(self.tensors, self.device.type)

    def loss(self, output: Any) -> Tensor | None:
        """The scalar loss of a result; None if there is nothing to differentiate.

        Raises:
            ValueError: `loss_fn` returns no scalar.
        """
        if self.loss_fn is None:
            found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            sums = [t if t.numel() == 1 else t.sum() for t in found]
            return sum(sums[1:], sums[0]) if sums else None
        loss = self.loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss has to be a scalar tensor, but it is {what}: give compare another loss_fn")
        return loss if loss.requires_grad else None

    def observe(self, compiled: Callable[..., Any]) -> tuple[Observed, bool]:
        """The results and gradients of one forward and backward, and whether there was a backward."""
        output = compiled(*self.args, **self.kwargs)
        loss = self.loss(output)
        if loss is not None:
            loss.backward()
        return observed(output, self.leaves), loss is not None

    def run(self, compiled: Callable[..., Any], *, trains: bool) -> None:
        """One step, after which gradients stay if there is no optimizer.

        Args:
            compiled: the program.
            trains: with a backward.
        """
        if not trains:
            self.loss(compiled(*self.args, **self.kwargs))
            return
        training_step(compiled, self.optimizer, self.loss, *self.args, kwargs=self.kwargs)  # type: ignore[arg-type]

    def drop_gradients(self) -> None:
        """Let the next step begin without gradients."""
        for t in self.leaves:
            t.grad = None


def step_of(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Step:
    """The step of a model's call.

    Raises:
        ValueError: tensors are fake or on "meta", or an argument was computed from a tensor with a gradient.
    """
    owned = owned_by(model, loss_fn)
    optimizers = {id(o): o for o in (optimizer, *owned.optimizers) if o is not None}
    given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
    if any(t.requires_grad and not t.is_leaf for t in given):
        raise ValueError(
            "an argument was computed from a tensor with a gradient, so the step is only a part of one: "
            "give compare t.detach().requires_grad_()"
        )
    others = (*given, *owned.tensors)
    step = Step(args, dict(kwargs), loss_fn, optimizer, tuple(owned.modules), tuple(optimizers.values()), others)
    if any(isinstance(t, FakeTensor) or t.is_meta for t in step.tensors):
        raise ValueError("compare runs the program, and fake tensors have no data: use predict_step and estimate")
    return step
