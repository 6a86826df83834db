"""What autograd knows of a parameter's gradient: who waits for it, and who asked for it."""

from __future__ import annotations

import torch

__all__ = ["add_gradient", "hooked", "is_asked_for"]


def hooked(p: torch.Tensor) -> bool:
    """Whether hooks wait for the parameter's gradient."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def is_asked_for(p: torch.Tensor, name: str) -> bool:
    """Whether the pass through the autograd graph adds to the parameter's gradient.

    `torch.autograd.grad` and `backward(inputs=...)` leave parameters out.

    Raises:
        RuntimeError: `torch.autograd.grad` is to return the gradient.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(p).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.autograd.grad gets no gradient of {name}, which the backward uses itself: compile a program "
            "without optimizer= for it"
        ) from error


def add_gradient(p: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to a parameter's gradient, which is memory of its own: in a trace, two gradients may share theirs."""
    if p.grad is None:
        p.grad = torch.empty_like(p, requires_grad=False).copy_(grad)
    else:
        p.grad.add_(grad)
