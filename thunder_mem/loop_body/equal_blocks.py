"""Blocks of equal layers, which are differentiated and compiled only once.

A block's trace names its own values, so the traces of equal stretches are equal. They are compared by content. Whatever
this module does not know, such as symbolic sizes, is equal to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.body import Body

__all__ = ["EqualBlocks"]

_LITERALS = (int, float, bool, str, complex, type(None), type(Ellipsis))
_NAMED = (dtype, Device, torch.dtype, torch.device, torch.memory_format)


class EqualBlocks:
    """The compiled blocks so far, by what they compute."""

    def __init__(self) -> None:
        # With their traces, because symbols are compared by identity.
        self._built: dict[Hashable, tuple[TraceCtx, Body]] = {}

    def built(self, trace: TraceCtx, use: Hashable, build: Callable[[], Body]) -> Body:
        """The compiled block of a trace; `build` makes it unless an equal one exists.

        Args:
            trace: the block's forward.
            use: what else decides about the compiled block.
            build: compiles it.
        """
        try:
            content = _values(trace.args), tuple(map(_content, trace.bound_symbols)), use
        except _UnknownError:
            return build()
        if content not in self._built:
            self._built[content] = trace, build()
        return self._built[content][1]


class _UnknownError(Exception):
    """Something that cannot be compared."""


def _content(bsym: BoundSymbol) -> Hashable:
    parts = tuple(map(_content, bsym.subsymbols))
    return id(bsym.sym), _value(bsym.args), _value(bsym.kwargs), _value(bsym.output), frozenset(bsym.tags), parts


def _value(x: Any) -> Hashable:
    kind = type(x)
    if kind is TensorProxy:
        return x.name, _values(x.shape), x.dtype, x.device.device_str(), x.requires_grad, frozenset(x.tags)
    if kind in _LITERALS:
        return kind, repr(x)
    if kind is tuple or kind is list:
        return kind, _values(x)
    if kind is slice:
        return kind, _values((x.start, x.stop, x.step))
    if kind is dict:
        return kind, tuple((key, _value(value)) for key, value in x.items())
    if isinstance(x, _NAMED):
        return kind, str(x)
    if x in (bool, int, float, complex):  # as dtypes
        return x
    raise _UnknownError


def _values(xs: Any) -> Hashable:
    return tuple(map(_value, xs))
