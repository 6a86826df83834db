"""`thunder.compile(model, plugins="mem-efficient")`."""

import pytest
import thunder
import torch
from thunder.recipes import BaseRecipe

from tests.cases import randn
from tests.fuzz import uncompiled_regions
from thunder_mem import MemEfficientPlugin, last_plan


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).double()


def gradients(model, compiled, x):
    model.zero_grad()
    compiled(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


class FuseNothing(BaseRecipe):
    """Thunder's recipe without a fuser of its own."""

    def setup_fuser(self) -> None:
        """No name is added."""


@pytest.mark.parametrize("plugins", ("mem-efficient", ["mem-efficient"], MemEfficientPlugin(strict=True)))
def test_a_plugin_plans_and_brings_its_executors(model, plugins):
    x = randn(16, 8, grad=False).double()
    expected = gradients(model, model, x)
    compiled = thunder.compile(model, recipe=FuseNothing(), plugins=plugins)
    with uncompiled_regions():
        torch.testing.assert_close(gradients(model, compiled, x), expected)
    plan = last_plan(compiled)
    assert plan is not None and any(region.executor == "mem_pointwise" for region in plan.regions)


def test_its_options_are_those_of_the_transform(model):
    compiled = thunder.compile(model, recipe=FuseNothing(), plugins=MemEfficientPlugin(budget="1GiB", sort="dfs"))
    with uncompiled_regions():
        compiled(randn(16, 8, grad=False).double())
    plan = last_plan(compiled)
    assert plan is not None and plan.budget is not None and plan.budget.budget_bytes == 2**30
    with pytest.raises(ValueError, match="sort='quick' is not known"):
        MemEfficientPlugin(sort="quick")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_it_goes_with_thunders_plugin_for_cuda_graphs(model):
    model, x = model.cuda(), randn(16, 8, grad=False).double().cuda()
    expected = gradients(model, model, x)
    compiled = thunder.compile(model, recipe=FuseNothing(), plugins=["mem-efficient", "reduce-overhead"])
    for _ in range(3):  # warm up, record, replay
        torch.testing.assert_close(gradients(model, compiled, x), expected)
    assert last_plan(compiled) is not None


def test_thunder_fx_takes_it(model):
    x = randn(16, 8, grad=False).double()
    expected = gradients(model, model, x)
    compiled = thunder.compile(model, recipe=FuseNothing(interpreter="thunder.fx"), plugins="mem-efficient")
    with uncompiled_regions():
        torch.testing.assert_close(gradients(model, compiled, x), expected)
