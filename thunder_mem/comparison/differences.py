"""What a run returns and which gradients it leaves, as copies on the host, and how far two runs are apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Observed", "largest_difference", "observed"]


@dataclass(frozen=True)
class Observed:
    """Copies of a run's results (tensors and numbers, in order) and of its gradients; None where there is none."""

    results: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def observed(output: Any, leaves: Iterable[Tensor]) -> Observed:
    """The results and the gradients of a run.

    Args:
        output: what the model returned.
        leaves: the tensors that may have gradients.
    """
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor | bool | int | float | complex)]
    gradients = (None if t.grad is None else _copy(t.grad) for t in leaves)
    return Observed(tuple(_copy(torch.as_tensor(r)) for r in results), tuple(gradients))


def largest_difference(ours: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """The largest absolute difference of an element; a missing tensor counts as zeros.

    Equal infinities and two NaNs in the same place differ by 0, a NaN and a number by infinity.

    Raises:
        ValueError: the number of tensors differs, or the shapes of two of them.

    Example:
        >>> largest_difference([torch.tensor([1.0, 2.0]), None], [torch.tensor([1.0, 2.5]), torch.zeros(3)])
        0.5
    """
    if len(ours) != len(others):
        raise ValueError(f"it has {len(ours)} values where eager has {len(others)}")
    return max((_difference(a, b) for a, b in zip(ours, others, strict=True)), default=0.0)


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        there = a if a is not None else b
        return 0.0 if there is None else _difference(there, torch.zeros_like(there))
    if a.shape != b.shape:
        raise ValueError(f"it has a tensor of shape {tuple(a.shape)} where eager has one of shape {tuple(b.shape)}")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def _copy(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.to_dense() if t.is_sparse else t).to("cpu", copy=True)
