"""Equal views become one, and a region of views alone shares each operand's memory only with its own views."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx

from thunder_mem import MemEfficient
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.equal_views import is_view_of_backward, without_equal_views
from thunder_mem.trace.reading import BACKWARD

SIZES = ((2, 8, 16), (32, 16), (32, 16), (16, 32))


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


def test_only_views_of_the_backward_that_copy_nothing_count_in_a_joint_trace():
    def twice(x):
        flat = [prims.reshape(x, (6,)) for _ in "ab"]
        cast = [prims.convert_element_type(x, dtypes.float64) for _ in "ab"]
        dense = [thunder.torch.contiguous(x) for _ in "ab"]
        return *flat, *cast, *dense

    trace = thunder.trace()(twice, torch.zeros(2, 3))
    assert without_equal_views(trace, is_view_of_backward) is trace
    for bsym in trace.bound_symbols:
        bsym.tags.add(BACKWARD)
    after = without_equal_views(trace, is_view_of_backward)
    assert len(after.bound_symbols) == len(trace.bound_symbols) - 1


def test_gradients_that_are_equal_views_stay_two_of_one_memory():
    """As in eager PyTorch; autograd would clone a gradient that it gets twice."""
    jitted = thunder.jit(
        lambda a, b: a.view(6, -1) + b.view(6, -1), executors=(), transforms=[MemEfficient(strict=True)]
    )
    a, b = (torch.ones(3, 8, requires_grad=True) for _ in "ab")
    jitted(a, b).backward(torch.ones(6, 4))
    assert a.grad is not b.grad and a.grad.data_ptr() == b.grad.data_ptr()


@pytest.mark.parametrize("executors", [(), None], ids=["unfused", "fused"])
def test_a_backward_views_each_value_once(executors):
    def mlp(x, gate, up, down):
        h = x.tanh()
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    def run(call):
        seed = torch.Generator().manual_seed(0)
        made = [torch.randn(*s, generator=seed, dtype=torch.float64).requires_grad_() for s in SIZES]
        call(*made).square().sum().backward()
        return [p.grad for p in made]

    jitted = thunder.jit(mlp, executors=executors, transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(run(jitted), run(mlp))
    views = [b.rhs for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if b.flat_proxy_outs and is_view(b)]
    assert len(views) == len(set(views)) > 0


def test_a_region_of_views_alone_shares_no_memory_between_its_operands():
    trace = TraceCtx()
    with tracectx(trace):
        x, y = (TensorProxy(n, shape=(4,), device=devices.cpu, dtype=dtypes.float32, requires_grad=False) for n in "xy")
        a, b = prims.reshape(x, (2, 2)), prims.reshape(y, (2, 2))
    region = Symbol("Region", is_fusion=True).bind(x, y, output=(a, b), subsymbols=tuple(trace.bound_symbols))
    aliases = Aliases([region])
    assert aliases(a.name) == aliases("x") != aliases("y") == aliases(b.name)
