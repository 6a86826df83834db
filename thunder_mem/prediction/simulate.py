"""Plan and predict for a simulated GPU.

Inside `with simulate("H100-80GB"):` tensors made on "cuda" are fake: they have shapes, strides, storages and a device,
but no data. Modules can be built, `thunder.jit` traces and transforms them as on that GPU, and `predict` follows the
final traces. Queries about the GPU (its memory, its compute capability, the attention kernel of a call) are answered
for the named device.

A fused region of `nvfuser` or `torchcompile` counts by its inputs and outputs, because its kernels are unknown without
the GPU. Bytes kept between two kernels of one region are not counted, and a prediction says so among its `assumptions`.
Most pointwise regions are one kernel and keep nothing. Regions of several reductions, and those of
`fusion="torchcompile"` with matrix products inside, can hold more than predicted.

Nothing can be computed, and PyTorch's autograd engine does not run on fake CUDA tensors: use
`predict` or `predict_step` instead of `loss.backward()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import thunder
import thunder.executors.sdpaex
import thunder.executors.torch_compile
import thunder.executors.utils
import torch
from thunder.core import dtypes
from thunder.executors.utils import SpdaBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_mem.fake_execution.whole_functions import argument_of_a_whole_function, result_of_a_whole_function
from thunder_mem.fusers.fake_regions import modelled_region
from thunder_mem.fusers.fusion_executors import fuser_of, with_fuser
from thunder_mem.fusers.nvfuser_model import modelled_nvfuser
from thunder_mem.memory.device_specs import DeviceSpec, device_spec
from thunder_mem.runtime.simulated_device import CURRENT, SimulatedDevice

__all__ = ["attention_backend_for", "simulate"]


class _NoDeviceMode(FakeTensorMode):
    """Never touches the device, although `torch.cuda.is_available` returns True."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextlib.contextmanager
def simulate(device: str = "H100-80GB", *, fusion: str | None = "mem_pointwise") -> Iterator[SimulatedDevice]:
    """Let this machine stand in for one with the named GPU.

    Args:
        device: one of `thunder_mem.memory.device_specs.DEVICES`.
        fusion: the fusion executor at nvFuser's place in Thunder's default list. "mem_pointwise", Triton by
            Inductor, is what `MemEfficient` uses on a GPU without nvFuser's wheel. "nvfuser" is Thunder's own
            executor; planning needs no wheel, and no result is written over a dying input. "torchcompile" is
            Thunder's. None fuses nothing. A list given to `thunder.jit(executors=...)` takes precedence.

    Yields:
        The `SimulatedDevice`.

    Raises:
        ValueError: an unknown device or fusion, or a simulation is running already.

    Example:
        >>> with simulate("A100-80GB") as device:
        ...     x = torch.empty(2**30, device="cuda")
        >>> x.device.type, x.untyped_storage().nbytes() == 2**32, device.name
        ('cuda', True, 'A100-80GB')
    """
    spec = device_spec(device)
    fuser = fuser_of(fusion, modelled_nvfuser)
    running = CURRENT.get()
    if running is not None:
        raise ValueError(f"{running.name} is being simulated already; leave that simulation first")
    simulated = SimulatedDevice(spec, fusion, _NoDeviceMode(allow_non_fake_inputs=True))
    token = CURRENT.set(simulated)
    with contextlib.ExitStack() as stack:
        stack.callback(CURRENT.reset, token)
        for owner, name, replacement in _replacements(spec):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch.object(FakeTensor, "__copy__", _copied, create=True))
        stack.callback(thunder.extend.set_default_executors, list(thunder.extend.get_default_executors()))
        if fuser is not None:  # so that a list of executors may have its name
            stack.enter_context(mock.patch.dict(thunder.extend._executor_map, {fuser.name: fuser}))
        thunder.extend.set_default_executors(with_fuser(thunder.extend.get_default_executors(), fuser))
        stack.enter_context(simulated.mode)
        yield simulated


def _replacements(spec: DeviceSpec) -> list[tuple[Any, str, Any]]:
    """The replacements that answer for the device: (owner, attribute, replacement)."""
    cuda = torch.cuda
    properties = SimpleNamespace(
        name=spec.marketing_name,
        major=spec.capability[0],
        minor=spec.capability[1],
        total_memory=spec.memory_bytes,
        multi_processor_count=spec.multiprocessors,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=spec.threads_per_multiprocessor,
        regs_per_multiprocessor=65536,
    )
    real_backward = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if any(t.device.type == "cuda" for t in given):
            raise RuntimeError(
                f"autograd cannot run on the simulated {spec.name}: use thunder_mem.predict or predict_step, "
                "which follow the backward trace without it"
            )
        return real_backward(tensors, *args, **kwargs)

    choose = attention_backend_for(spec)
    return [
        (torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None),
        (thunder.torch, "_get_fake_arg", argument_of_a_whole_function),
        (thunder.torch, "_fake_type_to_thunder", result_of_a_whole_function),
        (thunder.executors.sdpaex, "_fused_sdp_choice", choose),
        (thunder.executors.utils, "_fused_sdp_choice", choose),
        (thunder.executors.torch_compile, "make_compiled", modelled_region),
        (torch.autograd, "backward", backward),
        (torch.nn.Module, "_apply", apply_to),
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: 1),
        (cuda, "current_device", lambda: 0),
        (cuda, "set_device", lambda device: None),
        (cuda, "synchronize", lambda device=None: None),
        (cuda, "empty_cache", lambda: None),
        (cuda, "is_current_stream_capturing", lambda: False),
        (cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or spec.capability >= (8, 0)),
        (cuda, "get_device_name", lambda device=None: spec.marketing_name),
        (cuda, "get_device_capability", lambda device=None: spec.capability),
        (cuda, "get_device_properties", lambda device=None: properties),
        (cuda, "mem_get_info", lambda device=None: (spec.usable_bytes, spec.memory_bytes)),
    ]


def apply_to(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module._apply`, on which `module.to(...)` relies. PyTorch's version swaps a parameter's data in place,
    which a fake parameter does not allow. Here the parameter is replaced; tied ones stay tied."""
    made: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}
    for part in module.modules() if recurse else (module,):
        for key, old in part._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                with torch.no_grad():
                    applied = fn(old)
                made[id(old)] = (old, old if applied is old else torch.nn.Parameter(applied, old.requires_grad))
            part._parameters[key] = made[id(old)][1]
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = fn(buffer)
    return module


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """`copy.copy`, by which `ddp` copies parameters: another tensor on the same memory, as for a real parameter."""
    same = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(same, tensor.requires_grad)
    return same.requires_grad_(tensor.requires_grad)


def attention_backend_for(spec: DeviceSpec) -> Callable[..., SpdaBackend]:
    """Thunder's `_fused_sdp_choice`, answered for `spec`.

    The rules are those of PyTorch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, as far as
    shapes, dtypes and the compute capability decide.
    """

    def choose(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        scale: Any = None,
    ) -> SpdaBackend:
        causal = bool(getattr(is_causal, "value", is_causal))
        backends = torch.backends.cuda
        if backends.flash_sdp_enabled() and _flash_takes(spec, query, key, value, attn_mask, causal):
            return SpdaBackend.FLASH_ATTENTION
        if backends.mem_efficient_sdp_enabled() and _efficient_takes(spec, query, key, value, attn_mask, causal):
            return SpdaBackend.MEMORY_EFFICIENT
        return SpdaBackend.MATH if backends.math_sdp_enabled() else SpdaBackend.ERROR

    return choose


def _fused_shapes(query: Any, key: Any, value: Any) -> bool:
    tensors = (query, key, value)
    return (
        all(t.ndim == 4 for t in tensors)
        and all(t.shape[:2] == query.shape[:2] for t in tensors)
        and all(int(n) > 0 for t in tensors for n in t.shape)
        and all(dtypes.to_strong_dtype(t.dtype) == dtypes.to_strong_dtype(query.dtype) for t in tensors)
    )


def _flash_takes(spec: DeviceSpec, query: Any, key: Any, value: Any, attn_mask: Any, causal: bool) -> bool:
    if spec.capability < (8, 0) or attn_mask is not None or not _fused_shapes(query, key, value):
        return False
    size = int(query.shape[-1])
    if dtypes.to_strong_dtype(query.dtype) not in (dtypes.float16, dtypes.bfloat16) or size > 256:
        return False
    if any(int(t.shape[-1]) != size for t in (key, value)) or (causal and query.shape[-2] != key.shape[-2]):
        return False
    # Consumer chips of the Ampere and Ada generations lack the shared memory for the backward of large heads.
    small = (8, 6) <= spec.capability <= (8, 9)
    return not (small and size > 192 and any(t.requires_grad for t in (query, key, value)))


def _efficient_takes(spec: DeviceSpec, query: Any, key: Any, value: Any, attn_mask: Any, causal: bool) -> bool:
    accepted = [dtypes.float32, dtypes.float16] + ([dtypes.bfloat16] if spec.capability >= (8, 0) else [])
    if spec.capability < (5, 0) or not _fused_shapes(query, key, value):
        return False
    if int(query.shape[-1]) != int(key.shape[-1]):
        return False
    # `check_head_dim_size_mem_efficient`: the elements that tensor cores take at once.
    of_float32 = 4 if spec.capability >= (8, 0) else 1
    unit = of_float32 if dtypes.to_strong_dtype(query.dtype) is dtypes.float32 else 8
    if any(int(t.shape[-1]) % unit for t in (query, value)):
        return False
    return dtypes.to_strong_dtype(query.dtype) in accepted and not (causal and attn_mask is not None)
