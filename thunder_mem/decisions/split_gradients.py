"""Gradients of a tensor's pieces are put together by one concatenation.

Thunder pads the gradient of each piece of a split with zeros and adds them up: beside the sum, two tensors of the whole
size are alive. Where an executor fuses, they are never there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from thunder.core.proxies import TensorProxy, pyval
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors import torchex

from thunder_mem.semantics.effects import effects_of
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["with_joined_pieces"]


@dataclass(frozen=True)
class _Pieces:
    """Parts of a tensor along a dim by their first places, all else being zero, and the operations that put them so."""

    dim: int
    parts: dict[int, TensorProxy]
    made_by: tuple[BoundSymbol, ...]

    def covers(self, whole: TensorProxy) -> bool:
        """Whether the parts stand side by side from one end of the dim to the other."""
        end = 0
        for start in sorted(self.parts):
            if start != end:
                return False
            end = start + self.parts[start].shape[self.dim]
        return end == whole.shape[self.dim]

    def overlaps(self, other: _Pieces) -> bool:
        spans = sorted((start, start + p.shape[self.dim]) for x in (self, other) for start, p in x.parts.items())
        same = self.parts.keys() & other.parts.keys()  # also where one has no places
        return bool(same) or any(end > start for (_, end), (start, _) in pairwise(spans))


def with_joined_pieces(trace: TraceCtx) -> TraceCtx:
    """The trace with sums of padded pieces as concatenations; the same object without any.

    Only operations that are claimed by Thunder's executor of PyTorch's functions count: others an executor may fuse.
    """
    found = [(b, pieces) for b, pieces in _sums(trace) if pieces.covers(b.output)]
    place = {id(b): i for i, b in enumerate(trace.bound_symbols)} if found else {}

    def stay_the_same(pieces: _Pieces, last: BoundSymbol) -> bool:
        """Nothing is written to where a piece may lie, before all of them are read at once."""
        first = min(place[id(b)] for b in pieces.made_by)
        between = (effects_of(b) for b in trace.bound_symbols[first : place[id(last)]])
        return not any(e.writes or e.barrier for e in between)

    joined = {id(b): pieces for b, pieces in found if stay_the_same(pieces, b)}
    if not joined:
        return trace
    gone = {id(b) for pieces in joined.values() for b in pieces.made_by} - joined.keys()
    bound_symbols = [
        _concatenation(b, joined[id(b)]) if id(b) in joined else b for b in trace.bound_symbols if id(b) not in gone
    ]
    return rebuilt(trace, bound_symbols, "Gradients of pieces are concatenated")


def _sums(trace: TraceCtx) -> Iterator[tuple[BoundSymbol, _Pieces]]:
    """The last operation of each sum of pieces, and all its pieces."""
    readers = Counter(p.name for b in trace.bound_symbols for p in b.flat_proxy_args)
    known: dict[str, _Pieces] = {}  # by the name of a padded piece, or of a sum of some
    last: dict[str, BoundSymbol] = {}
    for bsym in trace.bound_symbols:
        if (piece := _piece(bsym)) is not None:
            known[bsym.output.name] = piece
        elif (pair := _pair(bsym)) is not None:
            left, right = (known.get(p.name) if readers[p.name] == 1 else None for p in pair)
            if left is None or right is None or left.dim != right.dim or left.overlaps(right):
                continue
            made_by = (*left.made_by, *right.made_by, bsym)
            known[bsym.output.name] = _Pieces(left.dim, left.parts | right.parts, made_by)
            for p in pair:
                last.pop(p.name, None)
            last[bsym.output.name] = bsym
    for name, bsym in last.items():
        yield bsym, known[name]


def _piece(bsym: BoundSymbol) -> _Pieces | None:
    """A value padded with zeros along one dim."""
    if bsym.sym.id != torchex.pad_prim_impl.id:
        return None
    a, value, config = bsym.args
    padded = [dim for dim, places in enumerate(config) if tuple(places) != (0, 0, 0)]
    if pyval(value) != 0 or len(padded) != 1:
        return None
    low, high, inside = config[padded[0]]
    are_numbers = all(type(n) is int for n in (low, high, inside, *a.shape, *bsym.output.shape))
    return _Pieces(padded[0], {low: a}, (bsym,)) if are_numbers and min(low, high) >= 0 and not inside else None


def _pair(bsym: BoundSymbol) -> tuple[TensorProxy, TensorProxy] | None:
    """The two tensors that a plain sum adds, which have its shape and dtype."""
    if bsym.sym.id != torchex.add.id or bsym.kwargs.get("alpha", 1) != 1:
        return None
    left, right = bsym.args
    alike = isinstance(left, TensorProxy) and isinstance(right, TensorProxy) and left.shape == right.shape
    return (left, right) if alike and left.dtype == right.dtype == bsym.output.dtype else None


def _concatenation(bsym: BoundSymbol, pieces: _Pieces) -> BoundSymbol:
    parts = [pieces.parts[start] for start in sorted(pieces.parts)]
    bound = torchex.cat.bind(parts, pieces.dim, output=bsym.output)
    return bsym.from_bsym(sym=bound.sym, args=bound.args, kwargs=bound.kwargs, subsymbols=bound.subsymbols)
