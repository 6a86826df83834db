"""Transfers of tensors to the host and back: four symbols and their runtime. Also other work beside the device's own.

`offload` starts a copy to the host and `offload_wait` ends it. Only then may the tensor's memory be reused, so
`offload_wait` also takes the tensor, which keeps it alive. `prefetch` makes a new tensor on the device and starts the
copy into it; `prefetch_wait` returns it filled. Operations between start and wait run beside the copy. So a value lives
exactly where the trace says, and nothing depends on the allocator's `record_stream`.

On CUDA copies run between the device and pinned memory. Each stream that asks for copies has two side streams for them:
one for copies to the host and one for copies back, because the link takes both ways at once. On a CPU the copies save
nothing, but they are real, into memory that is not PyTorch's. So all of this is tested and measured without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from thunder.core.devices import cpu
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = [
    "host_like",
    "is_host_memory_now",
    "is_transfer",
    "mem_offload_ex",
    "offload",
    "offload_wait",
    "offloaded_names",
    "prefetch",
    "prefetch_wait",
    "run_beside",
    "start_copy",
    "wait_for",
]

mem_offload_ex = OperatorExecutor("mem_offload", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""

# A copy or other work in flight, as an attribute of its target or handle; the trace keeps that very object.
_IN_FLIGHT = "_thunder_mem_in_flight"


class _InFlight:
    """Work on another stream, for which the device's current stream has not waited yet.

    If the tensor that carries it is deleted earlier, because of an error, no memory of the work is reused before it
    ends.
    """

    def __init__(self, device: torch.device, ended: torch.cuda.Event | None, kept: Sequence[Any] = ()) -> None:
        self.device, self.ended, self.kept = device, ended, kept

    def wait(self) -> None:
        if self.ended is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ended)
        self.ended, self.kept = None, ()

    def __del__(self) -> None:
        self.wait()


@cache
def _side_stream(device: torch.device, to_host: bool, of: int) -> torch.cuda.Stream:
    """The stream for copies of one direction, which the work of stream `of` asks for."""
    return torch.cuda.Stream(device)


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copies_beside(t: torch.Tensor) -> bool:
    return t.is_cuda and not isinstance(t, FakeTensor)


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device, to_host: bool) -> None:
    """Start a copy on its direction's own stream, after all earlier work of the current stream."""
    current = torch.cuda.current_stream(device)
    side = _side_stream(device, to_host, current.stream_id)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    setattr(target, _IN_FLIGHT, _InFlight(device, side.record_event()))


def start_copy(target: torch.Tensor, source: torch.Tensor, *, to_host: bool) -> None:
    """Start a copy from a device to the host, or back, beside the work that is asked of the device later.

    It runs after all work that was asked of the device before. Until `wait_for(target)` the caller keeps both ends,
    and neither changes them nor reads the target.
    """
    on_device = source if to_host else target
    if _copies_beside(on_device):
        _copy(target, source, on_device.device, to_host)
    elif not isinstance(on_device, FakeTensor):
        target.copy_(source)


def wait_for(t: torch.Tensor) -> None:
    """Work that is asked of the device from now on runs after the copy into `t`, or the work whose handle it is."""
    if (work := vars(t).pop(_IN_FLIGHT, None)) is not None:
        work.wait()


def run_beside(work: Callable[..., None], handle: torch.Tensor, *tensors: torch.Tensor, kept: Sequence[Any]) -> None:
    """Run `work(*tensors)`; on CUDA on a stream of its own, after all work that was asked of the device before.

    Its copies have streams of their own as well, so other copies do not wait for them. Until `wait_for(handle)` the
    caller keeps `tensors`, and nothing else changes or reads what the work writes.

    Args:
        kept: what the work uses and the CPU may let go meanwhile; it stays until `wait_for`.
    """
    if not _copies_beside(handle):
        work(*tensors)
        setattr(handle, _IN_FLIGHT, _InFlight(handle.device, None, kept))
        return
    side = _stream_beside(handle.device)
    side.wait_stream(torch.cuda.current_stream(handle.device))
    try:
        with torch.cuda.stream(side):
            work(*tensors)
    finally:
        setattr(handle, _IN_FLIGHT, _InFlight(handle.device, side.record_event(), kept))


_making_host_memory: ContextVar[bool] = ContextVar("thunder_mem_making_host_memory", default=False)


def is_host_memory_now() -> bool:
    """Whether `host_like` makes a fake or meta tensor now, which no watch may count as the device's memory."""
    return _making_host_memory.get()


def host_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Host memory for a tensor, with the tensor's layout if it is dense, and another dtype if one is given."""
    dtype = dtype or t.dtype
    if isinstance(t, FakeTensor) or t.is_meta:
        token = _making_host_memory.set(True)
        try:
            return torch.empty_like(t, dtype=dtype, device="meta" if t.is_meta else "cpu", requires_grad=False)
        finally:
            _making_host_memory.reset(token)
    if t.is_cuda:
        return torch.empty_like(t, dtype=dtype, device="cpu", pin_memory=True, requires_grad=False)
    # Not PyTorch's memory, which counts on a CPU.
    buffer = torch.from_numpy(np.empty(max(1, t.numel()) * dtype.itemsize, dtype=np.uint8))  # torch views no empty one
    return buffer.view(dtype).as_strided(t.shape, torch.empty_like(t, device="meta").stride())


def _offload_meta(t: TensorProxy) -> TensorProxy:
    return TensorProxy(shape=t.shape, device=cpu, dtype=t.dtype, requires_grad=False)


def _offload(t: torch.Tensor) -> torch.Tensor:
    host = host_like(t)
    start_copy(host, t, to_host=True)
    return host


def _offload_wait_meta(host: TensorProxy, t: TensorProxy, forward: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    return TensorProxy(shape=host.shape, device=cpu, dtype=host.dtype, requires_grad=False), forward


def _offload_wait(host: torch.Tensor, t: torch.Tensor, forward: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wait_for(host)
    return host, forward


def _prefetch_meta(host: TensorProxy, device: str) -> TensorProxy:
    return TensorProxy(shape=host.shape, device=device, dtype=host.dtype, requires_grad=False)


def _prefetch(host: torch.Tensor, device: str) -> torch.Tensor:
    t = torch.empty_like(host, device=device)
    start_copy(t, host, to_host=False)
    return t


def _prefetch_wait_meta(t: TensorProxy) -> TensorProxy:
    return TensorProxy(like=t, requires_grad=False)


def _prefetch_wait(t: torch.Tensor) -> torch.Tensor:
    wait_for(t)
    return t


offload = mem_offload_ex.register_operator("offload", meta=_offload_meta, fn=_offload)
"""`host = offload(t)`: the copy to the host has begun. `t` is dense, and nobody writes it before `offload_wait`."""

offload_wait = mem_offload_ex.register_operator("offload_wait", meta=_offload_wait_meta, fn=_offload_wait)
"""`host, x = offload_wait(host, t, x)`: the copy has ended, as far as what is asked of the device later can tell.

`x` is handed through. Thunder runs in the forward what makes something that the forward needs; so `x` is an
argument of the forward.
"""

prefetch = mem_offload_ex.register_operator("prefetch", meta=_prefetch_meta, fn=_prefetch)
"""`t = prefetch(host, "cuda:0")`: memory on the device, which the copy from the host has begun to fill."""

prefetch_wait = mem_offload_ex.register_operator("prefetch_wait", meta=_prefetch_wait_meta, fn=_prefetch_wait)
"""`t = prefetch_wait(t)`: the same memory, filled."""


def is_transfer(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is one of the four."""
    return bsym.sym.executor is mem_offload_ex


def _source(bsym: BoundSymbol) -> dict[str, TensorProxy]:
    """The argument of which the only result is a copy, or whose memory it uses."""
    return {bsym.flat_proxy_outs[0].name: bsym.args[0]}


_TRAITS = {
    "offload": MemoryTraits(
        transfers=True, laid_out_as=_source, on_host=lambda bsym: {bsym.output.name: bsym.args[0].device.device_str()}
    ),
    "offload_wait": MemoryTraits(
        transfers=True,
        shares=_source,
        on_host=lambda bsym: dict.fromkeys((bsym.args[0].name, bsym.output[0].name), bsym.args[1].device.device_str()),
    ),
    "prefetch": MemoryTraits(
        transfers=True, laid_out_as=_source, on_host=lambda bsym: {bsym.args[0].name: bsym.args[1]}
    ),
    "prefetch_wait": MemoryTraits(transfers=True, shares=_source),
}
declare(mem_offload_ex, lambda name: _TRAITS.get(name, PLAIN))


def offloaded_names(bsyms: Iterable[BoundSymbol]) -> tuple[str, ...]:
    """The names of the values that a trace offloads, in the order in which they leave."""
    return tuple(b.args[0].name for b in bsyms if is_transfer(b) and b.sym.name == "offload")
