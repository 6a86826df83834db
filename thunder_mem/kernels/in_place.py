"""Kernels that write their result over their first argument.

`rewrites/buffer_reuse.py` uses them where nothing reads that argument later. Each stands for an operation that does
the same and leaves its arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

from thunder_mem.kernels.kernel_executor import mem_kernels_ex
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = ["in_place", "register_in_place"]

_in_place: dict[Symbol, Symbol] = {}
_plain: dict[str, Symbol] = {}  # by the name of the new operation


def register_in_place(operation: Symbol, name: str, function: Callable[..., torch.Tensor]) -> None:
    """Let `function` stand for an operation, with its arguments, and write the result over the first of them.

    Args:
        operation: as it stands in traces; its result is like its first argument.
        name: of the new operation, unique in `mem_kernels`.
        function: of tensors. It returns the first argument; where that has other strides or another dtype than
            the result, it may return new memory.
    """
    new = mem_kernels_ex.register_operator(name, meta=_like_first, fn=function)
    _in_place[operation] = new
    _plain[name] = operation


def in_place(bsym: BoundSymbol) -> BoundSymbol | None:
    """The same operation, written over its first argument; None where no kernel does that."""
    symbol = _in_place.get(bsym.sym)
    return None if symbol is None else bsym.from_bsym(sym=symbol)


def _like_first(a: TensorProxy, *_: Any, **__: Any) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


_TRAITS = MemoryTraits(
    writes=lambda bsym: (bsym.args[0],),
    shares=lambda bsym: {bsym.output.name: bsym.args[0]},
    runs=lambda bsym: bsym.from_bsym(sym=_plain[bsym.sym.name]),
    in_place=True,
)
declare(mem_kernels_ex, lambda name: _TRAITS if name in _plain else PLAIN)
