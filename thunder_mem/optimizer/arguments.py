"""Check what `StepInBackward` is given."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from thunder_mem.memory.outside_input import quoted
from thunder_mem.optimizer.compiled_step import has_failed
from thunder_mem.optimizer.elementwise import BY_ELEMENT
from thunder_mem.optimizer.trial_steps import changed_for_all

__all__ = ["STATES", "check_clipping", "check_compiled", "check_optimizer", "check_states", "check_two_pass"]

STATES = ("device", "host", "auto")
"""Where the optimizer's states may be; "auto" leaves that to a budget."""


def check_optimizer(optimizer: Any) -> None:
    """Raise for what is no optimizer, or none that can update one parameter alone.

    Raises:
        TypeError, ValueError: as `StepInBackward`.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        name = optimizer.__name__
        raise TypeError(f"{name} is a class: call it with the parameters, {name}(model.parameters())")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"StepInBackward takes an optimizer of torch.optim, not {quoted(optimizer)}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS looks at all gradients together and calls the model again, so no backward can step it")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError("SparseAdam takes sparse gradients only, which wait for step() anyway: use it as it is")
    if (shared := changed_for_all(optimizer)) is not None:
        raise TypeError(f"{type(optimizer).__name__} changes {shared} in a step, so it cannot update one alone")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("an optimizer with differentiable=True is for steps under autograd, not for a backward")


def check_clipping(clip_value: Any, max_norm: Any) -> None:
    """Raise a ValueError for values that are no positive number, and for both together."""
    for name, value in (("clip_value", clip_value), ("max_norm", max_norm)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"{name} is a number above 0, not {quoted(value)}")
    if clip_value is not None and max_norm is not None:
        raise ValueError("gradients are clipped by clip_value or by max_norm, not by both")


def check_states(states: Any) -> None:
    """Raise a ValueError for an unknown place of states; it lists the known ones."""
    if states not in STATES:
        *first, last = map(repr, STATES)
        raise ValueError(f"states is {', '.join(first)} or {last}, not {quoted(states)}")


def check_compiled(compiled: Any, optimizer: Optimizer) -> None:
    """Raise if steps of an optimizer are to be compiled, and cannot be; warn if that failed before.

    Raises:
        TypeError: the optimizer does not update each element by itself.
        ValueError: its own fused kernel is asked for, too, or `compiled` is no bool.
    """
    if not isinstance(compiled, bool):
        raise ValueError(f"compiled is True or False, not {quoted(compiled)}")
    if not compiled:
        return
    if type(optimizer) not in BY_ELEMENT:
        known = ", ".join(sorted(kind.__name__ for kind in BY_ELEMENT))
        raise TypeError(f"compiled=True takes {known} of torch.optim, not {type(optimizer).__name__}")
    if any(group.get("fused") for group in optimizer.param_groups):
        kind = type(optimizer).__name__
        raise ValueError(f"{kind}(fused=True) runs a kernel of PyTorch: leave out either fused=True or compiled=True")
    if has_failed(optimizer):
        kind = type(optimizer).__name__
        warnings.warn(
            f"torch.compile failed on a step of {kind} before: steps run as without compiled=True", stacklevel=4
        )


def check_two_pass(two_pass: Any, max_norm: Any, scaler: Any) -> None:
    """Raise for a scaler that is none, and for two passes that nothing needs."""
    if not isinstance(two_pass, bool):
        raise ValueError(f"two_pass is True or False, not {quoted(two_pass)}")
    if not isinstance(scaler, torch.amp.GradScaler | None):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not {quoted(scaler)}")
    if two_pass and max_norm is None and scaler is None:
        raise ValueError("two_pass=True is for max_norm= or scaler=, which need all gradients before the first update")
