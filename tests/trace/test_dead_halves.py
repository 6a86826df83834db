"""Composites of which only some results are read."""

from thunder.core import prims
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.collectives import tensor
from tests.checking.traces import body
from thunder_mem.trace.dead_halves import without_dead_halves
from thunder_mem.trace.rebuilding import recorded


def of_both(read):
    """A composite of a sine and a cosine, and a return of some of them."""
    trace = TraceCtx(lambda x: None)
    with tracectx(trace):
        x = tensor("x", 4)
        trace.args = (x,)
        with recorded() as parts:
            made = prims.sin(x), prims.cos(x)
        trace.bound_symbols.append(Symbol("both").bind(x, output=made, subsymbols=tuple(parts)))
        prims.python_return(tuple(made[i] for i in read))
    return trace


def test_what_nobody_reads_of_a_composite_goes():
    assert [b.sym.name for b in body(without_dead_halves(of_both([0])))] == ["sin"]
    whole = of_both([0, 1])
    assert without_dead_halves(whole) is whole
