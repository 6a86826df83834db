"""Operations of random programs that ThunderFX does not give to Thunder: each ends a subgraph, or a graph.

The operations that Thunder leaves to others go to Inductor; at `parted` Dynamo ends one graph and starts another.
"""

from __future__ import annotations

import torch

from tests.programs.program_table import add, is_float, one

__all__ = ["parted"]


def parted(x: torch.Tensor) -> torch.Tensor:
    """A view of all of `x`, behind a graph break."""
    torch._dynamo.graph_break()
    return x.view_as(x)


add("split", "sinc", "fresh", "torch.sinc({0})", one(is_float))
add("split", "i0", "fresh", "torch.special.i0e({0})", one(is_float))
add("split", "parted", "view", "parted({0})", one(is_float))
