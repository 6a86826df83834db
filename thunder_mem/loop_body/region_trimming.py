"""The end of a region: as early as one scalar carries all of its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.prims import PrimIDs

from thunder_mem.loop_body.leaves import Leaf
from thunder_mem.loop_body.region import Region

__all__ = ["trim"]


def without(region: Region, dropped: Sequence[Leaf]) -> Region:
    """The region without some of its last members."""
    gone = {leaf.index for leaf in dropped}
    names = {o.name for leaf in dropped for o in leaf.outputs}
    return Region(
        region.program,
        region.n,
        region.amplifiers,
        tuple(m for m in region.members if m.index not in gone),
        region.shardings,
        {name: v for name, v in region.values.items() if name not in names},
        region.derived - names,
    )


def trim(region: Region) -> Region:
    """End the region where one scalar carries the gradient, if such a place exists, and before totals are rounded.

    Gradients can then be computed in the forward. If `loss` and `3 * loss` are returned, they are one scalar
    and its multiple once the region ends at `loss`. A 16-bit loss is a float32 sum rounded once, not a sum of
    rounded numbers.
    """

    def one_scalar(r: Region) -> bool:
        return (
            len(r.differentiable) == 1
            and r.differentiable[0].sharding.partial == "sum"
            and (r.differentiable[0].proxy.numel == 1)
        )

    smaller = region
    while not one_scalar(smaller):
        last = smaller.members[-1] if smaller.members else None
        if last is None or any(smaller.values[o.name].sharding.partial is None for o in last.outputs):
            smaller = region
            break
        smaller = without(smaller, [last])
    while smaller.members and _rounds_a_total(smaller, smaller.members[-1]):
        smaller = without(smaller, smaller.members[-1:])
    return smaller


def _rounds_a_total(region: Region, leaf: Leaf) -> bool:
    if leaf.bsym.sym.id != PrimIDs.CONVERT_ELEMENT_TYPE or leaf.inputs[0].name not in region.derived:
        return False
    (out,) = leaf.outputs
    return region.values[out.name].sharding.partial == "sum" and out.dtype.bytes < leaf.inputs[0].dtype.bytes
