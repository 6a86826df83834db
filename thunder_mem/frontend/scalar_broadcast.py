"""Expand scalars before they meet larger tensors, so that their gradients are sums.

On a CPU, Thunder 0.2.6 treats a tensor without dims as a number and does not broadcast it. Its gradient then has the
other operand's shape and is never summed: the gradient of ``(w * w.sum()).sum()`` is silently wrong. The backward of an
explicit broadcast is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from thunder.core import prims
from thunder.core.devices import DeviceType
from thunder.core.dtypes import is_inexact_dtype
from thunder.core.proxies import Proxy, TensorProxy, pyval, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.effects import leaves
from thunder_mem.semantics.fusible_prims import POINTWISE
from thunder_mem.trace.rebuilding import rebuilt, recorded

__all__ = ["expand_scalars"]


def expand_scalars(trace: TraceCtx) -> TraceCtx:
    """The trace with a broadcast before each pointwise operation of a scalar with a larger tensor.

    A trace without such operations, or whose arguments need no gradient, stays unchanged.
    """
    if not any(isinstance(p, TensorProxy) and p.requires_grad for p in trace.args):
        return trace
    if not any(_scalars(bsym) for top in trace.bound_symbols for bsym in leaves(top)):
        return trace
    return rebuilt(trace, lambda: [new for bsym in trace.bound_symbols for new in _rewritten(bsym)], "Scalars expanded")


def _scalars(bsym: BoundSymbol) -> list[TensorProxy]:
    """The operands to expand; none beside an empty operand, because an empty `arange` has no dims.

    Nor is a scalar expanded that meets tensors on another device, because the expanded one could not.
    """
    out = bsym.output
    if bsym.sym.id not in POINTWISE or not isinstance(out, TensorProxy) or not out.ndim:
        return []
    found = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy) and _is_scalar(a) and a.device == out.device]
    # `shape` would record an operation where sizes are symbolic.
    return [] if found and any(pyval(n) == 0 for n in out._shape) else found


def _is_scalar(a: TensorProxy) -> bool:
    return a.ndim == 0 and is_inexact_dtype(a.dtype) and a.device.devicetype is DeviceType.CPU


def _rewritten(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    if bsym.subsymbols:
        subsymbols = [new for sub in bsym.subsymbols for new in _rewritten(sub)]
        same = len(subsymbols) == len(bsym.subsymbols) and all(map(is_, subsymbols, bsym.subsymbols))
        return [bsym if same else bsym.from_bsym(subsymbols=subsymbols)]
    if not (scalars := _scalars(bsym)):
        return [bsym]
    partner = next(a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy) and a.ndim)
    with recorded() as made:
        shape = tuple(partner.shape)  # of existing values: with symbolic sizes, this is an operation
        swaps: dict[object, Proxy] = {variableify(a): prims.broadcast_in_dim(a, shape, ()) for a in scalars}
    return [*made, bsym.from_bsym_swap_proxies(swaps, skip_output=True)]
