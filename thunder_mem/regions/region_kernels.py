"""The number of kernels of a fused region on CUDA, and the bytes kept between them, without a GPU.

Inductor writes the region's code for the device (`inductor_target.py`), and the code runs without its kernels
(`kernel_module.py`). That takes a fifth of a second for a region, so it happens once for each content, layout and
device. The figures are kept between processes, like those of single operations (`runtime/scratch_cache.py`).
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy, pyval
from thunder.core.symbol import BoundSymbol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.regions.compiled_region import RegionFunction
from thunder_mem.regions.inductor_target import can_write, written
from thunder_mem.regions.kernel_module import KernelModule, read_module
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.output_layout import meta_like
from thunder_mem.semantics.kernel_figures import KernelFigures, NotWritten
from thunder_mem.semantics.layout import Layout
from thunder_mem.semantics.op_traits import region_function

__all__ = ["kernel_figures", "kernel_module", "region_function_of"]


_NOTHING = KernelFigures(0, 0, 0)
_FIGURES_OF: WeakKeyDictionary[RegionFunction, dict[Hashable, KernelFigures | NotWritten]] = WeakKeyDictionary()


def region_function_of(bsym: BoundSymbol) -> RegionFunction | None:
    """The compiled function, if it is a region of `mem_pointwise`."""
    function = region_function(bsym) if bsym.sym.is_fusion else None
    return function if isinstance(function, RegionFunction) else None


def kernel_figures(
    bsym: BoundSymbol, tensors: Mapping[str, torch.Tensor] | Layout
) -> KernelFigures | NotWritten | None:
    """The figures of a `mem_pointwise` region's kernels on the real or simulated CUDA device.

    Args:
        bsym: any bound symbol of a final trace.
        tensors: its arguments by name, on any device, with their real layout.

    Returns:
        None for another bound symbol, or on a CPU.
    """
    function = region_function_of(bsym)
    if function is None:
        return None
    device = next((p.device for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)), None)
    if device is None or device.devicetype is not DeviceType.CUDA:
        return None
    if not can_write():
        return NotWritten(
            "values between the kernels of regions are not counted, as there is neither a GPU nor Triton here"
        )
    args = tuple(tensors[p.name] if isinstance(p, TensorProxy) else pyval(p) for p in bsym.args)
    layouts = tuple(
        (tuple(a.shape), a.stride(), str(a.dtype)) if isinstance(a, torch.Tensor) else repr(a) for a in args
    )
    key = (torch.cuda.get_device_name(0), layouts)
    known = _FIGURES_OF.setdefault(function, {})
    if key not in known:
        known[key] = _recalled(function, args, repr((*key, function.content)), bsym.sym.name)
    return known[key]


def _recalled(function: RegionFunction, args: tuple[Any, ...], text: str, name: str) -> KernelFigures | NotWritten:
    """The figures from this machine's table, if they are known."""
    table = scratch_cache.kernel_table(_software(), (_to_json, _from_json))
    keeps = " at 0x" not in text
    if keeps and (known := table.find(text)) is not None:
        return known
    try:
        module = kernel_module(function, args)
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), "")
        return NotWritten(f"{name}: values between its kernels are not counted ({type(error).__name__}: {cause})")
    figures = _NOTHING
    if module is not None:
        figures = KernelFigures(len(module.launches), module.scratch_bytes, module.moved_bytes)
    if keeps:
        table.add(text, figures)
    return figures


def kernel_module(function: RegionFunction, args: tuple[Any, ...]) -> KernelModule | None:
    """The module that Inductor writes for a region on CUDA.

    Args:
        function: the region.
        args: tensors with the layout of its arguments, on any device, and its numbers.

    Returns:
        None for a region of views, which starts no kernel.

    Raises:
        Exception: any error of Inductor's.
    """
    # Inductor makes tensors, too, and the caller's default device may be a simulated GPU.
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        on_device = tuple(
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda") if isinstance(a, torch.Tensor) else a
            for a in args
        )
        flag = torch.zeros((), dtype=torch.bool, device="cuda")
        module = written(lambda: function.compile(on_device, flag))
    if module is None:
        return None
    text, count = module
    with _disable_current_modes(), torch.device("cpu"):
        # A region that writes over its inputs also takes the flag.
        given = [*(a for a in args if isinstance(a, torch.Tensor)), torch.empty((), dtype=torch.bool)]
        return read_module(text, meta_like(given[:count]))


def _to_json(figures: KernelFigures) -> list[int]:
    return [figures.launches, figures.scratch_bytes, figures.moved_bytes]


def _from_json(entry: Any) -> KernelFigures:
    if type(entry) is not list or any(type(n) is not int or n < 0 for n in entry):
        raise ValueError(f"{entry!r} is no list of numbers from 0 up")
    return KernelFigures(*entry)


@cache
def _software() -> str:
    """The software that determines the code of a region, beside its content and the device."""
    import triton

    own = hashlib.sha256()
    for name in _WRITERS:
        own.update((pathlib.Path(__file__).parent / f"{name}.py").read_bytes())
    return f"triton {triton.__version__}, own code {own.hexdigest()[:16]}"


# The modules that lead from a region's content to Inductor's code and its figures.
_WRITERS = (
    "compiled_region",
    "region_inlining",
    "region_outputs",
    "pairwise_sums",
    "inplace_outputs",
    "inductor_target",
    "kernel_module",
    "region_kernels",
    "../trace/python_function",
)

RegionFunction.traits = replace(RegionFunction.traits, kernels=kernel_figures)
