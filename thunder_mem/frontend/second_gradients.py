"""A warning where a gradient of a gradient is asked for, which compiled programs do not have.

Thunder's backward can be differentiated no second time. PyTorch says so only if the tangent has a gradient itself; with
``torch.autograd.grad(loss, x, create_graph=True)``, as in a gradient penalty, the gradients are silently constants.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

import torch
from thunder.executors.torch_autograd import ThunderFunction

__all__ = ["warn_of_second_gradients"]

SECOND = (
    "create_graph=True: a program that Thunder compiles has no gradients of gradients, with MemEfficient and without. "
    "These gradients are constants in what follows. Leave a program with a gradient penalty to eager PyTorch"
)


def warn_of_second_gradients() -> None:
    """From now on, a backward of a compiled program that should be differentiable warns that it is not."""
    thunders = ThunderFunction.backward
    if hasattr(thunders, "_warns"):
        return

    @wraps(thunders)
    def backward(ctx: Any, *tangents: Any) -> Any:
        if torch.is_grad_enabled():
            warnings.warn(SECOND, stacklevel=2)
        return thunders(ctx, *tangents)

    backward._warns = True  # type: ignore[attr-defined]
    ThunderFunction.backward = staticmethod(backward)
