"""Keep arguments apart that lie in one storage and are not the same.

In a program that writes in place, Thunder 0.2.6 puts the first of the arguments that share a storage in the place of
the others, and asks neither where they lie in it nor which have a gradient. So a program of two halves of a tensor
silently computes with one of them, and writes both results there. A program that also gets `y.detach()`, as of
ThunderFX's splits, loses the gradients of `y`. Thunder counts the arguments of the call, and numbers those that the
program reads: after an argument that is not read, it replaces another tensor.

Here only arguments that are one view of the memory count as one, and only where the program writes to that memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import thunder
import torch
from thunder.core.compile_data import _compile_data
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.update_aliases import insert_alias_updates

from thunder_mem.functionalization.call_tensors import tensors_of_call, with_checked_fact
from thunder_mem.runtime.memory_spans import extent
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.origins import source_of

__all__ = ["with_arguments_apart"]

_THUNDERS = "Update aliases for in-place ops"
_WARNING = "the write at {line} is to an argument that shares memory with another one, {why}. {how}"
_IN_PART = "which shows another part of it", "Results can be wrong, with MemEfficient and without. Pass a copy"
_DETACHED = (
    "and only one of them has a gradient",
    "Its gradients can be lost, with MemEfficient and without. Pass a copy",
)


def with_arguments_apart(prologue: TraceCtx, computation: TraceCtx) -> tuple[TraceCtx, TraceCtx]:
    """The prologue and the computation, in which arguments are one only if they are; a warning names what is missed.

    Args:
        prologue, computation: as Thunder passes them to a transform.
    """
    before = _before_thunders_aliases(computation)
    tensors = tensors_of_call(prologue) if before is not None else {}
    if before is None or not tensors:
        return prologue, computation
    arguments = list(tree_flatten((computation.args, computation.kwargs))[0])
    given = {p.name: tensors[p.name] for p in arguments if isinstance(p, TensorProxy) and p.name in tensors}
    groups = []
    for views in _sharing(given):
        writes = {view[0]: write for view in views if (write := _first_write(view, before)) is not None}
        if writes:
            names = [name for view in views for name in view]
            prologue = with_checked_fact(prologue, names, places, places([given[n] for n in names]))
            groups += [[i for i, p in enumerate(arguments) if p.name in view] for view in views if view[0] in writes]
            _warn_of_what_is_missed(views, given, writes)
    return prologue, insert_alias_updates(before, [group for group in groups if len(group) > 1])


def _before_thunders_aliases(computation: TraceCtx) -> TraceCtx | None:
    """The trace before Thunder replaced arguments that share memory; None if it has replaced none."""
    if not thunder._get_cache_info().get("alias_tensor_indices"):
        return None
    _, stats = _compile_data.get()
    traces: list[TraceCtx] = list(stats.last_traces)
    replaced = traces[-1] is computation and _THUNDERS in str(computation.get_provenance())
    return traces[-2] if replaced else None


def _sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[list[str]]]:
    """The names of tensors for each storage of several, those of one view of it together."""
    found: dict[int, dict[tuple[Any, ...], list[str]]] = {}
    for name, t in tensors.items():
        if type(t) is torch.Tensor:  # as Thunder counts; a subclass may have no address
            views = found.setdefault(t.untyped_storage().data_ptr(), {})
            views.setdefault(_view_of(t), []).append(name)
    return [list(views.values()) for views in found.values() if sum(map(len, views.values())) > 1]


def _first_write(names: Collection[str], trace: TraceCtx) -> BoundSymbol | None:
    """The first operation that writes to arguments of these names, or to what may share memory with one."""
    memory = Aliases(trace.bound_symbols)
    here = {memory(name) for name in names}
    writes = ((bsym, leaf) for bsym in trace.bound_symbols for leaf in leaves(bsym) if is_copy(leaf))
    return next((bsym for bsym, leaf in writes if memory(leaf.args[1].name) in here), None)


def _view_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def places(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """How the tensors of one storage lie to each other: for each pair 0 if they are one view, 1 if they lie apart,
    else the distance in bytes with both views."""
    return [_relation(a, b) for i, a in enumerate(tensors) for b in tensors[i + 1 :]]


def _relation(a: torch.Tensor, b: torch.Tensor) -> Any:
    if _view_of(a) == _view_of(b):
        return 0
    if a.data_ptr() + _span_bytes(a) <= b.data_ptr() or b.data_ptr() + _span_bytes(b) <= a.data_ptr():
        return 1
    return b.data_ptr() - a.data_ptr(), _view_of(a)[1:], _view_of(b)[1:]


def _span_bytes(t: torch.Tensor) -> int:
    return extent(t.shape, t.stride()) * t.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two different views show an element of each other; columns of one matrix do not."""
    if not isinstance(_relation(a, b), tuple):
        return False
    if a.dtype != b.dtype:
        return True
    start = min(a.data_ptr(), b.data_ptr())
    offsets = [(t.data_ptr() - start) // t.element_size() for t in (a, b)]
    length = max(o + extent(t.shape, t.stride()) for o, t in zip(offsets, (a, b), strict=True))
    seen = torch.zeros(length, dtype=torch.bool)
    seen.as_strided(a.shape, a.stride(), offsets[0]).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), offsets[1]).any())


def _warn_of_what_is_missed(
    views: Sequence[Sequence[str]], tensors: Mapping[str, torch.Tensor], writes: Mapping[str, BoundSymbol]
) -> None:
    for i, view in enumerate(views):
        a = tensors[view[0]]
        if view[0] in writes and len({tensors[name].requires_grad for name in view}) > 1:
            _warn(writes[view[0]], *_DETACHED)
        for other in views[i + 1 :]:
            write = writes.get(view[0]) or writes.get(other[0])
            if write is not None and _overlap(a, tensors[other[0]]):
                _warn(write, *_IN_PART)


def _warn(write: BoundSymbol, why: str, how: str) -> None:
    warnings.warn(_WARNING.format(line=source_of(write) or write.sym.name, why=why, how=how), stacklevel=3)
