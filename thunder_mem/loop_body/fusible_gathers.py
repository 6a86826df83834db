"""Gathers of one value a row, in a form that a fusion executor takes.

A loss reads its target's log-probability by a gather, whose gradient is a scatter into zeros. Both cut the block's
fused code in two. The value between the halves is as large as the logits, in float32. Two rewritings avoid that:

- A gather from an elementwise result equals the operation on gathers from its operands. So the gather moves up to the
  block's own logits, where it reads one value a row. It still refuses a target outside the vocabulary.
- Zeros with one value in each row are a comparison of column numbers with the index, and their sum over the row is
  that value. The sum of equal values is a product.

One region then computes the gradient of the logits from the logits and allocates nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor, OperatorExecutor

from thunder_mem.sharding.op_rules import pointwise_ids
from thunder_mem.trace.rebuilding import rebuilt, recorded

__all__ = ["fusible_picks"]

_GATHERS = {PrimIDs.GATHER, PrimIDs.TAKE_ALONG_AXIS}


def fusible_picks(trace: TraceCtx, executors: Sequence[Any]) -> TraceCtx:
    """The trace with gathers and scatters of one value a row rewritten for the executors that fuse.

    Args:
        trace: a block after autograd, before any executor has claimed an operation.
        executors: in order of preference; operations that an operator executor claims first stay unchanged.

    Returns:
        the new trace; the same object if there is nothing to rewrite or no fusion executor.
    """
    rewriter = _Rewriter(trace, executors)
    written: dict[int, list[BoundSymbol]] = {}  # by the identity of the bound symbol that they replace
    for bsym in trace.bound_symbols:
        if (made := rewriter.gather(bsym) or rewriter.scatter(bsym)) is not None:
            written[id(bsym)] = _named_as(bsym, *made)
    for at, leaves in rewriter.leaves.items():
        for leaf in leaves:
            if (made := rewriter.sum_over_row(leaf)) is not None:
                written[id(leaf)] = _named_as(leaf, *made)
                rewriter.opened.add(at)
    if not written:
        return trace
    opened = (
        b
        for at, bsym in enumerate(trace.bound_symbols)
        for b in (rewriter.leaves[at] if at in rewriter.opened else [bsym])
    )
    return dce(rebuilt(trace, [new for b in opened for new in written.get(id(b), [b])]))


def _named_as(bsym: BoundSymbol, scope: Sequence[BoundSymbol], result: TensorProxy) -> list[BoundSymbol]:
    """The traced replacement of an operation, under the name of its result."""
    return [b.from_bsym_swap_proxies({variableify(result): bsym.output}) for b in scope]


class _Rewriter:
    """Finds rewritings and traces them; `opened` are the composites to replace by their leaves."""

    def __init__(self, trace: TraceCtx, executors: Sequence[Any]):
        self.trace, self.executors = trace, executors
        self.opened: set[int] = set()
        self.leaves: dict[int, list[BoundSymbol]] = {}
        self.scattered: dict[str, tuple[TensorProxy, int]] = {}  # zeros but for one value of these in each row
        self.producer: dict[str, tuple[int, BoundSymbol]] = {}
        known = {a.name for a in trace.args}
        self.visible = known | {o.name for b in trace.bound_symbols for o in b.flat_proxy_outs}  # inside no composite
        for at, bsym in enumerate(trace.bound_symbols):
            self.leaves[at] = [bsym]
            if bsym.subsymbols and self._fuses(bsym):
                inner = [b for b in _prims(bsym) if not all(o.name in known for o in b.flat_proxy_outs)]
                if all(map(self._fuses, inner)):
                    self.leaves[at] = inner
            for leaf in self.leaves[at]:
                for o in leaf.flat_proxy_outs:
                    self.producer.setdefault(o.name, (at, leaf))
                    known.add(o.name)

    def _fuses(self, bsym: BoundSymbol) -> bool:
        """Whether the first executor that takes the operation fuses it."""
        for ex in self.executors:
            if isinstance(ex, FusionExecutor) and ex.can_fuse(bsym):
                return True
            if isinstance(ex, OperatorExecutor) and ex.can_execute(bsym):
                return False
        return False

    def gather(self, bsym: BoundSymbol) -> tuple[list[BoundSymbol], TensorProxy] | None:
        """The gather of one value a row, moved to the operands of its source, if these are fused."""
        if bsym.sym.id not in _GATHERS or not _one_a_row(bsym.args[0], bsym.args[1], bsym.args[2]):
            return None
        source, index, dim = bsym.args
        opened: set[int] = set()
        with recorded(self.trace) as scope:
            result = self._picked(source, index, dim, opened, {})
        # At most one gather may remain; several would read more values than they save.
        gathers = [b for b in scope if b.sym.id in _GATHERS]
        if len(gathers) != 1 or gathers[0].args[0].name == source.name:
            return None
        if not all(self._fuses(b) for b in scope if b.sym.id not in _GATHERS):
            return None
        self.opened |= opened
        return scope, result

    def _picked(self, value: TensorProxy, index: TensorProxy, dim: int, opened: set[int], memo: dict) -> TensorProxy:
        if value.name in memo:
            return memo[value.name]
        at, leaf = self.producer.get(value.name, (-1, None))
        shape = tuple(index.shape)
        result = None
        if leaf is not None and leaf in self.leaves[at] and self._fuses(leaf):
            recurse = lambda v: self._picked(v, index, dim, opened, memo)  # noqa: E731
            if leaf.sym.id == PrimIDs.BROADCAST_IN_DIM:
                operand, _, dims = leaf.args
                if dim not in dims or operand.shape[list(dims).index(dim)] == 1:
                    result = prims.broadcast_in_dim(operand, shape, dims)
            elif leaf.sym.id == PrimIDs.FULL:
                result = prims.full(shape, *leaf.args[1:], **leaf.kwargs)
            elif leaf.sym.id in pointwise_ids() and all(
                tuple(a.shape) == tuple(value.shape) for a in leaf.flat_proxy_args if isinstance(a, TensorProxy)
            ):
                args = [recurse(a) if isinstance(a, TensorProxy) else a for a in leaf.args]
                result = leaf.sym(*args, **leaf.kwargs)
        if result is None:
            result = prims.gather(value, index, dim)  # `take_along_dim` does not check that the index is inside
        elif leaf is not self.trace.bound_symbols[at]:
            opened.add(at)
        memo[value.name] = result
        return result

    def scatter(self, bsym: BoundSymbol) -> tuple[list[BoundSymbol], TensorProxy] | None:
        """Zeros with one value a row, by a comparison."""
        if bsym.sym.id != PrimIDs.SCATTER_ADD:
            return None
        target, index, value, dim = bsym.args
        _, zeros = self.producer.get(target.name, (-1, None))
        if zeros is None or zeros.sym.id != PrimIDs.FULL or zeros.args[1] != 0 or not _one_a_row(target, index, dim):
            return None
        if tuple(value.shape) != tuple(index.shape):
            return None
        shape, axes = tuple(target.shape), tuple(range(target.ndim))
        with recorded(self.trace) as scope:
            columns = prims.iota(shape[dim], start=0, step=1, device=target.device, dtype=dtypes.int64)
            hit = prims.eq(
                prims.broadcast_in_dim(columns, shape, (dim,)),
                prims.broadcast_in_dim(prims.convert_element_type(index, dtypes.int64), shape, axes),
            )
            result = prims.where(hit, prims.broadcast_in_dim(value, shape, axes), float(zeros.args[1]))
        if result.dtype != bsym.output.dtype or not all(map(self._fuses, scope)):
            return None
        self.scattered[bsym.output.name] = value, dim
        return scope, result

    def sum_over_row(self, leaf: BoundSymbol) -> tuple[list[BoundSymbol], TensorProxy] | None:
        """The sum along each row, where it is known without adding: of one value, of equal values, of both together.

        Label smoothing adds one value to equal ones. Added one after the other, 4,096 equal values in float32 differ
        from their product by 1e-5, since every addition rounds in the same direction.
        """
        if leaf.sym.id != PrimIDs.SUM or len(leaf.args[1]) != 1:
            return None
        operand, (dim,) = leaf.args[:2]
        with recorded(self.trace) as scope:
            result = self._row_sum(operand, dim)
        if result is None or result.dtype != leaf.output.dtype:
            return None
        return (scope, result) if all(map(self._fuses, scope)) else None

    def _row_sum(self, value: TensorProxy, dim: int) -> TensorProxy | None:
        one, at = self.scattered.get(value.name, (None, -1))
        if one is not None:
            return prims.squeeze(one, (dim,)) if at == dim else None
        _, leaf = self.producer.get(value.name, (-1, None))
        if leaf is None:
            return None
        if leaf.sym.id == PrimIDs.SHALLOW_COPY:
            return self._row_sum(leaf.args[0], dim)
        if leaf.sym.id == PrimIDs.ADD and all(isinstance(a, TensorProxy) for a in leaf.args):
            sums = [self._row_sum(a, dim) for a in leaf.args]
            return None if any(s is None for s in sums) else prims.add(*sums)
        if leaf.sym.id == PrimIDs.BROADCAST_IN_DIM:
            operand, shape, dims = leaf.args
            if dim in dims or value.dtype not in dtypes.float_dtypes or operand.name not in self.visible:
                return None
            without = (*shape[:dim], *shape[dim + 1 :])
            narrow = prims.broadcast_in_dim(operand, without, [d - (d > dim) for d in dims])
            return prims.mul(narrow, float(shape[dim]))
        return None


def _one_a_row(source: TensorProxy, index: TensorProxy, dim: int) -> bool:
    """Whether the index has one entry along `dim`, and the source's size along every other dim."""
    return all(i == (1 if d == dim else s) for d, (s, i) in enumerate(zip(source.shape, index.shape, strict=True)))


def _prims(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    if bsym.sym.is_prim or not bsym.subsymbols:
        yield bsym
        return
    for sub in bsym.subsymbols:
        yield from _prims(sub)
