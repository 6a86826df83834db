"""A loss over a vocabulary that is split over ranks, without gathering its logits.

Thunder's `column_parallel` gathers all N times V logits of a head on every rank. Here the rules of `sharding` say how a
split along the vocabulary passes through each operation behind the head. Operations on single logits work on a rank's
own part. A sum or a log-sum-exp over the vocabulary runs over the rank's part, and then over ranks
(`sharding/rank_reductions.py`). A target's logit comes from the rank that has it. So ranks exchange a few numbers a
row. An operation that needs the whole vocabulary has the logits gathered there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.distributed import prims as distributed_prims
from torch import distributed
from torch.distributed import ProcessGroup

from thunder_mem.loop_body.leaves import Leaf, Program, is_cut, read_program, walk
from thunder_mem.loop_body.region import arguments, relation
from thunder_mem.sharding.op_rules import pointwise_ids
from thunder_mem.sharding.propagation import RowDim, RuleError, Sharding, propagate
from thunder_mem.sharding.rank_reductions import GATHERS_LAST_DIM, log_sum_over_ranks, of_all_ranks, sum_over_ranks

__all__ = ["with_vocabulary_in_parts"]

_MADE_LOCALLY = pointwise_ids() | {PrimIDs.BROADCAST_IN_DIM, PrimIDs.FULL, PrimIDs.RESHAPE}


def with_vocabulary_in_parts(trace: TraceCtx) -> TraceCtx:
    """The computation trace (before autograd) with its logits in parts, as far as rules exist.

    The same object if no head's logits are gathered, or if parts save nothing.
    """
    program = read_program(trace)
    if not any(map(_gathers_logits, program.leaves)):
        return trace
    new = from_trace(trace)
    with tracectx(new):
        rewriting = _Rewriting(program, new)
        for root in program.roots:
            rewriting.take(root)
    if not rewriting.combined:
        return trace
    new.set_provenance(TraceProvenance("Logits in parts over ranks"))
    return dce(new)


def _gathers_logits(leaf: Leaf) -> bool:
    return leaf.bsym.sym.id is distributed_prims.PrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT and (
        leaf.bsym.args[2] is GATHERS_LAST_DIM
    )


@dataclass(frozen=True)
class _Part:
    """This rank's part of a value that is split along the vocabulary."""

    local: TensorProxy
    sharding: Sharding
    group: ProcessGroup
    size: int  # of the vocabulary

    @property
    def dim(self) -> int:
        return next(d for d, row in enumerate(self.sharding.dims) if row is not None)


class _Rewriting:
    """The trace while it is rewritten; `combined` counts values that are summed over ranks instead of gathered."""

    def __init__(self, program: Program, new: TraceCtx) -> None:
        self.program, self.new = program, new
        self.leaves = {id(leaf.bsym): leaf for leaf in program.leaves}
        self.parts: dict[str, _Part] = {}
        self.instead: dict = {}  # of a value's variable, the value that replaces it
        self.gathers: dict[str, BoundSymbol] = {}  # gather a head's logits for users of the whole
        self.whole: set[str] = set()  # the parts that also exist whole
        self.shared: dict[str, TensorProxy] = {}
        self.combined = 0

    def take(self, root: BoundSymbol) -> None:
        inner = [bsym for bsym, _ in walk(root)]
        concerned = any(self._concerned(bsym) for bsym in inner)
        for bsym in inner if concerned else [root]:
            if bsym is not root and bsym.source_filename is None:
                bsym.source_filename, bsym.source_positions = root.source_filename, root.source_positions
            self._take(bsym)

    def _concerned(self, bsym: BoundSymbol) -> bool:
        leaf = self.leaves.get(id(bsym))
        return any(p.name in self.parts for p in bsym.flat_proxy_args) or (leaf is not None and _gathers_logits(leaf))

    def _take(self, bsym: BoundSymbol) -> None:
        leaf = self.leaves.get(id(bsym))
        if leaf is not None and _gathers_logits(leaf):
            (out,), group = leaf.outputs, bsym.args[1]
            dims = (*(None for _ in out.shape[:-1]), RowDim(out.shape[-1], 1))
            local = self._now(leaf.inputs[0])
            self.parts[out.name] = _Part(local, Sharding(dims), group, out.shape[-1])
            self.gathers[out.name] = bsym
            return
        if leaf is not None and any(t.name in self.parts for t in leaf.inputs):
            depth, written = len(self.new.scopes), len(self.new.bound_symbols)
            try:
                with langctx(Languages.TORCH):
                    self._pass(leaf)
                return
            except RuleError:
                del self.new.scopes[depth:], self.new.bound_symbols[written:]
        for p in bsym.flat_proxy_args:
            self._gather(p.name)
        self.new.bound_symbols.append(bsym.from_bsym_swap_proxies(self.instead))

    def _now(self, t: TensorProxy) -> TensorProxy:
        return self.instead.get(variableify(t), t)

    def _gather(self, name: str) -> None:
        """Make a value whole for an operation that needs it whole."""
        if name not in self.parts or name in self.whole:
            return
        self.whole.add(name)
        if name in self.gathers:
            self.new.bound_symbols.append(self.gathers[name].from_bsym_swap_proxies(self.instead))
            return
        producer = self.program.producer[name]
        for t in producer.inputs:
            self._gather(t.name)
        self.new.bound_symbols.append(producer.bsym.from_bsym_swap_proxies(self.instead))

    # --- what passes -------------------------------------------------------------------------------

    def _pass(self, leaf: Leaf) -> None:
        parts = [self.parts[t.name] for t in leaf.inputs if t.name in self.parts]
        part = parts[0]
        if len({(id(p.group), p.size) for p in parts}) > 1:
            raise RuleError("it takes parts of two vocabularies")
        special = _SPECIAL.get(leaf.bsym.sym.id)
        if special is not None and (found := special(self, leaf)) is not None:
            self._replace(leaf, found)
            return
        known = {i: self.parts[t.name].sharding for i, t in enumerate(leaf.inputs) if t.name in self.parts}
        shardings = self._shardings(leaf, known, part.size)
        (out,), sharding = leaf.outputs, shardings[-1]
        if not sharding.split and sharding.partial != "sum":
            raise RuleError("its parts do not combine")
        result = self._call(leaf, shardings, part)
        if sharding.split:
            _mark(result, leaf)
            self.parts[out.name] = _Part(result, sharding, part.group, part.size)
        else:
            self._replace(leaf, sum_over_ranks(result, part.group))

    def _replace(self, leaf: Leaf, found: TensorProxy) -> None:
        _mark(found, leaf)
        self.combined += 1
        self.instead[variableify(leaf.outputs[0])] = found

    def _shardings(self, leaf: Leaf, known: Mapping[int, Sharding], size: int) -> dict[int, Sharding]:
        shapes = [tuple(t.shape) for t in leaf.inputs], [tuple(t.shape) for t in leaf.outputs]
        if len(leaf.outputs) != 1:
            raise RuleError("it has several results")
        return propagate(relation(leaf), *shapes, known, size)

    def _call(self, leaf: Leaf, shardings: Mapping[int, Sharding], part: _Part) -> TensorProxy:
        shape = _local_shape(leaf.outputs[0], shardings[-1], part.group)
        args, kwargs = arguments(leaf, lambda slot, t: self._operand(t, shardings[slot], part), [shape])
        return leaf.bsym.sym(*args, **kwargs)

    def _operand(self, t: TensorProxy, sharding: Sharding, part: _Part) -> TensorProxy:
        """A rank's part of an operand, or the operand itself if it is the same on every rank."""
        if t.name in self.parts:
            return self.parts[t.name].local
        if not sharding.split:
            return self._of_all(t, part.group)
        producer = self.program.producer.get(t.name)
        if producer is not None and producer.bsym.sym.id in _MADE_LOCALLY and not is_cut(producer):
            try:
                return self._call(producer, self._shardings(producer, {-1: sharding}, part.size), part)
            except RuleError:
                pass
        first, end = _span(part)
        dim = next(d for d, row in enumerate(sharding.dims) if row is not None)
        starts = [first if d == dim else 0 for d in range(t.ndim)]
        ends = [end if d == dim else s for d, s in enumerate(t.shape)]
        return prims.slice_prim(self._of_all(t, part.group), starts, ends)

    def _of_all(self, t: TensorProxy, group: ProcessGroup) -> TensorProxy:
        if t.name not in self.program.needs_grad:
            return self._now(t)
        if t.name not in self.shared:
            self.shared[t.name] = of_all_ranks(self._now(t), group)
        return self.shared[t.name]

    # --- what is not linear in the parts -----------------------------------------------------------

    def log_sum_exp(self, leaf: Leaf) -> TensorProxy | None:
        a, dim, *rest = leaf.bsym.args
        part = self.parts[a.name]
        dims = {d % a.ndim for d in (dim if isinstance(dim, list | tuple) else (dim,))}
        if part.dim not in dims:
            return None
        return log_sum_over_ranks(ltorch.logsumexp(part.local, dim, *rest, **leaf.bsym.kwargs), part.group)

    def take_along_axis(self, leaf: Leaf) -> TensorProxy | None:
        a, index, dim = leaf.bsym.args
        part = self.parts.get(a.name)
        if part is None or index.name in self.parts or part.dim != dim % a.ndim:
            return None
        first, end = _span(part)
        own = ltorch.sub(self._now(index), first)
        here = ltorch.bitwise_and(ltorch.ge(own, 0), ltorch.lt(own, end - first))
        picked = leaf.bsym.sym(part.local, ltorch.where(here, own, 0), dim)
        return sum_over_ranks(ltorch.where(here, picked, 0.0), part.group)


_SPECIAL = {
    "torch.logsumexp": _Rewriting.log_sum_exp,
    PrimIDs.TAKE_ALONG_AXIS: _Rewriting.take_along_axis,
    PrimIDs.GATHER: _Rewriting.take_along_axis,
}


def _span(part: _Part) -> tuple[int, int]:
    """The begin and end of this rank's part of the vocabulary."""
    count = part.size // part.group.size()
    first = distributed.get_rank(part.group) * count
    return first, first + count


def _local_shape(t: TensorProxy, sharding: Sharding, group: ProcessGroup) -> tuple[int, ...]:
    return tuple(s if row is None else s // group.size() for s, row in zip(t.shape, sharding.dims, strict=True))


def _mark(t: TensorProxy, leaf: Leaf) -> None:
    if is_cut(leaf):
        t.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
