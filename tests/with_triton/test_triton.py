"""The Triton kernels of fused regions, written and compiled for a GPU that is not there."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.litgpt.matrix import MODELS
from tests.with_triton import interpreter
from tests.with_triton.modules import DEVICE, Modules, collected, compiling, cubin, misread, modules_of
from thunder_mem import MemEfficient, StepInBackward, Tiles, last_plan, predict, simulate
from thunder_mem.fake_execution.scratch import KERNELS, REGIONS
from thunder_mem.regions.inductor_target import written
from thunder_mem.regions.kernel_module import KernelModule, read_module

pytest.importorskip("triton")

_compiled: set[str] = set()  # kernels by their source: models share them


def new_bytes(region) -> int:
    """Of the storages that a region's outputs show and its inputs do not, by the region's own operations."""
    with simulate(DEVICE):
        args = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda") if isinstance(a, torch.Tensor) else a
            for a in region.args
        ]
        outputs = region.function(*args)
    given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
    return sum(nbytes for key, nbytes in storages.items() if key not in given)


def check(modules: Modules) -> int:
    """Every region of a program is written, compiled, and reads nothing that is overwritten; how many overwrite."""
    assert KERNELS in modules.assumptions and REGIONS not in modules.assumptions
    assert not [a for a in modules.assumptions if "is not counted" in a]
    for region in modules.written:
        inputs = sum(isinstance(a, torch.Tensor) for a in region.args)
        assert misread(region.module, inputs) == []
        assert region.module.new_bytes == new_bytes(region)
    sources = {s for region in modules.written for s in region.module.kernels.values()} - _compiled
    with compiling():
        assert all(cubin(source).startswith(b"\x7fELF") for source in sorted(sources))
    _compiled.update(sources)
    return sum(region.function.reuse is not None for region in modules.written)


@pytest.mark.slow  # every kernel is compiled
@pytest.mark.parametrize("loss_inside", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_every_region_of_the_matrix_is_written_compiled_and_reads_nothing_that_is_overwritten(model, loss_inside):
    assert sum(check(modules_of(model, checkpointing=on, loss_inside=loss_inside)) for on in (True, False))


@pytest.mark.slow  # every kernel is compiled
@pytest.mark.parametrize("model", ["longchat-7b-16k", "gpt2-124m"])
def test_so_is_every_region_of_tiles_beside_updates_in_the_backward(model):
    """The small models have too few rows for tiles by default. Gradients are sums of tiles, and die in updates."""

    def tiled(module):
        optimizer = StepInBackward(torch.optim.AdamW(module.parameters()))
        return MemEfficient(strict=True, tile=Tiles(rows=256), optimizer=optimizer)

    modules = modules_of(model, checkpointing=True, loss_inside=True, transform=tiled)
    assert check(modules)
    contents = {region.function.content for region in modules.written}
    assert len(contents & {function.content for function in modules.in_loops}) > 4


@pytest.mark.slow  # Triton's interpreter, in a process of its own
def test_kernels_compute_what_the_operations_do():
    """On CPU tensors, against float64, without and with results written over inputs, in any order of programs."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", interpreter.__name__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(found) > 30 and sum(f["over"] for f in found) > 10
    for f in found:
        rounded = "bfloat16" in f["region"] or "dtype" in f["region"]
        assert f["error"] < (2e-2 if rounded else 1e-6), f
        assert f["same in reverse"], f


# --- the checks themselves ----------------------------------------------------------------------------


def module_of(fn, *shapes, overwrites=0) -> KernelModule:
    """What Inductor writes for a function of CUDA tensors that may write over its first argument."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with simulate(DEVICE):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.utils._python_dispatch._disable_current_modes(), mode:
            args = [torch.empty(shape, device="cuda") for shape in shapes]
            graph = make_fx(fn, decomposition_table=select_decomp_table())(*args)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            text, _ = written(lambda: compile_fx_inner(graph, args))
            return read_module(text, [torch.empty(shape, device="meta") for shape in shapes])


def overwritten_after_a_sum(*args):
    (x,) = args  # whose name in the module is then that of a region's input
    total = x.sum(0)
    x.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True)))
    return x, total


def test_a_read_of_what_is_overwritten_is_found():
    """Here the sum comes first; the same module, with the write before it or in its midst, must not pass."""
    module = module_of(overwritten_after_a_sum, (4096, 1024))
    assert len(module.launches) == 3 and misread(module, 1) == []
    first, *others, write = module.launches
    (said,) = misread(replace(module, launches=(write, first, *others)), 1)
    assert said == f"{first.kernel} reads input 0, which is overwritten by then"
    stores = re.findall(r"    tl\.store\(out_ptr\d \+ .*\n", module.kernels[write.kernel])
    early = module.text.replace(stores[-1], "")
    loads = re.findall(r"    tmp0 = tl\.load\(in_ptr0 .*\n", module.kernels[write.kernel])
    early = early.replace(loads[0], stores[-1] + loads[0])
    assert misread(replace(module, text=early), 1) == [f"{write.kernel} reads input 0 after it has written it"]


def test_what_a_module_does_with_memory_is_read_by_running_it():
    def two_sums(x):
        y = (x * 2).sin()
        return y - y.sum(0), y.sum()

    module = module_of(two_sums, (4096, 1024))
    assert len(module.launches) > 1 and module.new_bytes == (4096 * 1024 + 1) * 4
    assert 0 < module.scratch_bytes < 4096 * 1024 * 4
    assert module.moved_bytes > 2 * 4096 * 1024 * 4


def rotated_gradient(queries, keys, cos, sin):
    """The backward of rotary embeddings: halves change places, then heads and tokens do, and both are put together."""

    def rotated(grad):
        direct, turned = ((grad.float() * table.float()).to(torch.bfloat16) for table in (cos, sin))
        left, right = turned[..., :32], turned[..., 32:]
        total = (direct.float() + F.pad(-left.float(), (32, 0))).to(torch.bfloat16)
        total = (total.float() + F.pad(right, (0, 32)).float()).to(torch.bfloat16)
        return total.permute(0, 2, 1, 3).reshape(2, 256, 8 * 64)

    return torch.cat((rotated(queries), rotated(keys)), -1)


@pytest.mark.slow
def test_a_region_keeps_no_value_between_kernels_that_it_can_compute_again():
    with simulate(DEVICE), collected() as found:
        a, b = (torch.empty(2, 8, 256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        tables = [torch.empty(256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        jitted = thunder.jit(rotated_gradient, transforms=[MemEfficient(strict=True)])
        prediction = predict(jitted, a, b, *tables)
        kernels = last_plan(jitted).decisions[-1]
    (region,) = found
    assert region.module.scratch_bytes == 0 and len(region.module.launches) == prediction.launches == 1
    assert kernels.what == "kernels" and kernels.how == "1 kernel of 1 region, which keep nothing between them"
