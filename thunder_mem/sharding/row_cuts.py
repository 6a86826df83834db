"""Row selections of a value, and the selections of operands that they imply.

Rows may span several dims, and a reshape may merge or split these dims. So a cut describes adjacent dims together, as
stretches (`Pick`) of their layout. For example, ``(B * T, V)`` without the last position of each sequence is one dim of
two stretches: `B` whole, and `T` without its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.sharding.propagation import Relation, RuleError

__all__ = ["Block", "Cut", "Pick", "apply_cut", "cut_of", "kept_shape", "operand_cuts", "through_reshape"]


@dataclass(frozen=True)
class Pick:
    """A stretch of rows.

    Attributes:
        extent: the number of rows.
        span: the slice (start, end, step) that stays; None if all rows stay, or those at an index.
        index: name of the tensor of the rows that stay.
        at: that tensor.
    """

    extent: int
    span: tuple[int, int, int] | None = None
    index: str = ""
    at: TensorProxy | None = field(default=None, compare=False, repr=False)

    @property
    def kept(self) -> int:
        """The number of rows that stay."""
        if self.at is not None:
            return self.at.shape[0]
        if self.span is None:
            return self.extent
        start, end, step = self.span
        return -(-(end - start) // step)

    @property
    def whole(self) -> bool:
        """Whether all rows stay."""
        return self.span is None and self.at is None


@dataclass(frozen=True)
class Block:
    """Adjacent dims with a common selection: several dims of one stretch, or one dim of several stretches.

    Attributes:
        first, count: the dims.
        picks: the stretches, the outermost first.
    """

    first: int
    count: int
    picks: tuple[Pick, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The remaining sizes of the dims; their number stays, so that all others keep their places."""
        return *(1,) * (self.count - 1), math.prod(p.kept for p in self.picks)


Cut = tuple[Block, ...]
"""What is picked of a value, by dims in order; dims that it does not name are whole."""


def cut_of(bsym: BoundSymbol) -> Cut:
    """The cut that a slice, or a selection by an index, makes of its argument."""
    if bsym.sym.id == PrimIDs.TAKE:
        a, index, dim = bsym.args
        return (Block(dim % a.ndim, 1, (Pick(a.shape[dim], index=index.name, at=index),)),)
    a, start, end, *rest = bsym.args
    step = (rest[0] if rest else None) or [1] * a.ndim
    spans = zip(start, end, step, strict=True)
    picks = [Pick(size, span) for size, span in zip(a.shape, spans, strict=True)]
    return tuple(Block(d, 1, (p,)) for d, p in enumerate(picks) if p.span != (0, p.extent, 1))


def kept_shape(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    """The shape that remains of a value of the given shape.

    >>> kept_shape((4, 8, 100), (Block(1, 1, (Pick(8, (0, 7, 1)),)),))
    (4, 7, 100)
    """
    kept = list(shape)
    for block in cut:
        kept[block.first : block.first + block.count] = block.kept
    return tuple(kept)


def apply_cut(t: TensorProxy, cut: Cut) -> TensorProxy:
    """The remaining part of an existing value, by operations in the trace that is being written."""
    picks = _stretches(t.shape, cut)
    result = _reshaped(t, tuple(p.extent for p in picks))
    if any(p.span for p in picks):
        starts, ends, steps = zip(*(p.span or (0, p.extent, 1) for p in picks), strict=True)
        result = prims.slice_prim(result, list(starts), list(ends), list(steps))
    for d, p in enumerate(picks):
        if p.at is not None:
            result = prims.take(result, p.at, d)
    return _reshaped(result, kept_shape(t.shape, cut))


def _stretches(shape: Sequence[int], cut: Cut) -> list[Pick]:
    """A whole value as stretches."""
    picks: list[Pick] = []
    first = {block.first: block for block in cut}
    d = 0
    while d < len(shape):
        picks += first[d].picks if d in first else (Pick(shape[d]),)
        d += first[d].count if d in first else 1
    return picks


def _reshaped(t: TensorProxy, shape: tuple[int, ...]) -> TensorProxy:
    return t if tuple(t.shape) == shape else prims.reshape(t, shape)


def operand_cuts(relation: Relation, out: TensorProxy, cut: Cut, spreads: bool) -> dict[int, Cut]:
    """The cuts of an operation's tensor arguments, by slot, that a cut of its only result implies.

    Args:
        relation: the operation's rule.
        out: its result.
        cut: of the result.
        spreads: whether dims of the result that no argument has are copies of one another.

    Raises:
        RuleError: the operation mixes rows, or an argument lays them out in another way.
    """
    linked: dict[int, dict[int, int]] = {}  # by slot, its dims and the result's dims to which they belong
    tied = set()
    for group in relation.links:
        for d in (k for slot, k in group if slot == -1):
            tied.add(d)
            for slot, k in group:
                if slot >= 0 and linked.setdefault(slot, {}).setdefault(d, k) != k:
                    raise RuleError("one of its dims depends on two dims of an argument")
    cuts: dict[int, Cut] = {}
    for block in cut:
        dims = range(block.first, block.first + block.count)
        for d in dims:
            if (-1, d) in relation.blocked:
                raise RuleError(relation.blocked[-1, d])
            if d not in tied and not spreads and out.shape[d] != 1:
                raise RuleError("its rule does not say what its rows depend on")
        for slot, dim_of in linked.items():
            found = [dim_of.get(d) for d in dims]
            if not any(k is not None for k in found):
                continue
            start = found[0]
            if start is None or found != list(range(start, start + block.count)):
                raise RuleError("an argument lays the rows out in another way")
            cuts[slot] = (*cuts.get(slot, ()), Block(start, block.count, block.picks))
    return {slot: tuple(sorted(found, key=lambda b: b.first)) for slot, found in cuts.items()}


def through_reshape(source: Sequence[int], target: Sequence[int], cut: Cut) -> Cut:
    """The cut of a reshape's argument that a cut of its result implies.

    Args:
        source, target: the shapes of the argument and of the result.
        cut: of the result.

    Raises:
        RuleError: the reshape mixes the rows that stay with those that go.

    >>> through_reshape((4 * 8, 100), (4, 8, 100), (Block(1, 1, (Pick(8, (0, 7, 1)),)),))[0].picks
    (Pick(extent=4, span=None, index=''), Pick(extent=8, span=(0, 7, 1), index=''))
    """
    rest = [p for p in _stretches(target, cut) if p.extent != 1 or not p.whole]
    dims = [d for d, size in enumerate(source) if size != 1]
    blocks = []
    while dims:
        first = last = dims.pop(0)
        left, right, picks = source[first], 1, list[Pick]()
        while left != right:
            if right < left:
                picks.append(rest.pop(0))
                right *= picks[-1].extent
            elif picks[-1].whole and (part := _divided(picks[-1].extent, left, right)):
                rest.insert(0, Pick(picks[-1].extent // part))
                picks[-1] = Pick(part)
                right = left
            else:
                last = dims.pop(0)
                left *= source[last]
        if all(p.whole for p in picks):
            continue
        if last > first and len(picks) > 1:
            raise RuleError("a reshape merges the rows with others")
        blocks.append(Block(first, last - first + 1, tuple(picks)))
    return tuple(blocks)


def _divided(extent: int, left: int, right: int) -> int:
    """The part of a whole stretch, the last of `right` values, that belongs to the first `left` values; 0 if none."""
    before = right // extent
    part = left // before
    return part if left % before == 0 and extent % part == 0 and 1 < part < extent else 0
