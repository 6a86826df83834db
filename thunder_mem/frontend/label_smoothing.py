"""Cross entropies with smoothed labels, written out so that ignored targets count nothing.

In Thunder 0.2.6, with ``reduction="mean"``, the uniform part of the loss also adds up rows of ignored targets: the loss
and its gradient are silently wrong. Chunked heads use another decomposition (`loss_decompositions.py`). With this
module, a whole head computes the same.
"""

from __future__ import annotations

from operator import is_

import thunder.torch as ltorch
from thunder.core.proxies import pyval
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.frontend.loss_decompositions import decomposed
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["without_ignored_targets"]


def without_ignored_targets(trace: TraceCtx) -> TraceCtx:
    """The trace whose cross entropies of class indices with smoothed labels omit ignored targets; the same
    object without such losses."""
    new = [_rewritten(bsym, trace) for bsym in trace.bound_symbols]
    if all(map(is_, new, trace.bound_symbols)):
        return trace
    return rebuilt(trace, new, "Ignored targets left out of smoothed labels")


def _rewritten(bsym: BoundSymbol, trace: TraceCtx) -> BoundSymbol:
    if bsym.sym.id == ltorch.cross_entropy.id:
        return decomposed(bsym, trace) if _smooths(bsym) else bsym
    parts = [_rewritten(part, trace) for part in bsym.subsymbols]
    return bsym if all(map(is_, parts, bsym.subsymbols)) else bsym.from_bsym(subsymbols=parts)


def _smooths(bsym: BoundSymbol) -> bool:
    *_, smoothing = bsym.sym.normalize(*bsym.args, **bsym.kwargs)[0]  # its last parameter
    return bool(pyval(smoothing))
