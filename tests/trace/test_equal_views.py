"""Equal views become one, and a region of views alone shares each operand's memory only with its own views."""

import thunder
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx

from thunder_mem.semantics.aliases import Aliases
from thunder_mem.trace.equal_views import without_equal_views


def views(x):
    a = prims.reshape(x, (6,))
    b = prims.reshape(x, (6,))
    other = prims.reshape(x, (3, 2))
    return prims.mul(a, b), prims.reshape(b, (2, 3)), prims.reshape(a, (2, 3)), other, prims.exp(x), prims.exp(x)


def test_equal_views_become_one_and_other_operations_stay():
    x = torch.arange(6.0).view(2, 3)
    before = thunder.trace()(views, x)
    after = without_equal_views(before)
    names = [b.sym.name for b in after.bound_symbols]
    assert [names.count(n) for n in ("reshape", "exp")] == [3, 2]
    got = thunder.executors.passes.transform_for_execution(after, thunder.get_always_executors()).python_callable()(x)
    for one, want in zip(got, views_in_torch(x), strict=True):
        assert torch.equal(one, want)


def views_in_torch(x):
    return x.view(6) ** 2, x, x, x.view(3, 2), x.exp(), x.exp()


def test_a_trace_without_equal_views_is_the_same_object():
    trace = thunder.trace()(lambda x: prims.reshape(prims.exp(x), (6,)), torch.zeros(2, 3))
    assert without_equal_views(trace) is trace


def test_a_region_of_views_alone_shares_no_memory_between_its_operands():
    trace = TraceCtx()
    with tracectx(trace):
        x, y = (TensorProxy(n, shape=(4,), device=devices.cpu, dtype=dtypes.float32, requires_grad=False) for n in "xy")
        a, b = prims.reshape(x, (2, 2)), prims.reshape(y, (2, 2))
    region = Symbol("Region", is_fusion=True).bind(x, y, output=(a, b), subsymbols=tuple(trace.bound_symbols))
    aliases = Aliases([region])
    assert aliases(a.name) == aliases("x") != aliases("y") == aliases(b.name)
