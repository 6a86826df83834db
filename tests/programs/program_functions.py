"""Operations of random programs with a `torch.autograd.Function`: the user's own derivative is the one to take.

No backward here is the derivative of its forward, and classes of one name differ in a constant alone: whoever
differentiates the forward, or takes another class's backward, is wrong by what shows.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from tests.programs.program_table import Drawn, Values, add, is_float, one

__all__ = ["FUNCTIONS"]


def _sine(factor: float) -> type[torch.autograd.Function]:
    """It saves its argument."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return torch.sin(x) * 1.5

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return g * torch.cos(x) * factor

    return Sine


class _Squash(torch.autograd.Function):
    """It saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * (1.25 - y * y)


class _Straight(torch.autograd.Function):
    """It saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.abs() * 0.5

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * -2


class _Product(torch.autograd.Function):
    """Of two factors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return g * y * 0.5, g * x * -1.5


# As programs call them.
FUNCTIONS: dict[str, type[torch.autograd.Function]] = {
    "SineA": _sine(-0.5),
    "SineB": _sine(2.5),
    "Squash": _Squash,
    "Straight": _Straight,
    "Product": _Product,
}


def _factors(rng: Random, values: Values) -> Drawn | None:
    a = values.floating(rng)
    t = values.tensors[a] if a else None
    # Not of one value with itself: Thunder names both parameters alike; see `defects.py`.
    b = a and values.pick(rng, lambda u: u is not t and (u.shape, u.dtype) == (t.shape, t.dtype))
    return b and ((a, b), ())


for _name in ("SineA", "SineB", "Squash", "Straight"):
    add("function", f"apply_{_name}", "fresh", f"{_name}.apply({{0}})", one(is_float))
add("function", "apply_Product", "fresh", "Product.apply({0}, {1})", _factors)
