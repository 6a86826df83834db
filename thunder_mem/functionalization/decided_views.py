"""Decide as eager does whether `reshape`, `flatten`, `contiguous` and `to` made a copy, where the result is written.

Their results share memory for some strides, and Thunder takes them for views always. A write to a copy then counts as
a write to what was copied: the gradients of an argument are lost (`z = x.t().contiguous(); z.mul_(2)`), or those of
the base of a true view. Here each becomes what it is at the call's strides:

- a copy gets memory of its own,
- what is the operand itself becomes a shallow copy, which is a view in all later passes,
- a true view is tagged, so that functionalization takes it for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

from thunder_mem.functionalization.call_tensors import tensors_of_call, with_checked_fact
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy, leaves, with_subsymbols
from thunder_mem.semantics.layout import Layout
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["SURE_VIEW", "with_decided_views"]

BoundSymbolTag.register_tag("SURE_VIEW")
SURE_VIEW = BoundSymbolTag.SURE_VIEW
"""Of a `reshape` or `flatten` that shares its operand's memory at the call's strides."""

_UNSURE = frozenset({"reshape", "reshape_as", "flatten", "contiguous", "to", "type_as"})
_CASTS = frozenset({"double", "float", "half", "bfloat16"})  # without parts in a trace


def with_decided_views(prologue: TraceCtx, computation: TraceCtx) -> tuple[TraceCtx, TraceCtx]:
    """The prologue and the computation, in which written results of such operations are copies or views for sure.

    Nothing changes in programs without gradients, or where the strides of the call are unknown.

    Args:
        prologue, computation: as Thunder passes them to a transform.
    """
    arguments = _tensors((computation.args, computation.kwargs))
    writes = any(is_copy(leaf) for bsym in computation.bound_symbols for leaf in leaves(bsym))
    if not writes or not any(p.requires_grad for p in arguments):
        return prologue, computation
    unsure = _unsure(computation)
    given = tensors_of_call(prologue) if unsure else {}
    asked = _arguments_of(unsure, computation, [p.name for p in arguments])
    if unsure and given.keys() >= set(asked):
        layout = Layout.of({p.name: _meta(p, given[p.name]) for p in arguments if p.name in given})
        prologue = with_checked_fact(prologue, asked, strides, strides([given[name] for name in asked]))
        computation = _all_decided(computation, unsure, layout)
    return prologue, _without_idle_aliases(computation)


def _tensors(tree: object) -> list[TensorProxy]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, TensorProxy)]


def strides(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """The strides of each tensor."""
    return [t.stride() for t in tensors]


def _meta(p: TensorProxy, given: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(map(int, p.shape)), given.stride(), dtype=to_torch_dtype(p.dtype), device="meta")


def _written_memory(trace: TraceCtx, memory: Aliases) -> set[str]:
    return {memory(leaf.args[1].name) for bsym in trace.bound_symbols for leaf in leaves(bsym) if is_copy(leaf)}


def _unsure(trace: TraceCtx) -> set[str]:
    """The results that may share an operand's memory, depending on strides, if anything writes to the memory."""
    memory = Aliases(trace.bound_symbols)
    written = _written_memory(trace, memory)
    inner = (b for bsym in trace.bound_symbols for b in with_subsymbols(bsym) if b.sym.name in _UNSURE | _CASTS)
    return {
        b.output.name
        for b in inner
        if isinstance(b.output, TensorProxy)
        and b.output.name not in (p.name for p in b.flat_proxy_args)
        and memory(b.output.name) in written
        and memory(b.output.name) == memory(b.flat_proxy_args[0].name)
    }


def _arguments_of(names: Collection[str], trace: TraceCtx, arguments: Sequence[str]) -> list[str]:
    """The arguments from which values are computed, in their order."""
    needed = set(names)
    for bsym in reversed(trace.bound_symbols):
        made = {p.name for b in with_subsymbols(bsym) for p in b.flat_proxy_outs}
        if not needed.isdisjoint(made):
            needed |= {p.name for p in bsym.flat_proxy_args}
    return [name for name in arguments if name in needed]


def _all_decided(trace: TraceCtx, unsure: Collection[str], layout: Layout) -> TraceCtx:
    def decided() -> Iterator[BoundSymbol]:
        for bsym in trace.bound_symbols:
            yield from _decided(bsym, unsure, layout)

    return rebuilt(trace, decided, "Results that may be views are views or copies for sure")


def _decided(bsym: BoundSymbol, unsure: Collection[str], layout: Layout) -> Sequence[BoundSymbol]:
    if isinstance(bsym.output, TensorProxy) and bsym.output.name in unsure and bsym.sym.name in _UNSURE | _CASTS:
        return _one_decided(bsym, layout)
    parts: Sequence[BoundSymbol] = bsym.subsymbols
    if any(p.name in unsure for part in bsym.subsymbols for b in with_subsymbols(part) for p in b.flat_proxy_outs):
        parts = [new for part in bsym.subsymbols for new in _decided(part, unsure, layout)]
    layout.run(bsym)
    return [bsym if parts is bsym.subsymbols else bsym.from_bsym(subsymbols=tuple(parts))]


def _one_decided(bsym: BoundSymbol, layout: Layout) -> Sequence[BoundSymbol]:
    """The operation as a view or a copy; its result stays known under the same name."""
    given, made = bsym.flat_proxy_args[0], bsym.output
    if bsym.sym.name not in _CASTS:
        layout.run(bsym)
    elif given.dtype == made.dtype:
        layout.run(prims.shallow_copy.bind(given, output=made))
    else:
        layout.run(prims.convert_element_type.bind(given, made.dtype, output=made))
    if layout.storage_key(given.name) != layout.storage_key(made.name):
        shown = TensorProxy(like=made, requires_grad=made.requires_grad)
        return [
            bsym.from_bsym_swap_proxies({variableify(made): shown}),
            prims.clone.bind(shown, output=made).from_bsym(tags=bsym.tags.copy()),
        ]
    before, after = layout[given.name], layout[made.name]
    if before.shape == after.shape and before.stride() == after.stride():
        return [prims.shallow_copy.bind(given, output=made).from_bsym(tags=bsym.tags.copy())]
    return [bsym.from_bsym(tags=bsym.tags | {SURE_VIEW})]


def _without_idle_aliases(trace: TraceCtx) -> TraceCtx:
    """The trace in which no value gets a new name at a write that is none to its memory.

    Thunder would differentiate the last name of an argument, and lose what the program computes from earlier ones.
    """
    memory = Aliases(trace.bound_symbols)
    written = _written_memory(trace, memory)
    renewed = (p for b in trace.bound_symbols if b.sym.id is PrimIDs.UPDATE_ALIASES for p in b.flat_proxy_outs)
    if all(memory(p.name) in written for p in renewed):
        return trace

    def renamed() -> Iterator[BoundSymbol]:
        swap: dict = {}
        for bsym in trace.bound_symbols:
            now = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
            if bsym.sym.id is not PrimIDs.UPDATE_ALIASES:
                yield now
                continue
            pairs = list(zip(now.flat_proxy_args, bsym.flat_proxy_outs, strict=True))
            swap.update((variableify(new), old) for old, new in pairs if memory(new.name) not in written)
            rest = [(old, new) for old, new in pairs if memory(new.name) in written]
            if rest:
                olds, news = (tuple(side) for side in zip(*rest, strict=True))
                yield prims.update_aliases.bind(olds, output=news).from_bsym(tags=bsym.tags.copy())

    return rebuilt(trace, renamed)
