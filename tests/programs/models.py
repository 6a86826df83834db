"""Small modules that several test files train."""

from __future__ import annotations

import torch

__all__ = ["stack"]


def stack() -> torch.nn.Module:
    """Six layers of width 64, each with a softmax, which costs time to repeat."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1)) for _ in range(6)))
