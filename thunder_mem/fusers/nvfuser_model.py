"""nvFuser for a simulated GPU: Thunder's own executor, without CUDA and, if necessary, without the wheel.

Thunder's module of nvFuser decides what is fused, decomposes composites and rewrites losses. nvFuser itself only runs
with a region. So the module is loaded a second time, privately, with an empty nvFuser if the wheel is not installed. If
it is, the regions have their real definitions.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import thunder.extend
import torch
from looseversion import LooseVersion
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.executors import nvfuserex
from thunder.extend import FusionExecutor

from thunder_mem.fusers.fake_regions import modelled_region

__all__ = ["ModelledFusion", "modelled_nvfuser"]

_VERSION = "0.2.36"


@dataclass(frozen=True, eq=False)
class ModelledFusion:
    """A region of nvFuser that returns its results without data.

    Attributes:
        definition: the function that Thunder would run; its `get_fd` is nvFuser's own definition, with the wheel.
        run: from inputs to results on fake tensors.
    """

    definition: Any
    run: Callable[..., list[Any]]

    def __call__(self, *args: Any) -> list[Any]:
        return self.run(*args)


@cache
def modelled_nvfuser() -> FusionExecutor:
    """Thunder's nvFuser executor as with its wheel and a GPU; its regions are `ModelledFusion`s."""
    bindings = _bindings()
    spec = importlib.util.find_spec("thunder.executors.nvfuserex_impl")
    assert spec is not None and spec.origin is not None
    own = importlib.util.spec_from_file_location("thunder_mem.thunders_nvfuser", spec.origin)
    assert own is not None and own.loader is not None
    module: Any = importlib.util.module_from_spec(own)
    with (
        mock.patch.dict(sys.modules, nvfuser_direct=bindings),
        mock.patch.object(nvfuserex, "nvfuser_version", lambda: LooseVersion(bindings.version())),
        mock.patch.object(thunder.extend, "register_executor", lambda executor: executor),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
    ):
        own.loader.exec_module(module)
    define = module.create_fusion_definition_wrapper

    def modelled(bsyms: list[BoundSymbol], name: str, inputs: list[Proxy], outputs: list[Proxy]) -> ModelledFusion:
        return ModelledFusion(define(bsyms, name, inputs, outputs), modelled_region(bsyms, inputs, outputs))

    module.create_fusion_definition_wrapper = modelled
    return module.ex


def _bindings() -> Any:
    """The wheel's module, or one with the names that Thunder's imports."""
    try:
        import nvfuser_direct
    except ImportError:
        nvfuser_direct = ModuleType("nvfuser_direct")
        empty = {
            "version": lambda: _VERSION,
            "DataType": _Names(),
            "FusionDefinition": object,
            "ParallelType": _Names(),
        }
        vars(nvfuser_direct).update(empty, multidevice=None, execute_with_dtensors=None)
    return nvfuser_direct


class _Names:
    """Has every name."""

    def __getattr__(self, name: str) -> str:
        return name
