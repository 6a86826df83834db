"""What a function computes and differentiates, for comparison with eager PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["with_gradients"]


def with_gradients(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result of `fn` for fresh leaves, and their gradients by a sum in which each element has another weight."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    weights = torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape).cos()
    return out, *torch.autograd.grad((out * weights).sum(), leaves)
