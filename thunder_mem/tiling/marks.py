"""``with thunder_mem.chunked():`` in user code, and its marks in the trace.

Thunder's interpreter runs the context manager's own code. The two functions that it calls become bound symbols, which
the chunker removes again. Without a chunker they do nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map, record_source_loc_in_symbol_header
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

from thunder_mem.chunk_loop.symbols import executor
from thunder_mem.trace.source_lines import place_of

__all__ = ["Mark", "chunked", "strip_marks", "with_products"]


def _begin() -> None:
    """Outside a trace: nothing."""


def _end() -> None:
    """Outside a trace: nothing."""


def _no_result() -> None:
    return None


_begin_symbol = executor.register_operator("chunked_begin", meta=_no_result, fn=_begin, tags=[OpTags.DONT_DCE])
_end_symbol = executor.register_operator("chunked_end", meta=_no_result, fn=_end, tags=[OpTags.DONT_DCE])
for _fn, _symbol in ((_begin, _begin_symbol), (_end, _end_symbol)):
    _general_jit_lookaside_map[_fn] = interpreter_needs_wrap(record_source_loc_in_symbol_header(_symbol))


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
    """The trace without marks (the same object if it has none), and the stretches they marked."""
    if not any(b.sym is _begin_symbol or b.sym is _end_symbol for b in trace.bound_symbols):
        return trace, ()
    marks: list[Mark] = []
    opened: list[list[BoundSymbol]] = []
    kept: list[BoundSymbol] = []
    for b in trace.bound_symbols:
        if b.sym is _begin_symbol:
            opened.append([])
        elif b.sym is _end_symbol:
            if opened:
                inside = opened.pop()
                source = next(filter(None, map(place_of, inside)), "")
                marks.append(Mark(source, frozenset().union(*map(_made, inside))))
        else:
            kept.append(b)
            for inside in opened:
                inside.append(b)
    new = from_trace(trace)
    new.bound_symbols = kept
    return new, tuple(marks)


def _made(bsym: BoundSymbol) -> set[str]:
    names = {o.name for o in bsym.flat_proxy_outs}
    for sub in bsym.subsymbols:
        names |= _made(sub)
    return names
