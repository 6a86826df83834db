"""The registry of memory traits: each symbol of this package declares them where it is defined.

Thunder's own symbols have tags, and this package knows them by name. The modules of our symbols (chunk loops,
transfers, replayed random draws, regions that write over their inputs) declare their traits here. So code that reads a
trace needs none of these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import Executor

from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.semantics.kernel_figures import KernelFigures, NotWritten

__all__ = ["PLAIN", "MemoryTraits", "declare", "region_function", "traits_of"]


@dataclass(frozen=True, slots=True)
class MemoryTraits:
    """The memory traits of a symbol; functions take the bound symbol.

    Attributes:
        writes: the arguments that it overwrites, beside those that a result overwrites.
        last_write: in the program nothing reads what it overwrites after it, so the old content needs no protection.
        in_place: nothing reads what it overwrites later, and its results have that memory.
        shares: by a result's name, the argument whose memory that result uses.
        laid_out_as: by a result's name, the argument of which it is a copy with the same strides.
        result_layouts: by a result's name, a meta tensor with its strides, from those of the arguments.
        on_host: the names of values in the host's memory that it reads or makes, each with its device.
        scratch_bytes: bytes held while it runs, beyond arguments and results; None if unknown.
        copies_bytes: bytes of copies of arguments that do not lie as the kernel reads them, by the arguments' layout,
            beside `scratch_bytes`; None if unknown.
        kernels: its kernels on a GPU, by the layout of its arguments; None for all but regions there.
        seconds: its time on a device; None for the roofline's.
        group: the process group with which it communicates inside.
        runs: the operation that it represents.
        random: "saves" the generator's state before it draws, or "replays" from one and so only computes.
        attention_kernel: of attention, whose kernel runs it, a key of `ATTENTION_KERNELS`.
        products: it runs matrix products inside.
        transfers: it moves a tensor between device and host, beside other work.
        beside: it "starts" work beside what follows, and its result is a handle; or it "ends" that work, and takes the
            handle and everything that the work uses.
        valid_values: from made-up values of its arguments, by name, to values with which it runs, as on real ones.
        takes_apart: the region runs the operations of a composite one by one.
    """

    writes: Callable[[BoundSymbol], tuple[TensorProxy, ...]] = lambda bsym: ()
    last_write: bool = False
    in_place: bool = False
    shares: Callable[[BoundSymbol], Mapping[str, TensorProxy]] = lambda bsym: {}
    laid_out_as: Callable[[BoundSymbol], Mapping[str, TensorProxy]] = lambda bsym: {}
    result_layouts: Callable[[BoundSymbol, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda *_: {}
    on_host: Callable[[BoundSymbol], Mapping[str, str]] = lambda bsym: {}
    scratch_bytes: Callable[[BoundSymbol], int] | None = None
    copies_bytes: Callable[[BoundSymbol, Any], int] | None = None
    kernels: Callable[[BoundSymbol, Any], KernelFigures | NotWritten | None] = lambda *_: None
    seconds: Callable[[BoundSymbol, DeviceModel], float | None] = lambda *_: None
    group: Callable[[BoundSymbol], Any] = lambda bsym: None
    runs: Callable[[BoundSymbol], BoundSymbol] = lambda bsym: bsym
    attention_kernel: Callable[[BoundSymbol], str] = lambda bsym: "flash"
    products: bool = False
    random: Literal["", "saves", "replays"] = ""
    transfers: bool = False
    beside: Literal["", "starts", "ends"] = ""
    valid_values: Callable[[BoundSymbol, dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda _, values: values
    takes_apart: bool = False


PLAIN = MemoryTraits()
"""A symbol of which nothing is declared."""

_BY_EXECUTOR: dict[str, Callable[[str], MemoryTraits]] = {}


def declare(executor: Executor, traits: Callable[[str], MemoryTraits]) -> None:
    """Declare the traits of the symbols of one of our executors, by the symbol's name."""
    _BY_EXECUTOR[executor.name] = traits


def traits_of(bsym: BoundSymbol) -> MemoryTraits:
    """The declared traits of a bound symbol's symbol; `PLAIN` if there are none."""
    if bsym.sym.is_fusion:
        return getattr(region_function(bsym), "traits", PLAIN)
    executor = bsym.sym.executor
    declared = _BY_EXECUTOR.get(executor.name) if executor is not None else None
    return declared(bsym.sym.name) if declared is not None else PLAIN


def region_function(bsym: BoundSymbol) -> Any:
    """The function that a fused region's bound symbol calls; None if there is none."""
    return next(iter((bsym._call_ctx or {}).values()), None)
