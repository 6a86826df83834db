"""The names of a trace that may share memory: a safe answer for order, not for bytes.

`layout.py` says exactly which proxies share a storage if the arguments are dense. This module says whether they can
share. A reshape is a view for some strides. `contiguous` usually is a view, while the prim in it copies. PyTorch
promises nothing about results of its composite operators (`sum_to_size`, `dropout` of a model in evaluation,
`broadcast_tensors`). Every op that is not known to make fresh memory counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.semantics.effects import is_copy
from thunder_mem.semantics.layout import is_view, torch_view
from thunder_mem.semantics.op_traits import PLAIN, traits_of

__all__ = ["FRESH_EXECUTORS", "Aliases", "may_share_memory"]

FRESH_EXECUTORS = frozenset(
    ("mem_attention", "mem_cudnn_attention", "mem_masked_attention", "mem_kernels", "mem_gradients")
)
"""All results of these executors' operations have their own memory."""
# Composites that always compute.
_FRESH_COMPOSITES = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "multi_head_attention_forward"}
_MAY_RETURN_THEIR_OPERAND = {PrimIDs.BITCAST, PrimIDs.DEVICE_PUT, PrimIDs.STRIDE_ORDER}


def may_share_memory(bsym: BoundSymbol) -> bool:
    """Whether a result of this bound symbol, taken without its subsymbols, may share memory with an operand."""
    if is_view(bsym) or bsym.sym.id in _MAY_RETURN_THEIR_OPERAND:
        return True
    if bsym.sym.executor is not None and str(bsym.sym.executor.name) in FRESH_EXECUTORS:
        return False
    if bsym.subsymbols:  # the subsymbols decide, unless an executor runs the whole by PyTorch's own function
        return torch_view(bsym.sym.name) is not None
    return not isinstance(bsym.sym.id, PrimIDs) and not _makes_fresh_memory(bsym.sym.name)


@cache
def _makes_fresh_memory(name: str) -> bool:
    """Whether PyTorch's operator of that name has its own kernels, whose schemas promise fresh memory."""
    if name in _FRESH_COMPOSITES:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or torch_view(name) is not None or name.endswith("_"):  # in place: the operand itself
        return False
    # A composite operator may return any result of its parts.
    composed = "CompositeImplicitAutograd"
    # Overloads by the dims' names, which Thunder never calls, are composed of those by numbers.
    overloads = (o for o in packet.overloads() if not o.lower().startswith(("dimname", "dim_dimname", "names")))
    names = (getattr(packet, overload).name() for overload in overloads)
    known = [n for n in names if torch._C._dispatch_has_kernel(n)]  # TorchScript's own overloads, on numbers, are not
    return bool(known) and not any(torch._C._dispatch_has_kernel_for_dispatch_key(n, composed) for n in known)


class Aliases:
    """The names that may share memory, as classes; `aliases(name)` is a class' representative.

    Args:
        bsyms: the bound symbols of a trace.
        in_place: whether a result written over an argument that dies shares the argument's memory. If not, its names
            are apart from the argument's, as in the program before any result was written over another value.

    Example:
        >>> aliases = Aliases([])
        >>> aliases.join("a", "b")
        >>> aliases("a") == aliases("b"), aliases("a") == aliases("c")
        (True, False)
    """

    def __init__(self, bsyms: Iterable[BoundSymbol], *, in_place: bool = True) -> None:
        self._in_place = in_place
        self._above: dict[str, str] = {}
        for bsym in bsyms:
            self.follow(bsym)

    def __call__(self, name: str) -> str:
        above = self._above
        while (parent := above.get(name, name)) != name:
            above[name] = name = above.get(parent, parent)
        return name

    def join(self, a: str, b: str) -> None:
        """Both names may share memory from now on."""
        if (a := self(a)) != (b := self(b)):
            self._above[a] = b

    def follow(self, bsym: BoundSymbol) -> None:
        """What a bound symbol makes may share its operands' memory from now on."""
        for a, b, in_place in _pairs(bsym):
            if self._in_place or not in_place:
                self.join(a, b)


def _pairs(bsym: BoundSymbol) -> tuple[tuple[str, str, bool], ...]:
    """The names that may share memory because of a bound symbol, and whether a result written in place is why.

    Planning reads most bound symbols many times, so each keeps its answer.
    """
    known = vars(bsym).get("_memory_pairs")
    if known is None:
        known = vars(bsym)["_memory_pairs"] = tuple(_found_pairs(bsym))
    return known


def _found_pairs(bsym: BoundSymbol) -> Iterator[tuple[str, str, bool]]:
    for part in bsym.subsymbols:
        yield from _pairs(part)
    traits = traits_of(bsym)
    for name, arg in traits.shares(bsym).items():
        yield name, arg.name, traits.in_place
    args, outs = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)
    if bsym.sym.id is PrimIDs.UPDATE_ALIASES or bsym.sym.name == "update_aliases":
        yield from ((new.name, old.name, False) for new, old in zip(outs, args, strict=True))
    elif is_copy(bsym):
        yield from ((out.name, bsym.args[1].name, False) for out in outs)
    elif bsym.sym.is_fusion or traits is not PLAIN:
        return  # what its parts or its traits say is all
    elif args and may_share_memory(bsym):
        casts = bool(bsym.subsymbols) or bsym.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE
        for out in outs:
            for arg in args:
                if not casts or out.dtype == arg.dtype:  # a cast that changes the dtype copies
                    yield out.name, arg.name, False


def _tensors(proxies: Iterable[object]) -> list[TensorProxy | FutureTensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy | FutureTensorProxy)]
