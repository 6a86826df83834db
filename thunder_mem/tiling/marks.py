"""``with thunder_mem.chunked():`` and ``with thunder_mem.tiled():`` in user code, and their marks in the trace.

Thunder's interpreter runs the context managers' own code. The functions that they call become bound symbols, which
the search for heads or for stretches removes again. Without such a search they do nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map, record_source_loc_in_symbol_header
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.symbols import executor
from thunder_mem.semantics.effects import with_subsymbols
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.source_lines import place_of

__all__ = ["Mark", "chunked", "strip_marks", "strip_tile_marks", "tiled", "with_products"]


def _begin() -> None:
    """Outside a trace: nothing."""


def _end() -> None:
    """Outside a trace: nothing."""


def _begin_tiles() -> None:
    """Outside a trace: nothing."""


def _end_tiles() -> None:
    """Outside a trace: nothing."""


def _register(name: str, fn: Any) -> Symbol:
    """The symbol that a call of `fn` becomes in a trace."""
    symbol = executor.register_operator(name, meta=lambda: None, fn=fn, tags=[OpTags.DONT_DCE])
    _general_jit_lookaside_map[fn] = interpreter_needs_wrap(record_source_loc_in_symbol_header(symbol))
    return symbol


_CHUNKED = (_register("chunked_begin", _begin), _register("chunked_end", _end))
_TILED = (_register("tiled_begin", _begin_tiles), _register("tiled_end", _end_tiles))


class chunked:  # lower case, as `torch.no_grad` is
    """Mark a loss head that must run in chunks: if it cannot, compilation is an error.

    The mark does nothing in eager mode, or without `ChunkLossHead` and `MemEfficient`.

    Example:
        >>> import torch
        >>> with chunked():
        ...     loss = torch.nn.functional.cross_entropy(torch.ones(4, 2) @ torch.ones(2, 8), torch.zeros(4).long())
    """

    def __enter__(self) -> chunked:
        _begin()
        return self

    def __exit__(self, *exc: Any) -> None:
        _end()


class tiled:  # lower case, as `torch.no_grad` is
    """Mark a stretch that must run in tiles: if it cannot, compilation is an error.

    Every product in it whose result is wider than its input joins a tile. The mark does nothing in eager mode, or
    without `MemEfficient`.

    Example:
        >>> import torch
        >>> with tiled():
        ...     y = torch.relu(torch.ones(8, 2) @ torch.ones(2, 16)) @ torch.ones(16, 2)
    """

    def __enter__(self) -> tiled:
        _begin_tiles()
        return self

    def __exit__(self, *exc: Any) -> None:
        _end_tiles()


class Mark:
    """A marked stretch of a trace.

    Attributes:
        source: ``file:line`` of the first operation inside it.
        names: of all values computed inside it.
    """

    def __init__(self, source: str, names: frozenset[str]):
        self.source, self.names = source, names


def with_products(marks: Sequence[Mark], name: str, products: Collection[str]) -> tuple[Mark, ...]:
    """The marks, once several products compute the value `name`."""
    return tuple(Mark(m.source, m.names | {*products}) if name in m.names else m for m in marks)


def strip_marks(trace: TraceCtx) -> tuple[TraceCtx, tuple[Mark, ...]]:
    """The trace without marks of heads (the same object if it has none), and the stretches they marked."""
    return _strip(trace, *_CHUNKED)


def strip_tile_marks(trace: TraceCtx) -> tuple[TraceCtx, tuple[Mark, ...]]:
    """The trace without marks of tiles (the same object if it has none), and the stretches they marked."""
    return _strip(trace, *_TILED)


def _strip(trace: TraceCtx, begin: Symbol, end: Symbol) -> tuple[TraceCtx, tuple[Mark, ...]]:
    if not any(b.sym is begin or b.sym is end for b in trace.bound_symbols):
        return trace, ()
    marks: list[Mark] = []
    opened: list[list[BoundSymbol]] = []
    kept: list[BoundSymbol] = []
    for b in trace.bound_symbols:
        if b.sym is begin:
            opened.append([])
        elif b.sym is end:
            if opened:
                inside = opened.pop()
                source = next(filter(None, map(place_of, inside)), "")
                names = frozenset(p.name for top in inside for b in with_subsymbols(top) for p in b.flat_proxy_outs)
                marks.append(Mark(source, names))
        else:
            kept.append(b)
            for inside in opened:
                inside.append(b)
    return rebuilt(trace, kept), tuple(marks)
