"""What Thunder and the wheel make of each other."""

import importlib
import sys

import pytest
import thunder
import torch

from thunder_mem.regions.nvfuser import without_broken_nvfuser
from thunder_mem.regions.nvfuser_model import modelled_nvfuser


def test_the_executor_that_is_modelled_has_the_wheels_version():
    import nvfuser_direct

    assert modelled_nvfuser().version == nvfuser_direct.version()


def test_thunder_can_describe_tensors_once_that_was_looked_at(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(thunder.extend, "_executor_map", dict(thunder.extend._executor_map))
    thunders = importlib.import_module("thunder.executors.nvfuserex_impl")
    monkeypatch.delitem(sys.modules, "nvfuser", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nvfuser"):
        thunders.compute_contiguity((2, 3), (3, 1))
    assert without_broken_nvfuser([thunders.ex]) == (thunders.ex,)
    assert thunders.compute_contiguity((2, 3), (1, 2)) == ((True, True), (0, 1))
    del sys.modules["nvfuser"]
