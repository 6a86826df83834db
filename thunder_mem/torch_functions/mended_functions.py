"""Functions that Thunder 0.2.6 gets wrong, or passes to PyTorch whole, written out in others.

Thunder gets these wrong:

- `cross_entropy` with smoothed labels and ``reduction="mean"``: the uniform part of the loss also adds up rows of
  ignored targets, silently.
- `nll_loss` with the default ``ignore_index``, or another reduction than "mean": differentiating it fails.
- both, of class indices beside logits with 3 or more than 4 dims: differentiating them fails.
- `hstack`, `vstack` and their like: the tensors in a sequence silently get no gradient.
- `embedding` with a negative ``padding_idx``: the row of padding silently gets a gradient, because the backward takes
  the index as "no padding".
- `lstm_cell`, `lstm`, `meshgrid` of a list and others: tensors in a sequence get no gradient here, either
  (`plain_arguments.py`).
- attention with mask and dropout on a CPU: a query without keys gives NaN (`multi_head_attention.py`).
- functions that draw random numbers inside (`random_functions.py`): silently, their gradients have other numbers.

Chunked heads use the same decompositions (`loss_decompositions.py`), so a whole head computes the same.

Functions that Thunder passes to PyTorch whole are written out, too (`whole_functions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import pyval
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.torch_functions.loss_decompositions import STACKS, decomposed, written_out
from thunder_mem.torch_functions.plain_arguments import with_plain_arguments
from thunder_mem.torch_functions.whole_functions import FUSED, WRITTEN_OUT, Written
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["with_mended_functions"]

_STACKS = {
    symbol.id for function in STACKS if (symbol := ltorch._torch_to_thunder_function_map.get(function)) is not None
}


def with_mended_functions(trace: TraceCtx, *, fused: bool = False) -> TraceCtx:
    """The trace with such functions written out; the same object without any.

    Args:
        fused: whether an executor fuses what is written out, so that its steps need no memory.
    """
    new = _all_rewritten(trace.bound_symbols, trace, {**WRITTEN_OUT, **FUSED} if fused else WRITTEN_OUT)
    if new is trace.bound_symbols:
        return trace
    return rebuilt(trace, new, "Functions that Thunder differentiates wrongly, or as a whole, written out")


def _all_rewritten(
    bsyms: Sequence[BoundSymbol], trace: TraceCtx, whole: Mapping[Any, Written]
) -> Sequence[BoundSymbol]:
    new = [part for bsym in bsyms for part in _rewritten(bsym, trace, whole)]
    return bsyms if len(new) == len(bsyms) and all(map(is_, new, bsyms)) else new


def _rewritten(bsym: BoundSymbol, trace: TraceCtx, whole: Mapping[Any, Written]) -> Sequence[BoundSymbol]:
    if bsym.sym.id in whole and (parts := written_out(bsym, trace, whole[bsym.sym.id])):
        return _in_place_of(bsym, [with_plain_arguments(part) for part in parts])
    if (plain := with_plain_arguments(bsym)) is not bsym:
        return [plain]
    if bsym.sym.id == ltorch.embedding.id:
        return [_with_padding_from_the_front(bsym)]
    if bsym.sym.id not in (ltorch.cross_entropy.id, ltorch.nll_loss.id, *_STACKS):
        inside = whole if bsym.sym.id == ltorch.checkpoint.id or not str(bsym.sym.id).startswith("torch.") else {}
        if not inside:
            # PyTorch's own functions have derivatives of their own: that of `relu6` at its bounds is not that of
            # `clamp`. But `lerp_` is `lerp`, and a write.
            twins = (part.sym for part in bsym.subsymbols if f"{part.sym.name}_" == bsym.sym.name)
            inside = {sym.id: whole[sym.id] for sym in twins if sym.id in whole}
        parts = _all_rewritten(bsym.subsymbols, trace, inside)
        return [bsym if parts is bsym.subsymbols else bsym.from_bsym(subsymbols=tuple(parts))]
    if not _is_wrong(bsym):
        return [bsym]
    mended = decomposed(bsym, trace)
    if bsym.sym.id == ltorch.cross_entropy.id or not mended.subsymbols:
        return [mended]
    # An executor would run the function as one, and lose its gradient again.
    return _in_place_of(bsym, mended.subsymbols)


def _in_place_of(bsym: BoundSymbol, parts: Sequence[BoundSymbol]) -> Sequence[BoundSymbol]:
    """The parts of a bound symbol, whose values have the tags of its result, such as that of a checkpoint."""
    for part in parts:
        for p in part.flat_proxy_outs:
            p.tags.update(bsym.flat_proxy_outs[0].tags)
    return parts


def _is_wrong(bsym: BoundSymbol) -> bool:
    if bsym.sym.id in _STACKS:
        return True
    given: tuple[Any, ...] = bsym.sym.normalize(*bsym.args, **bsym.kwargs)[0]
    a, target = given[:2]
    if a.ndim not in (1, 2, 4) and a.ndim == target.ndim + 1:
        return True
    if bsym.sym.id == ltorch.nll_loss.id:
        *_, ignore_index, reduction = given
        return ignore_index is None or reduction != "mean"
    *_, smoothing = given
    return bool(pyval(smoothing))


def _with_padding_from_the_front(bsym: BoundSymbol) -> BoundSymbol:
    """An `embedding` whose negative index of padding is counted from the first row; the same object without any."""
    given: tuple[Any, ...] = bsym.sym.normalize(*bsym.args, **bsym.kwargs)[0]
    rows, padding = pyval(given[1].shape[0]), given[2]
    padding = padding if padding is None else pyval(padding)
    if padding is None or not -rows <= padding < 0:  # what is outside raises in PyTorch's function, as in eager
        return bsym
    parts = [part.from_bsym(kwargs={**part.kwargs, "padding_idx": rows + padding}) for part in bsym.subsymbols]
    return bsym.from_bsym(args=(*given[:2], rows + padding, *given[3:]), kwargs={}, subsymbols=tuple(parts))
