"""What Thunder and the wheel make of each other."""

import importlib
import sys
import warnings

import pytest
import thunder
import torch

from thunder_mem import MemEfficient, predict, simulate
from thunder_mem.fusers.nvfuser import without_broken_nvfuser
from thunder_mem.fusers.nvfuser_fallback import GuardedFusion
from thunder_mem.fusers.nvfuser_model import modelled_nvfuser
from thunder_mem.regions.compiled_region import CompileWarning


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


def test_where_nvfuser_fails_inductor_runs_the_region():
    """Without a GPU nvFuser fails in every region."""

    def fn(x):
        return torch.sin(x) * 2 + torch.exp(-x)

    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)])
        predict(jitted, torch.ones(8, 8, device="cuda"))
        region = next(b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.is_fusion)
    guarded = next(iter(region._call_ctx.values()))
    assert isinstance(guarded, GuardedFusion)
    real = GuardedFusion(guarded.definition.definition, region.subsymbols, region.args, region.output)
    x = torch.randn(8, 8)
    with pytest.warns(CompileWarning, match="nvFuser failed in a region .*; Inductor runs it"):
        (found,) = real(x)
    torch.testing.assert_close(found, fn(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(real(x + 1)[0], fn(x + 1))
