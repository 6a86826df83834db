"""The optimizer and the loss of the step that a command asks about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_mem.command_line.program import Program, UsageError
from thunder_mem.command_line.questions import Question
from thunder_mem.optimizer.step_in_backward import StepInBackward

__all__ = ["loss_of", "optimizer_of", "stepper_of"]


def stepper_of(program: Program, question: Question) -> torch.optim.Optimizer | None:
    """The step's optimizer; it steps in the backward if that is asked for, but never under Thunder alone."""
    optimizer = optimizer_of(program, question.optimizer)
    if optimizer is not None and question.inference:
        raise UsageError("--inference has no training step: leave the optimizer out")
    if question.plain:
        return optimizer.wrapped if isinstance(optimizer, StepInBackward) else optimizer
    own = isinstance(optimizer, StepInBackward) and ("auto" if optimizer.counted else optimizer.states)
    if own and question.states not in ("device", own):
        raise UsageError(f"the program has a StepInBackward already: give it states={question.states!r} itself")
    if question.states != "device" and not question.step_in_backward:
        raise UsageError(f"--states {question.states} is for updates in the backward: give --step-in-backward, too")
    if not question.step_in_backward or isinstance(optimizer, StepInBackward):
        return optimizer
    if optimizer is None:
        raise UsageError("--step-in-backward needs an optimizer: give --optimizer, too")
    if program.is_jitted:
        raise UsageError("the program is jitted already: give a StepInBackward to its own MemEfficient")
    return StepInBackward(optimizer, states=question.states)


def optimizer_of(program: Program, name: str | None) -> torch.optim.Optimizer | None:
    """The optimizer of that name over all that the program trains; the program's own without a name."""
    if name is None:
        return program.optimizer
    kind: Any = getattr(torch.optim, name, None)
    if not _is_optimizer(kind):
        known = sorted(name for name, k in vars(torch.optim).items() if _is_optimizer(k))
        raise UsageError(f"torch.optim has no optimizer {name!r}; it has {', '.join(known)}")
    owner = program.model
    if isinstance(owner, torch.nn.Module):
        parameters: list[torch.Tensor] = [p for p in owner.parameters() if p.requires_grad]
    else:
        given = torch.utils._pytree.tree_leaves((program.args, program.kwargs))
        parameters = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if not parameters:
        raise UsageError(f"there is nothing that {name} could train: no parameter, and no input, requires a gradient")
    make: Any = kind
    return make(parameters)


def _is_optimizer(kind: Any) -> bool:
    base = torch.optim.Optimizer
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def loss_of(program: Program, name: str | None) -> Callable[[Any], torch.Tensor] | None:
    """The program's loss, else the "sum" or the "mean" of its first result."""
    if program.loss is not None or name is None:
        return program.loss

    def loss(output: Any) -> torch.Tensor:
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        return getattr(tensors[0].float(), name)()

    return loss
