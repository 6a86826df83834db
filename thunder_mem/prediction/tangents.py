"""The tangents that a compiled backward receives, and their destination for an input that is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.fusers.fake_regions import empty_like_proxy

__all__ = ["checked_tangents", "fill_with_zeros", "passed_through"]


def passed_through(outputs: Sequence[Any], inputs: Sequence[Any]) -> dict[int, int]:
    """Position among the outputs -> position among the inputs, for each input that is returned unchanged."""
    at = {id(t): i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad}
    return {i: at[id(t)] for i, t in enumerate(outputs) if id(t) in at}


def checked_tangents(backward: Any, given: Sequence[torch.Tensor | None] | None, mode: FakeTensorMode) -> list[Any]:
    """The cotangents in the order of the backward trace, None for a missing one; by default dense ones.

    Raises:
        TypeError: one is not a tensor.
        ValueError: their number is wrong, or one does not match its output.
    """
    _, wanted = backward.args
    if given is None:
        with mode:
            return [empty_like_proxy(p) if isinstance(p, TensorProxy) else None for p in wanted]
    shapes = ", ".join("none" if p is None else str(tuple(map(int, p.shape))) for p in wanted)
    takes = f"the backward takes {len(wanted)} tangents, one for each tensor it returns, in order, of shapes {shapes}"
    if len(given) != len(wanted):
        raise ValueError(f"{takes}; but {len(given)} were given")
    for i, (p, t) in enumerate(zip(wanted, given, strict=True)):
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"tangents are tensors or None, but number {i} is {type(t).__name__}")
        if p is None:
            raise ValueError(f"{takes}; number {i} is None, as that output has no gradient")
        expected = tuple(map(int, p.shape)), dtypes.to_torch_dtype(p.dtype), p.device.type
        found = tuple(t.shape), t.dtype, t.device.type
        if found != expected:
            one, other = (f"{shape} of {dtype} on {device}" for shape, dtype, device in (found, expected))
            raise ValueError(f"{takes}; number {i} is {one} and not {other}")
    return list(given)


def fill_with_zeros(
    given: list[Any], layouts: Sequence[tuple[Any, torch.dtype, torch.device]], mode: FakeTensorMode
) -> None:
    """Replace missing tangents, including those of integers, by zeros, as autograd does."""
    with mode:
        for i, (shape, dtype, device) in enumerate(layouts):
            if given[i] is None:
                given[i] = torch.empty(shape, dtype=dtype, device=device)
