"""Move a row selection from the logits to the head's input.

``F.linear(x, w)[..., :-1, :]`` shifts a sequence, as in the training of language models. The slice would cut across
chunks. But it selects rows, so it can also select them before the product: ``F.linear(x[..., :-1, :], w)``. Operations
between run on the selected rows alone. The rules of `sharding` say how: dims that are split together are selected
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce

from thunder_mem.loop_body.leaves import PRODUCTS, Leaf, Program, is_cut, numel, rewritten
from thunder_mem.loop_body.region import Region, amplifying_products, arguments, escapes, relation
from thunder_mem.semantics.effects import effects_of
from thunder_mem.sharding.propagation import RuleError
from thunder_mem.sharding.row_cuts import Cut, apply_cut, cut_of, kept_shape, operand_cuts, through_reshape
from thunder_mem.trace.rebuilding import recorded

__all__ = ["Hoisted", "hoist_beside", "hoist_rows"]

_PICKERS = frozenset({PrimIDs.SLICE, PrimIDs.TAKE})
_MOST_PARTS = 8
"""Logits that are split into more parts stay whole: many small products take longer than one."""


@dataclass(frozen=True)
class Hoisted:
    """A trace that selects rows before a product.

    Attributes:
        trace: the new trace.
        products: names of the results of the products that replace it; the requested rows come first.
        picked: names of the values whose rows are now selected before a product, as before.
    """

    trace: TraceCtx
    products: tuple[str, ...]
    picked: frozenset[str]


def hoist_rows(program: Program, picker: Leaf, amplifier: Leaf, rows: int) -> Hoisted | None:
    """The trace that selects rows of the product `amplifier` before it; None if that is impossible.

    It is impossible if an operation needs the other rows, mixes rows, or writes into memory in between. If other
    operations select other rows of the same logits (`split`, `unbind`), each gets a product of its own.

    Args:
        program: the flattened trace.
        picker: the leaf that selects rows of a value computed from the product: a slice, or rows by an index.
        amplifier: the product.
        rows: the number of the operand that carries rows.
    """
    if picker.bsym.sym.id not in _PICKERS:
        return None
    new = from_trace(program.trace)
    try:
        moves = _moves(program, picker, amplifier, rows, new)
    except RuleError:
        return None
    scopes = {id(m.picker.bsym): m.scope for m in moves}
    wanted = {a.name for m in moves for b in m.scope for a in b.flat_proxy_args}
    new.bound_symbols = rewritten(program.roots, scopes, wanted)
    picked = frozenset(o.name for m in moves for o in m.picker.outputs)
    return Hoisted(dce(new), tuple(m.product for m in moves if m.product), picked)


def hoist_beside(region: Region) -> Hoisted | None:
    """The trace that selects rows of another head's logits, which the region only reads, before their product.

    An example is a teacher's logits, shifted like the student's. None if there are none.
    """
    program = region.program
    wide = region.n * region.width // 8
    for value in region.inputs:
        picker = program.producer.get(value.proxy.name)
        if picker is None or picker.bsym.sym.id not in _PICKERS or numel(value.proxy) < wide:
            continue
        for product, rows in amplifying_products(program):
            if product.index in region.inside or picker.inputs[0].name not in _derived(program, product):
                continue
            if (moved := hoist_rows(program, picker, product, rows)) is not None:
                return moved
    return None


@dataclass(frozen=True)
class _Move:
    """A row selection that moves before the product.

    Attributes:
        picker: its leaf.
        scope: the operations that replace it.
        product: name of the new product's result; "" if the same rows exist already.
        passed: indices of the leaves that are computed from the selected rows alone.
        share: the share of selected rows among all rows.
    """

    picker: Leaf
    scope: list[BoundSymbol]
    product: str = ""
    passed: frozenset[int] = frozenset()
    share: float = 0.0


def _moves(program: Program, picker: Leaf, amplifier: Leaf, rows: int, new: TraceCtx) -> list[_Move]:
    """The moves of `picker` and of all other selections from the same logits.

    Raises:
        RuleError: see `hoist_rows`.
    """
    derived = _derived(program, amplifier)
    moves = [_move(program, picker, amplifier, rows, derived, new)]
    while (other := _needs_more(program, moves, derived)) is not None:
        if other.bsym.sym.id not in _PICKERS or len(moves) == _MOST_PARTS:
            raise RuleError(f"{other.name} needs the rows that are not picked")
        twin = next((m.picker for m in moves if m.product and _pick_alike(m.picker, other)), None)
        if twin is None:
            moves.append(_move(program, other, amplifier, rows, derived, new))
        elif twin.index < other.index:
            moves.append(_Move(other, [prims.shallow_copy.bind(twin.outputs[0], output=other.outputs[0])]))
        else:
            raise RuleError(f"{other.name} needs the rows before they are picked")
    if sum(m.share for m in moves) > 1 + 1e-9:
        raise RuleError("its rows are picked more than once")
    return moves


def _derived(program: Program, amplifier: Leaf) -> frozenset[str]:
    """Names of the values computed from the product."""
    names = {o.name for o in amplifier.outputs}
    for leaf in program.leaves[amplifier.index + 1 :]:
        if any(t.name in names for t in leaf.inputs):
            names.update(o.name for o in leaf.outputs)
    return frozenset(names)


def _needs_more(program: Program, moves: list[_Move], derived: frozenset[str]) -> Leaf | None:
    """The first leaf that reads a whole value which the moves compute from selected rows alone.

    Raises:
        RuleError: the trace returns such a value.
    """
    passed = frozenset().union(*(m.passed for m in moves))
    known = passed | {m.picker.index for m in moves}
    readers = []
    for out in (out for i in passed for out in program.leaves[i].outputs if out.name in derived):
        if out.name in program.returned:
            raise RuleError(f"{out.name} is returned whole")
        readers += [r for r in program.consumers.get(out.name, ()) if r.index not in known]
    return min(readers, key=lambda r: r.index, default=None)


def _pick_alike(one: Leaf, other: Leaf) -> bool:
    return one.inputs[0].name == other.inputs[0].name and cut_of(one.bsym) == cut_of(other.bsym)


def _move(program: Program, picker: Leaf, amplifier: Leaf, rows: int, derived: frozenset[str], new: TraceCtx) -> _Move:
    """One move of all dims; if some cannot move (a part of the vocabulary), of the others.

    Raises:
        RuleError: none can.
    """
    whole = cut_of(picker.bsym)

    def write(cut: Cut) -> _Move:
        return _Writer(program, amplifier, rows, derived, new).move(picker, cut, whole)

    try:
        return write(whole)
    except RuleError:
        if len(whole) < 2:
            raise
    movable = []
    for block in whole:
        with suppress(RuleError):
            write((block,))
            movable.append(block)
    return write(tuple(movable))


class _Writer:
    """Writes a cut of a derived value, computed from the selected rows of the product's operand."""

    def __init__(self, program: Program, amplifier: Leaf, rows: int, derived: frozenset[str], new: TraceCtx) -> None:
        self.program, self.amplifier, self.rows, self.derived, self.new = program, amplifier, rows, derived, new
        self.scope: list[BoundSymbol] = []
        self.placed = 0
        self.made: dict[tuple[str, Cut], TensorProxy] = {}
        self.passed: set[int] = set()
        self.product = ""

    def move(self, picker: Leaf, cut: Cut, whole: Cut) -> _Move:
        """The move of the blocks `cut` out of the whole selection `whole` of `picker`.

        Raises:
            RuleError: see `hoist_rows`.
        """
        source, (result,) = picker.inputs[0], picker.outputs
        share = math.prod(kept_shape(source.shape, cut)) / numel(source)
        if not cut or not 0 < share <= 1:
            raise RuleError("it picks no rows, or more than there are")
        with recorded(self.new) as self.scope, langctx(Languages.TORCH):
            moved = self._of(source, cut, picker)
            moved = apply_cut(moved, tuple(b for b in whole if b not in cut))
            if ProxyTag.DETACHED_AUTOGRAD_GRAPH in moved.tags:
                moved = prims.shallow_copy(moved)  # the picker's own result bears no such mark
            self._place(picker)
        if not self.product:
            raise RuleError("its operand does not depend on the product")
        self._check_writes(picker)
        scope = [b.from_bsym_swap_proxies({variableify(moved): result}) for b in self.scope]
        product = result.name if moved.name == self.product else self.product
        return _Move(picker, scope, product, frozenset(self.passed), share)

    def _of(self, t: TensorProxy, cut: Cut, reader: Leaf) -> TensorProxy:
        """The remaining part of `t`: computed from the remaining parts of its arguments, or selected from `t`."""
        if (t.name, cut) not in self.made:
            producer = self.program.producer.get(t.name)
            if t.name in self.derived:
                assert producer is not None
                self.made[t.name, cut] = self._computed(producer, cut)
            elif producer is None or not self._comes_along(producer, reader):
                self.made[t.name, cut] = apply_cut(t, cut)
            else:
                try:
                    self.made[t.name, cut] = self._computed(producer, cut)
                except RuleError:
                    self.made[t.name, cut] = apply_cut(t, cut)
        return self.made[t.name, cut]

    def _comes_along(self, producer: Leaf, reader: Leaf) -> bool:
        """Whether a value beside the logits moves along: as large and read by nobody else, or just another view."""
        out = producer.outputs[0]
        if numel(out) * 8 < numel(self.amplifier.outputs[0]):
            return False
        return producer.bsym.sym.id == PrimIDs.BROADCAST_IN_DIM or not escapes(self.program, out.name, {reader.index})

    def _computed(self, leaf: Leaf, cut: Cut) -> TensorProxy:
        """The remaining part of the leaf's result, computed anew."""
        if len(leaf.outputs) != 1:
            raise RuleError(f"{leaf.name} has several results")
        bsym, (out,), rule = leaf.bsym, leaf.outputs, relation(leaf)
        shape = kept_shape(out.shape, cut)
        if rule.reshapes:
            cuts = {0: through_reshape(leaf.inputs[0].shape, out.shape, cut)}
        else:
            spreads = bsym.sym.id == PrimIDs.BROADCAST_IN_DIM or not leaf.inputs
            cuts = operand_cuts(rule, out, cut, spreads)
        self._check_product(leaf, cuts)

        def left(slot: int, t: TensorProxy) -> TensorProxy:
            return self._of(t, cuts[slot], leaf) if cuts.get(slot) else t

        args, kwargs = arguments(leaf, left, [shape])
        result = bsym.sym(*args, **kwargs)
        if (tuple(result.shape), result.dtype) != (shape, out.dtype):
            raise RuleError(f"{leaf.name} gives another shape or dtype of some rows")
        if is_cut(leaf):
            result.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        self._place(leaf)
        self.passed.add(leaf.index)
        if leaf is self.amplifier:
            self.product = result.name
        return result

    def _check_product(self, leaf: Leaf, cuts: Mapping[int, Cut]) -> None:
        """Check that rows are selected from the operand that has them; the other one, the weight, stays whole."""
        if leaf.bsym.sym.id not in PRODUCTS:
            return
        if len(cuts) != 1 or (leaf is self.amplifier and self.rows not in cuts):
            raise RuleError("it picks of the product's columns")

    def _check_writes(self, picker: Leaf) -> None:
        """Check that memory is unchanged for operations that run later than in the program."""
        for leaf in self.program.leaves[min(self.passed) : picker.index]:
            effects = effects_of(leaf.bsym)
            stays = leaf.outputs or has_tags(leaf.bsym, {OpTags.DONT_DCE})  # `ltorch.dim` has neither
            if effects.writes or (effects.barrier and stays):
                raise RuleError(f"{leaf.name} stands between and may overwrite operands of the product")

    def _place(self, leaf: Leaf) -> None:
        """Let the operations written since the last call replace `leaf`, with its source line and marks."""
        origin = leaf.parents[0] if leaf.parents else leaf.bsym
        for bsym in self.scope[self.placed :]:
            bsym.source_filename, bsym.source_positions = origin.source_filename, origin.source_positions
            bsym.tags |= leaf.bsym.tags
        self.placed = len(self.scope)
