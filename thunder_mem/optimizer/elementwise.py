"""What a step does to each element by itself: clipping, and the whole update of most optimizers of `torch.optim`."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["BRANCHING", "BY_ELEMENT", "Clip"]

BY_ELEMENT = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip
"""Optimizers whose update of an element depends on no other element."""

BRANCHING = frozenset((torch.optim.ASGD, torch.optim.RAdam))
"""Optimizers whose arithmetic branches on a number of the state: what they hold changes from step to step."""


class Clip(NamedTuple):
    """What is done to a gradient before the step."""

    value: float | None
    scale: torch.Tensor | None

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            grad = grad.mul(self.scale).to(grad.dtype)
        return grad if self.value is None else grad.clamp(-self.value, self.value)
