"""`thunder.compile(model, plugins="mem-efficient")`."""

import pytest
import thunder
import torch
from thunder.core.recipe import Recipe
from thunder.recipes import BaseRecipe, HFTransformers, get_recipe_class
from thunder.transforms.cudagraph import CUDAGraphTransform

from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import MemEfficientPlugin, explain, fx, last_plan


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


@pytest.mark.parametrize("recipe", ["auto", "default", FuseNothing()], ids=["auto", "default", "own"])
def test_thunders_recipes_do_without_nvfuser_beside_it(model, recipe):
    x = randn(16, 8, grad=False).double()
    expected = gradients(model, model, x)
    compiled = thunder.compile(model, recipe=recipe, plugins="mem-efficient")
    with uncompiled_regions():
        torch.testing.assert_close(gradients(model, compiled, x), expected)
    assert last_plan(compiled) is not None


def test_thunders_recipes_are_as_they_were_without_it(model, capsys):
    MemEfficientPlugin()
    for name, theirs in (("default", BaseRecipe), ("hf-transformers", HFTransformers)):
        ours = get_recipe_class(name)
        assert issubclass(ours, theirs) and ours().executor_names[0] == "nvfuser"
    assert type(Recipe.get_for_model(model)) is get_recipe_class("default")
    if thunder.extend.get_executor("nvfuser") is None:
        with pytest.raises(ValueError, match="is not a valid Executor"):
            thunder.compile(model)
        assert "nvFuser was specified" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hugging_face_model_by_its_recipe(capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(24).reshape(2, 12) % 50
    mask = torch.ones(12, 12).tril().log().expand(2, 1, 12, 12).contiguous()
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    expected = model(**arguments).logits.detach()
    compiled = thunder.compile(model, recipe="hf-transformers", plugins="mem-efficient")
    with uncompiled_regions():
        torch.testing.assert_close(compiled(**arguments).logits.detach(), expected)
    assert last_plan(compiled) is not None
    assert "nvFuser was specified" not in capsys.readouterr().out


@pytest.mark.parametrize("plugins", [["mem-efficient", "reduce-overhead"], ["reduce-overhead", "mem-efficient"]])
def test_the_plugin_for_cuda_graphs_may_stand_on_either_side(model, plugins):
    """What is recorded and replayed is tested in test_composition.py."""
    x = randn(16, 8, grad=False).double()
    expected = gradients(model, model, x)
    compiled = thunder.compile(model, recipe=FuseNothing(), plugins=plugins)
    (graphs,) = (t for t in thunder.compile_data(compiled).transforms if isinstance(t, CUDAGraphTransform))
    runner = graphs.cuda_graph_runner
    runner.call_cuda_graph = lambda name, *args: runner.python_callables[name][0](*args)
    with uncompiled_regions(), pytest.warns(UserWarning, match="CUDA graphs need a GPU"):
        torch.testing.assert_close(gradients(model, compiled, x), expected)
    assert last_plan(compiled) is not None
    assert "CUDAGraph1" in str(thunder.last_traces(compiled)[-1])


def test_thunder_fx_takes_it(model):
    torch._dynamo.reset()
    x = randn(16, 8, grad=False).double()
    expected = gradients(model, model, x)
    recipe = FuseNothing(interpreter="thunder.fx")
    compiled = thunder.compile(model, recipe=recipe, plugins="mem-efficient")
    with uncompiled_regions():
        torch.testing.assert_close(gradients(model, compiled, x), expected)
    (part,) = fx.subgraphs(compiled)
    assert last_plan(compiled) is last_plan(part.jitted) is not None
    assert explain(compiled, bounds=False).plan == last_plan(compiled)
    assert len(recipe.transforms) == 2  # Thunder's own PrunePrologueChecks, and ours
