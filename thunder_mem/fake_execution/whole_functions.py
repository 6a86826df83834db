"""Functions that PyTorch runs and differentiates whole, on fake CPU tensors that stand for a simulated GPU's.

Autograd's engine does not run on fake CUDA tensors, and for recurrent layers PyTorch asks the driver about cuDNN. Both
the shapes that tracing asks for and the memory that a prediction follows are therefore found on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import thunder.torch as ltorch
import torch
from thunder.core.devices import DeviceType, to_device, to_torch_device
from thunder.core.dtypes import to_dtype, to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.torch import _vjp_impl
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from thunder_mem.fake_execution.replay import Ran, tensor_proxies
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.output_layout import describe, lay_out
from thunder_mem.runtime.simulated_device import simulated_device
from thunder_mem.torch_functions.recurrent import RECURRENT
from thunder_mem.torch_functions.whole_gradients import mem_whole_ex

__all__ = ["argument_of_a_whole_function", "result_of_a_whole_function", "run_whole_on_cpu", "runs_whole_on_cpu"]

_argument, _result = ltorch._get_fake_arg, ltorch._fake_type_to_thunder
_STAND_FOR_CUDA: WeakSet[FakeTensorMode] = WeakSet()


def argument_of_a_whole_function(value: Any) -> Any:
    """Thunder's `_get_fake_arg`, which makes the arguments of its meta functions, on the CPU."""
    made = _argument(value)
    device = made if isinstance(made, torch.device) else getattr(made, "device", None)
    if device is None or device.type != "cuda":
        return made
    _STAND_FOR_CUDA.add(cast(FakeTensorMode, torch._guards.active_fake_mode()))
    if isinstance(made, torch.device):
        return torch.device("cpu")
    with torch.no_grad():
        twin = torch.empty_like(made, device="cpu")
    return twin.requires_grad_(made.requires_grad)


def result_of_a_whole_function(value: Any) -> Any:
    """Thunder's `_fake_type_to_thunder`, which makes proxies of their results: on the GPU that the CPU stands for."""
    if not isinstance(value, FakeTensor) or value.fake_mode not in _STAND_FOR_CUDA:
        return _result(value)
    return TensorProxy(
        shape=value.shape, device=to_device("cuda"), dtype=to_dtype(value.dtype), requires_grad=value.requires_grad
    )


def runs_whole_on_cpu(bsym: BoundSymbol) -> bool:
    """Whether a prediction follows the operation so: on a simulated GPU."""
    if simulated_device() is None or all(p.device.devicetype is DeviceType.CPU for p in tensor_proxies(bsym.flat_outs)):
        return False
    called = (bsym._call_ctx or {}).get(bsym.sym.name)
    is_gradient = isinstance(called, partial) and called.func is _vjp_impl
    return is_gradient or bsym.sym.executor is mem_whole_ex or bsym.sym.name in _RECURRENT_NAMES


_RECURRENT_NAMES = {function.__name__ for function in RECURRENT}


def run_whole_on_cpu(bsym: BoundSymbol, run: Callable[[dict[str, Any]], Any], env: dict[str, Any]) -> Ran:
    """Run it on CPU tensors laid out like its inputs, and give `env` such outputs on their own devices.

    Where it does not run without values, the trace's proxies say what its outputs are.
    """
    inputs = {p.name: env[p.name] for p in tensor_proxies(bsym.flat_args) if isinstance(env.get(p.name), torch.Tensor)}
    twins = dict(zip(inputs, lay_out(describe(inputs.values(), ()), (), ["cpu"] * len(inputs)), strict=True))
    there = {**env, **twins}
    outs = tensor_proxies(bsym.flat_outs)
    with AllocationWatch() as watch:
        try:
            run(there)
        except (DataDependentOutputException, DynamicOutputShapeException):  # a fake tensor has no values
            there.update((p.name, torch.empty(p.shape, dtype=to_torch_dtype(p.dtype), device="cpu")) for p in outs)
    layouts = describe((there.get(p.name) for p in outs), list(twins.values()))
    ran = Ran(watch.peak_bytes - watch.live_bytes(), watch.launches)
    made = lay_out(layouts, list(inputs.values()), [to_torch_device(p.device) for p in outs])
    env.update((p.name, t) for p, t in zip(outs, made, strict=True))
    return ran
