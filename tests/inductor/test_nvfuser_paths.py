"""What differs for nvFuser, without its wheel: a stand-in whose regions run op by op, and Thunder's own executor.

`make test-nvfuser` asks nvFuser itself.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.proxies import unvariableify, variableify
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor
from torch import nn
from torch.nn import functional as F

from thunder_mem import MemEfficient, last_plan, predict, predict_step, simulate
from thunder_mem.fusers.nvfuser import installed_nvfuser, without_broken_nvfuser
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex, region_function
from thunder_mem.trace.verification import VerificationError


class nvFuserExecutor(FusionExecutor):  # the planner knows it by this name
    """Takes what `mem_pointwise` takes, only if a tensor is "on its device" (float32 stands for CUDA)."""

    def __init__(self):
        super().__init__("nvfuser", version="0")
        self.regions = []

    def can_execute(self, bsym):
        return mem_pointwise_ex.can_execute(bsym)

    def can_fuse(self, bsym):
        return mem_pointwise_ex.can_fuse(bsym)

    def has_cuda_input_or_output(self, bsym):
        tensors = [p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if hasattr(p, "dtype")]
        return any(thunder.dtypes.to_torch_dtype(p.dtype) is torch.float32 for p in tensors)

    def flatten(self, bsym):
        return [bsym] if self.can_execute(bsym) else [leaf for part in bsym.subsymbols for leaf in self.flatten(part)]

    def fuse(self, region, fusion_counter):
        """As the real one: of composites their operations, without those that nobody reads, nor what only they read."""
        inputs, outputs = (list(map(unvariableify, group)) for group in (region.inputs, region.outputs))
        flat, needed = TraceCtx(None), set()
        flat.bound_symbols = [leaf for bsym in region.bound_symbols for leaf in self.flatten(bsym)]
        flat.bound_symbols.append(prims.python_return.bind(outputs, output=None))
        *bsyms, _ = dce(flat, needed).bound_symbols
        inputs = [x for x in inputs if variableify(x) in needed]
        self.regions.append([b.sym.name for b in bsyms])
        run = region_function(bsyms, inputs, outputs)
        return self.register_temporary_operation(
            f"nvFusion{fusion_counter}", run, inputs=inputs, outputs=outputs, bsyms=bsyms
        )


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)


def compiled(fn, *args, executor=None):
    executor = executor or nvFuserExecutor()
    jitted = thunder.jit(fn, executors=[executor], transforms=[MemEfficient(strict=True, verify=True)])
    return jitted, executor, jitted(*args)


def test_regions_go_to_nvfuser_and_keep_its_names():
    x = torch.randn(8, 8)
    jitted, executor, out = compiled(lambda x: ((x + 1).sin() @ x).cos() * 2, x)
    torch.testing.assert_close(out, ((x + 1).sin() @ x).cos() * 2)
    assert len(executor.regions) == 2
    assert {r.executor for r in last_plan(jitted).regions} == {"nvfuser", None}
    names = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    assert [n for n in names if n.startswith("nvFusion")] == ["nvFusion0", "nvFusion1"]


def test_what_is_not_on_its_device_stays_outside():
    x = torch.randn(8, 8, dtype=torch.float64)
    _, executor, out = compiled(lambda x: (x + 1).sin().cos(), x)
    torch.testing.assert_close(out, (x + 1).sin().cos())
    assert not executor.regions


# ---- composites are taken apart ----


def composites(x, y):
    """Of composites with an operand that their operations do not read, and with results that nobody does."""
    like = torch.zeros_like(y) + F.softmax(x, -1)
    _, mean = torch.var_mean(x, -1, keepdim=True)
    return F.gelu(like.type_as(x)) * F.layer_norm(x, (8,)) - mean


def test_a_region_of_prims_is_the_region_of_composites_that_was_planned():
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    _, executor, out = compiled(composites, x, y)
    expected = composites(x.double(), y.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    (actual,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.sum(), x)[0], atol=1e-5, rtol=1e-5)
    assert not {"softmax", "gelu", "layer_norm", "type_as"} & {name for region in executor.regions for name in region}


def test_a_region_of_other_operations_is_refused():
    class Wrong(nvFuserExecutor):
        def flatten(self, bsym):
            parts = super().flatten(bsym)
            return [p.from_bsym(sym=prims.cos) if p.sym.id == prims.PrimIDs.EXP else p for p in parts]

    with pytest.raises(VerificationError, match="cos"):
        compiled(lambda x: F.softmax(x, -1) * 2, torch.randn(8, 8), executor=Wrong())


# ---- Thunder's own executor, on a simulated GPU ----


def layer(x, w):
    return torch.relu(x @ w) * 2


def test_nothing_is_written_over_what_dies_in_a_region_of_nvfuser():
    peaks, overwritten = {}, {}
    for fusion in ("nvfuser", "mem_pointwise"):
        with simulate(fusion=fusion):
            x, w = (torch.empty(256, 256, device="cuda") for _ in range(2))
            step = thunder.jit(layer, transforms=[MemEfficient(strict=True, verify=True)])
            peaks[fusion] = predict(step, x, w).peak_bytes
            overwritten[fusion] = last_plan(step).overwritten_peak_bytes
            assert {r.executor for r in last_plan(step).regions} == {fusion, None}
    matrix = 4 * 256 * 256
    assert peaks == {"nvfuser": 4 * matrix, "mem_pointwise": 3 * matrix} == overwritten


def test_thunders_nvfuser_is_there_while_it_is_simulated_and_no_longer():
    before = thunder.extend.get_executor("nvfuser"), thunder.get_default_executors()
    with simulate(fusion="nvfuser"):
        x, w = (torch.empty(8, 8, device="cuda") for _ in range(2))
        assert thunder.get_default_executors()[-1] is thunder.extend.get_executor("nvfuser")
        jitted = thunder.jit(layer, executors=["sdpa", "nvfuser"])
        assert jitted(x, w).shape == (8, 8)
    assert "nvFusion0" in [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    assert before == (thunder.extend.get_executor("nvfuser"), thunder.get_default_executors())


@pytest.mark.parametrize("budget", [None, 1])
def test_a_dropout_of_nvfuser_is_drawn_from_its_seed_again(budget):
    """Its seed and offset are read off the generator, which no prediction asks: nothing is saved but numbers."""
    with simulate(fusion="nvfuser"):
        with torch.device("cuda"):
            model, x = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)), torch.randn(32, 64)
        how = MemEfficient(strict=True, verify=True, budget=budget, on_infeasible="warn" if budget else "error")
        jitted = thunder.jit(model, transforms=[how])
        if budget:
            with pytest.warns(UserWarning, match="no plan keeps the peak"):
                predict_step(jitted, None, lambda out: out.sum(), x)
        else:
            predict_step(jitted, None, lambda out: out.sum(), x)
    names = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    assert names.count("get_and_update_rng_state_impl") == 1
    backward = [b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if b.sym.is_fusion]
    assert "uniform_philox" in [part.sym.name for b in backward for part in b.subsymbols]


# ---- half of an installation ----


@pytest.fixture
def installed(monkeypatch):
    """Thunder's module of nvFuser as it is where the wheel has no module `nvfuser`."""

    def compute_contiguity(shape, stride):
        from nvfuser import compute_tensor_descriptor

        return compute_tensor_descriptor(shape, stride)

    module = ModuleType("thunder.executors.nvfuserex_impl")
    module.ex, module.compute_contiguity = nvFuserExecutor(), compute_contiguity
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "nvfuser", raising=False)
    monkeypatch.setitem(thunder.extend._executor_map, "nvfuser", module.ex)
    yield module.ex
    sys.modules.pop("nvfuser", None)


def test_the_module_that_describes_tensors_stands_in_for_the_missing_one(installed, monkeypatch):
    direct = SimpleNamespace(compute_tensor_descriptor=lambda shape, stride: ((True,), (0,)))
    monkeypatch.setitem(sys.modules, "nvfuser_direct", direct)
    assert without_broken_nvfuser([installed, mem_pointwise_ex]) == (installed, mem_pointwise_ex)
    assert sys.modules["nvfuser"] is direct
    assert installed_nvfuser() is installed


def test_an_nvfuser_that_cannot_run_counts_as_not_there(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvfuser_direct", SimpleNamespace())
    monkeypatch.setattr(thunder.extend, "_default_executors", [installed])
    x = torch.randn(8, 8)
    jitted = thunder.jit(lambda x: (x + 1).sin(), transforms=[MemEfficient(strict=True)])
    with pytest.warns(UserWarning, match=r"nvFuser 0 counts as not installed.*ImportError: cannot import name"):
        jitted(x)
    assert {r.executor for r in last_plan(jitted).regions} == {"mem_pointwise"}
    assert "nvfuser" not in sys.modules
    with pytest.raises(ValueError, match=r"does not work with this Thunder .*pip install torch==2\.10\.0"):
        installed_nvfuser()


def test_a_missing_wheel_is_one_sentence(monkeypatch):
    monkeypatch.delitem(thunder.extend._executor_map, "nvfuser", raising=False)
    with pytest.raises(ValueError, match=r"needs a GPU.*simulate\("):
        installed_nvfuser()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"nvFuser is not installed: pip install .*nvfuser-cu128-torch210"):
        installed_nvfuser()
