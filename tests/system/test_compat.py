"""What `thunder_mem.compat` changes. With which versions it was tried: `docs/first_steps.md`."""

import subprocess
import sys
from datetime import datetime, timezone

import pytest
from packaging.version import Version

import thunder_mem.compat as compat


def test_gone_methods_come_back_and_raise():
    class Tensor:
        def rename(self, name):
            return name

    assert compat._with_named_tensor_methods(Tensor).startswith("torch.Tensor has align_as, align_to, has_names, refin")
    assert Tensor().rename("a") == "a"
    with pytest.raises(NotImplementedError, match=r"has no named tensors, and no Tensor\.align_to"):
        Tensor().align_to("a")
    assert compat._with_named_tensor_methods(Tensor) == ""


def test_lazy_graph_modules_are_off_from_2_12_on(monkeypatch):
    monkeypatch.setattr(compat._lazy_graph_module, "_force_skip_lazy_graph_module_flag", False)
    assert compat._with_plain_graph_modules(Version("2.11.1")) == ""
    assert not compat._lazy_graph_module._force_skip_lazy_graph_module_flag
    assert compat._with_plain_graph_modules(Version("2.12.0+cpu"))
    assert compat._lazy_graph_module._force_skip_lazy_graph_module_flag


def test_apply_in_c_gets_a_method_in_python_that_calls_it():
    class InC(datetime):  # whose `fromtimestamp` is a class method in C, as `apply` is in PyTorch 2.15
        pass

    class Base:
        apply = InC.fromtimestamp

    class Function(Base):
        pass

    assert compat._with_apply_in_python(Function) == "torch.autograd.Function.apply is a Python method"
    assert Function.apply.__func__ and Function.apply(0, timezone.utc) == datetime(1970, 1, 1, tzinfo=timezone.utc)
    assert compat._with_apply_in_python(Function) == ""


@pytest.mark.slow
def test_it_needs_no_thunder_and_changes_nothing_that_the_installed_version_has():
    program = """
import sys, torch
before = torch.Tensor.rename if hasattr(torch.Tensor, "rename") else None, torch.autograd.Function.apply
import thunder_mem.compat as compat
assert "thunder" not in sys.modules
if torch.__version__ < (2, 12):
    assert compat.changes == () and before == (torch.Tensor.rename, torch.autograd.Function.apply)
import thunder
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program]).returncode == 0
