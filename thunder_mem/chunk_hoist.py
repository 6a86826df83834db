"""Move a slice of rows from the logits to the head's input.

``F.linear(x, w)[..., :-1, :]`` shifts a sequence the way language models are trained; the slice would
cut across chunks, but it picks rows, so it may as well pick them before the product:
``F.linear(x[..., :-1, :], w)``. Everything between is element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce

from thunder_mem.chunk_op_rules import pointwise_ids
from thunder_mem.chunk_program import PRODUCTS, Leaf, Program, walk
from thunder_mem.chunk_region import escapes
from thunder_mem.chunk_rules import RULES, RuleError

__all__ = ["hoist_slice"]


@dataclass(frozen=True)
class _Cut:
    """Rows to keep: the leading dims of the sliced value, and the slice of each."""

    lead: tuple[int, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(-(-(e - s) // k) for s, e, k in zip(self.start, self.end, self.step, strict=True))

    def apply(self, t: TensorProxy) -> TensorProxy:
        """The kept rows of `t`, (*lead, c) or (prod(lead), c), in the same form."""
        c = t.shape[-1]
        full = t if tuple(t.shape[:-1]) == self.lead else prims.reshape(t, (*self.lead, c))
        kept = prims.slice_prim(full, [*self.start, 0], [*self.end, c], [*self.step, 1])
        return kept if full is t else prims.reshape(kept, (math.prod(self.kept), c))

    def fits(self, t: TensorProxy) -> bool:
        return tuple(t.shape[:-1]) == self.lead or (t.ndim == 2 and t.shape[0] == math.prod(self.lead))


def hoist_slice(program: Program, leaf: Leaf) -> tuple[TraceCtx, str] | None:
    """The trace with the slice `leaf` moved above the matrix product it depends on, and the name of
    the new product's result; or None.

    None when something between needs the rows that the slice drops, or is not element by element.
    """
    if leaf.bsym.sym.id != PrimIDs.SLICE:
        return None
    (source,), (result,) = leaf.inputs, leaf.outputs
    rank = source.ndim
    _, start, end, *rest = leaf.bsym.args
    step = (rest[0] if rest else None) or [1] * rank
    if rank < 2 or (start[-1], end[-1], step[-1]) != (0, source.shape[-1], 1):
        return None
    cut = _Cut(tuple(source.shape[:-1]), tuple(start[:-1]), tuple(end[:-1]), tuple(step[:-1]))
    new = from_trace(program.trace)
    scope: list[BoundSymbol] = []
    new.push_scope(scope)
    try:
        with tracectx(new):
            moved = langctx(Languages.TORCH)(_push)(program, source, leaf, cut)
    except RuleError:
        return None
    finally:
        del new.scopes[1:]
    swap = {variableify(moved): result}
    scope = [b.from_bsym_swap_proxies(swap) for b in scope]
    origin = leaf.parents[0] if leaf.parents else leaf.bsym
    for b in scope:
        b.source_filename, b.source_positions = origin.source_filename, origin.source_positions
    bound: list[BoundSymbol] = []
    for root in program.roots:
        bound += _replaced(root, leaf.bsym, scope)
    new.bound_symbols = bound
    products = [b for b in scope if b.sym.id in PRODUCTS]
    return (dce(new), products[0].output.name) if len(products) == 1 else None


def _replaced(bsym: BoundSymbol, target: BoundSymbol, scope: list[BoundSymbol]) -> list[BoundSymbol]:
    if bsym is target:
        return scope
    if not bsym.subsymbols or not any(leaf is target for leaf, _ in walk(bsym)):
        return [bsym]
    return [b for sub in bsym.subsymbols if sub.flat_proxy_outs for b in _replaced(sub, target, scope)]


def _push(program: Program, value: TensorProxy, reader: Leaf, cut: _Cut) -> TensorProxy:
    """The kept rows of `value`, computed from the kept rows of what it is made of."""
    producer = program.producer.get(value.name)
    if producer is None or not cut.fits(value):
        raise RuleError("the slice does not reach a matrix product")
    if escapes(program, value.name, {reader.index}):
        raise RuleError(f"{value.name} is needed whole")
    bsym = producer.bsym
    if bsym.sym.id == PrimIDs.LINEAR:
        x, w, bias = bsym.args
        return prims.linear(cut.apply(x), w, bias)
    if bsym.sym.id == PrimIDs.MATMUL and bsym.args[1].ndim == 2 and cut.fits(bsym.args[0]):
        return prims.matmul(cut.apply(bsym.args[0]), bsym.args[1])
    if bsym.sym.id == PrimIDs.RESHAPE:
        inner = _push(program, bsym.args[0], producer, cut)
        shape = (*cut.kept, value.shape[-1]) if tuple(value.shape[:-1]) == cut.lead else (-1, value.shape[-1])
        size = math.prod(cut.kept)
        return prims.reshape(inner, tuple(size if s == -1 else s for s in shape))
    if bsym.sym.id not in pointwise_ids() or bsym.sym.id not in RULES:
        raise RuleError(f"{bsym.sym.name} stands between the slice and the matrix product")
    args = []
    for a in bsym.args:
        if not isinstance(a, TensorProxy) or tuple(a.shape) != tuple(value.shape):
            if isinstance(a, TensorProxy) and a.ndim:
                raise RuleError(f"{bsym.sym.name} combines values of different shapes")
            args.append(a)
            continue
        chain = program.producer.get(a.name)
        args.append(
            _push(program, a, producer, cut) if chain is not None and _amplified(program, chain) else cut.apply(a)
        )
    return bsym.sym(*args, **bsym.kwargs)


def _amplified(program: Program, leaf: Leaf) -> bool:
    """The value comes from a matrix product by operations that act element by element."""
    while leaf.bsym.sym.id not in PRODUCTS:
        if not leaf.inputs:
            return False
        nxt = program.producer.get(leaf.inputs[0].name)
        if nxt is None or not (leaf.bsym.sym.id in pointwise_ids() or leaf.bsym.sym.id == PrimIDs.RESHAPE):
            return False
        leaf = nxt
    return True
