"""The prims whose results are views of their operand, as functions on tensors.

This is the only table of views. `layout.py` runs it on meta tensors, `fusers/fake_regions.py` on fake tensors, and
`functionalization/functionalize.py` reads the ops that are views for all strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from thunder.core.prims import PrimIDs

__all__ = ["CERTAIN_VIEWS", "VIEWS", "slice_view"]


def slice_view(
    a: torch.Tensor, start: Sequence[int], end: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """`prims.slice_prim`: per dim from `start` to `end` in steps of `strides`."""
    steps = strides or [1] * a.ndim
    return a[tuple(slice(int(i), int(j), int(k)) for i, j, k in zip(start, end, steps, strict=True))]


def _broadcast(a: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    for dim in range(len(shape)):
        if dim not in dims:
            a = a.unsqueeze(dim)
    return a.expand(tuple(shape))


# A reshape copies if the strides require it; PyTorch then does so here too.
VIEWS: dict[PrimIDs, Callable[..., torch.Tensor]] = {
    PrimIDs.BROADCAST_IN_DIM: _broadcast,
    PrimIDs.RESHAPE: lambda a, shape: a.reshape(tuple(shape)),
    PrimIDs.VIEW: lambda a, shape: a.reshape(tuple(shape)),
    PrimIDs.SLICE: slice_view,
    PrimIDs.SQUEEZE: lambda a, dims: a.squeeze(tuple(dims)),
    PrimIDs.TRANSPOSE: lambda a, permutation: a.permute(tuple(permutation)),
    PrimIDs.UNFOLD: lambda a, dim, size, step: a.unfold(dim, size, step),
    PrimIDs.SHALLOW_COPY: lambda a: a,
}
CERTAIN_VIEWS = frozenset(VIEWS) - {PrimIDs.RESHAPE, PrimIDs.VIEW}
