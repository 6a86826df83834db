"""What differs for nvFuser, on trace level: an executor of its name and shape, whose regions run op by op."""

import thunder
import torch
from thunder.extend import FusionExecutor

from thunder_mem import MemEfficient, last_plan
from thunder_mem.executors import mem_pointwise_ex, region_function


class nvFuserExecutor(FusionExecutor):  # the planner knows it by this name
    """Takes what `mem_pointwise` takes, only if a tensor is "on its device" (float32 stands for CUDA)."""

    def __init__(self):
        super().__init__("nvfuser", version="0")
        self.regions = []

    def can_fuse(self, bsym):
        return mem_pointwise_ex.can_fuse(bsym)

    def has_cuda_input_or_output(self, bsym):
        tensors = [p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if hasattr(p, "dtype")]
        return any(thunder.dtypes.to_torch_dtype(p.dtype) is torch.float32 for p in tensors)

    def fuse(self, region, fusion_counter):
        inputs, outputs = ([v.proxy for v in group] for group in (region.inputs, region.outputs))
        self.regions.append([b.sym.name for b in region.bound_symbols])
        run = region_function(region.bound_symbols, inputs, outputs)
        return self.register_temporary_operation(
            f"nvFusion{fusion_counter}", run, inputs=inputs, outputs=outputs, bsyms=region.bound_symbols
        )


def compiled(fn, *args):
    executor = nvFuserExecutor()
    jitted = thunder.jit(fn, executors=[executor], transforms=[MemEfficient(strict=True)])
    with torch.no_grad():
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
