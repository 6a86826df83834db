"""``thunder.compile(model, plugins="mem-efficient")``: `MemEfficient` among Thunder's plugins."""

from __future__ import annotations

from typing import Any

from thunder.core.recipe import Plugin, PluginPolicy
from thunder.core.transform_common import Transform
from thunder.extend import Executor
from thunder.plugins import register_plugin

from thunder_mem.attention import mem_attention_ex
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.transforms import MemEfficient

__all__ = ["MemEfficientPlugin"]


class MemEfficientPlugin(Plugin):
    """`MemEfficient` and its executors, for any of Thunder's recipes.

    The recipe's own fuser is asked first; `mem_pointwise` fuses what that leaves (on a CPU without nvFuser,
    everything). Transforms of other plugins that change what a model computes (quantization, sharding) stand
    before this one, whose planning they so become part of.

    Args:
        options: as `MemEfficient` takes them.

    Raises:
        TypeError, ValueError: from `MemEfficient`.

    Example:
        >>> import thunder, torch
        >>> from thunder_mem import MemEfficientPlugin
        >>> from thunder.recipes import BaseRecipe
        >>> recipe = BaseRecipe(fuser="torch.compile")
        >>> model = thunder.compile(torch.nn.Linear(4, 2), recipe, plugins=MemEfficientPlugin(budget="1GiB"))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    policy = PluginPolicy.POST

    def __init__(self, **options: Any) -> None:
        self._transform = MemEfficient(**options)

    def setup_transforms(self) -> list[Transform]:
        return [self._transform]

    def setup_executors(self) -> list[Executor]:
        return [mem_attention_ex, mem_pointwise_ex]


register_plugin("mem-efficient", MemEfficientPlugin)
