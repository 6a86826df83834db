"""New traces: the given one does not change, new proxies get free names, and a failure leaves no scope behind."""

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import tracectx

from thunder_mem.trace.reading import read_trace
from thunder_mem.trace.rebuilding import in_order, rebuilt, recorded, with_body


@pytest.fixture
def trace():
    jitted = thunder.jit(lambda x: (x.sin(), x.cos()), executors=[])
    jitted(torch.ones(3))
    traces = thunder.last_traces(jitted)
    return next(t for t in traces if any(b.sym.id == "torch.sin" for b in t.bound_symbols))


def ids(trace):
    return [b.sym.id for b in trace.bound_symbols]


def test_the_given_trace_does_not_change(trace):
    before = list(trace.bound_symbols)
    new = rebuilt(trace, before[:-1], "Nothing is returned")
    assert ids(new) == ids(trace)[:-1] and trace.bound_symbols == before
    assert new.get_provenance().pss == "Nothing is returned" and rebuilt(trace, before).get_provenance() is None


def test_proxies_made_on_the_way_have_names_of_the_new_trace(trace):
    source = read_trace(trace)

    def body():
        for bsym in source.bsyms:
            yield bsym
            yield prims.clone.bind(bsym.output, output=TensorProxy(like=bsym.output))

    new = with_body(trace, source, body)
    names = [p.name for b in new.bound_symbols for p in b.flat_proxy_outs if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    assert len(set(names)) == len(names) == 4
    assert new.bound_symbols[-1] is source.result


def test_an_order_stands_between_unpacking_and_return(trace):
    source = read_trace(trace)
    backwards = in_order(trace, source, [1, 0])
    assert ids(backwards) == [*(b.sym.id for b in source.prefix), "torch.cos", "torch.sin", source.result.sym.id]
    assert ids(in_order(trace, source, [0, 1])) == ids(trace)


def test_recorded_operations_are_not_in_the_trace(trace):
    before = ids(trace)
    x = read_trace(trace).bsyms[0].output
    with recorded(trace) as made:
        prims.exp(x)
    with tracectx(trace), recorded() as others:
        prims.neg(x)
    assert [b.sym.id for b in (*made, *others)] == [prims.PrimIDs.EXP, prims.PrimIDs.NEG] and ids(trace) == before


def test_a_failure_leaves_no_scope_behind(trace):
    with pytest.raises(RuntimeError, match="planted"), recorded(trace):
        trace.push_scope([])
        raise RuntimeError("planted")
    assert trace.scopes == [trace.bound_symbols]
