"""``thunder.compile(model, plugins="mem-efficient")``: `MemEfficient` among Thunder's plugins."""

from __future__ import annotations

from typing import Any, NoReturn

import thunder.recipes
from thunder.core.recipe import Lookaside, Plugin, PluginPolicy, Recipe
from thunder.core.transform_common import Transform
from thunder.extend import Executor, get_executor
from thunder.plugins import register_plugin

from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.transforms import MemEfficient

__all__ = ["MemEfficientPlugin"]

_REMEDY = "write transforms=[MemEfficient(...)], or thunder.compile(model, plugins=...)"


class MemEfficientPlugin(Plugin):
    """`MemEfficient` and its executors, for any of Thunder's recipes.

    The recipe's own fuser comes first; `mem_pointwise` fuses the rest (without nvFuser, everything).
    Transforms of other plugins that change the computation (quantization, sharding) stand before this one,
    so their result is planned.

    Args:
        options: as `MemEfficient` takes them.

    Raises:
        TypeError, ValueError: from `MemEfficient`.

    Example:
        >>> import thunder, torch
        >>> from thunder_mem import MemEfficientPlugin
        >>> model = thunder.compile(torch.nn.Linear(4, 2), plugins=MemEfficientPlugin(budget="1GiB"))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    policy = PluginPolicy.POST

    def __init__(self, **options: Any) -> None:
        _replace_recipes()  # before Thunder looks its recipe up; programs without plugins keep theirs
        self._transform = MemEfficient(**options)

    def setup_lookasides(self: Any = None) -> list[Lookaside] | None:
        if self is None:  # called on the class, as Thunder's first call to a plugin
            raise TypeError(
                "plugins= takes objects: write plugins=MemEfficientPlugin() with parentheses, not the class"
            )
        return None

    def __format__(self, spec: str) -> str:
        """Put the remedy before Thunder's message for a plugin among the transforms."""
        return f"transforms= takes transforms, and {self!r} is a plugin: {_REMEDY}. {self!r}"

    def transform_module(self, model: Any) -> NoReturn:
        """A hook that Thunder calls on transforms."""
        raise TypeError(f"transforms= takes transforms, and {self!r} is a plugin: {_REMEDY}")

    def setup_transforms(self) -> list[Transform]:
        return [self._transform]

    def setup_executors(self) -> list[Executor]:
        return [mem_attention_ex, mem_pointwise_ex]


class _WithoutMissingFuser(thunder.recipes.BaseRecipe):
    """A recipe of Thunder's that, beside this plugin, works without an installed nvFuser.

    Thunder's default recipe asks for nvFuser, and fails without it, even for a model on a CPU.
    """

    def setup_executors(self) -> list[Executor]:
        planned = any(isinstance(plugin, MemEfficientPlugin) for plugin in self.plugins)
        if planned and "nvfuser" in self.executor_names and get_executor("nvfuser") is None:
            self.executor_names.remove("nvfuser")
        return super().setup_executors()


class _Default(_WithoutMissingFuser):
    """Thunder's default recipe."""


class _HFTransformers(_WithoutMissingFuser, thunder.recipes.HFTransformers):
    """Thunder's recipe for Hugging Face models."""


def _replace_recipes() -> None:
    """Make Thunder's recipes work without nvFuser when this plugin is among their plugins."""
    for kind, name, models in ((_Default, "default", ""), (_HFTransformers, "hf-transformers", "hf-transformers")):
        thunder.recipes.register_recipe(name, kind)
        Recipe.register(models)(kind)


register_plugin("mem-efficient", MemEfficientPlugin)
