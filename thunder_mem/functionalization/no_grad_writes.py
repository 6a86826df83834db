"""Gradients bypass a write under `torch.no_grad`, to the value before it, as in eager.

Thunder's autograd stops at such a write (0.2.6): `z = x.sin()`, then `z.mul_(2)` under `no_grad`, and nothing of what
is computed from `z` has a gradient, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["past_no_grad", "with_values_past_no_grad"]


def past_no_grad(trace: TraceCtx, is_bypassed: Callable[[BoundSymbol], bool], *, keep_write: bool = False) -> TraceCtx:
    """The trace in which gradients bypass some writes, to what was there before.

    Nothing uses the written name afterwards. Thunder runs such a write only if it is an operation of the trace, not a
    part of one. So an operation with a write inside is replaced by its parts.

    Args:
        trace: before autograd.
        is_bypassed: whether gradients bypass a `copy_`.
        keep_write: whether what is read afterwards needs the write, so that Thunder runs it in the forward.
    """

    def bypassing() -> Iterator[BoundSymbol]:
        swap: dict[Any, TensorProxy] = {}
        for bsym in chain.from_iterable(_taken_apart(b, is_bypassed) for b in trace.bound_symbols):
            swapped = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
            yield swapped
            if is_bypassed(bsym):
                olds = (swapped.args[1], bsym.output) if keep_write else (swapped.args[1],)
                news = tuple(TensorProxy(like=bsym.output, requires_grad=True) for _ in olds)
                yield prims.update_aliases.bind(olds, output=news)
                swap[variableify(bsym.output)] = news[0]

    return rebuilt(trace, bypassing)


def _taken_apart(bsym: BoundSymbol, wanted: Callable[[BoundSymbol], bool]) -> Iterator[BoundSymbol]:
    """The bound symbol, or its parts if any of its leaves is wanted, so that this leaf is one of them."""
    if bsym.subsymbols and any(map(wanted, leaves(bsym))):
        for part in bsym.subsymbols:
            yield from _taken_apart(part, wanted)
    else:
        yield bsym


def with_values_past_no_grad(trace: TraceCtx) -> TraceCtx:
    """The trace in which gradients bypass writes to what the program itself computes."""
    arguments = [x for x in tree_flatten((trace.args, trace.kwargs))[0] if isinstance(x, TensorProxy)]
    if not any(p.requires_grad for p in arguments):
        return trace
    memory = Aliases(trace.bound_symbols)
    given = {memory(p.name) for p in arguments}
    # The write is the last part of an operation in place. Others, such as a batch norm, stay whole.
    copies = {
        leaf.output.name
        for bsym in trace.bound_symbols
        for leaf in (bsym, *bsym.subsymbols[-1:])
        if is_copy(leaf) and not leaf.kwargs["grad_enabled"] and memory(leaf.args[1].name) not in given
        if dtypes.is_inexact_dtype(leaf.output.dtype)
    }
    if not copies:
        return trace
    return past_no_grad(trace, lambda leaf: is_copy(leaf) and leaf.output.name in copies, keep_write=True)
