"""What Thunder's own tests (`make upstream-tests`) have found, each as a small program."""

import pytest
import thunder
import torch
from thunder.extend import OperatorExecutor, deregister_executor, register_executor

from tests.upstream.inject import uncompiled
from thunder_mem import MemEfficient
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex


@pytest.fixture
def doubling():
    """An executor with an operation of its own, which adds 1 where what it says of itself only doubles."""
    executor = OperatorExecutor("doubling", version="0.1")
    register_executor(executor)
    executor.double = executor.register_operator("double", like=lambda a: a * 2, fn=lambda a: a * 2 + 1)
    yield executor
    deregister_executor(executor)


@pytest.mark.slow
@pytest.mark.parametrize("transforms", ((), (MemEfficient(strict=True, verify=True),)), ids=("thunder", "mem"))
def test_an_operation_that_an_executor_runs_is_not_fused_by_its_decomposition(doubling, transforms):
    f = thunder.jit(
        lambda x: doubling.double(x.sin()).cos(), executors=[doubling, mem_pointwise_ex], transforms=list(transforms)
    )
    x = torch.linspace(0, 1, 5, dtype=torch.float64)
    with uncompiled():
        torch.testing.assert_close(f(x), (x.sin() * 2 + 1).cos())


def test_an_operation_of_which_torchscript_has_overloads_is_planned():
    """`aten::erfc.int` has a schema, but PyTorch's dispatcher does not know it."""
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    with uncompiled():
        f = thunder.jit(lambda x: torch.special.erfc(x * 2), transforms=[MemEfficient(strict=True, verify=True)])
        torch.testing.assert_close(f(x), torch.special.erfc(x * 2))


@pytest.mark.parametrize("executors, outside", [([], 1), (["mem_pointwise"], 0)], ids=["nothing fused", "fused"])
def test_a_transform_after_optimization_sees_what_no_region_hides(executors, outside):
    """Thunder's test_post_optimization_transform looks for additions, of which one each is in a region."""
    seen = []

    class Additions(thunder.Transform):
        def transform_trace_post_optimization(self, trace, executors_list=None):
            seen.append(sum(b.sym.name == "add" for b in trace.bound_symbols))
            inside = [s.sym.name for b in trace.bound_symbols for s in b.subsymbols]
            assert seen[-1] + inside.count("add") >= 1
            return trace

    def foo(a, b, c):
        return a * a + b * c

    jitted = thunder.jit(foo, executors=executors, transforms=[Additions(), MemEfficient(strict=True)])
    with uncompiled():
        jitted(torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3))
    assert seen == [outside, outside]  # of the forward and of the backward
