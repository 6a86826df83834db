"""Measure what a call really takes: the oracle that predictions and plans are held against.

On a CPU the allocator reports every allocation and release to PyTorch's profiler, so the running sum
over those events is exact and repeatable to the byte. On CUDA the caching allocator keeps the same
sum itself, before its rounding, as `requested_bytes`.

What a measurement does not see:

- allocations made by Python threads other than the caller's (CPU);
- memory that does not come from PyTorch's allocator: numpy, oneDNN's and BLAS' own workspaces, the
  cuBLAS workspace PyTorch keeps between calls once it exists;
- releases of tensors that existed before the call (CPU), so keep inputs alive, or the peak is an
  upper bound;
- what a first call does once and never again: compile, or make constants. Call the function once
  before, unless that is what you want to know.

Threads matter: attention's scratch on a CPU grows with `torch.get_num_threads()`. Never measure
Inductor's regions under a `TorchDispatchMode`: they fall back to eager there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

__all__ = ["MemoryCurve", "measure_curve", "measure_peak"]


@dataclass(frozen=True)
class MemoryCurve:
    """Every allocation (positive) and release (negative) of one call, in order, in bytes.

    Attributes:
        deltas: one entry for each event.
    """

    deltas: tuple[int, ...]

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes above the start after each event."""
        return tuple(accumulate(self.deltas))

    @property
    def peak_bytes(self) -> int:
        """The largest of `live_bytes`; 0 if nothing was ever allocated."""
        return max(self.live_bytes, default=0) if self.deltas else 0

    @property
    def end_bytes(self) -> int:
        """Bytes above the start at the end, what the call returned included."""
        return sum(self.deltas)


def measure_curve(fn: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> MemoryCurve:
    """Call `fn(*args, **kwargs)` once and return what the CPU allocator did meanwhile.

    What `fn` returns stays alive until the measurement ends. Python's cyclic garbage collector runs
    before the call and is off during it, so that no release depends on when it wakes.

    Example:
        >>> measure_curve(lambda: torch.ones(256).neg()).deltas
        (1024, 1024, -1024)
    """
    _check_callable(fn)
    with collector_off():
        gc.collect()
        return record_curve(lambda: fn(*args, **(kwargs or {})))


def record_curve(fn: Callable[[], Any]) -> MemoryCurve:
    """`measure_curve` for many short calls in a row: it leaves the garbage collector to the caller."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        result = fn()
    del result
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    return MemoryCurve(tuple(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def measure_peak(
    fn: Callable[..., Any],
    *args: Any,
    device: str | torch.device | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Bytes above the start that `fn(*args, **kwargs)` holds at its worst moment.

    Args:
        fn: called once; call it before if it compiles on first use.
        args: handed to `fn`; they exist already, so they do not count.
        device: where to measure, "cpu" or "cuda" (or "cuda:1", ...). Default: CUDA if a tensor among
            `args`, or a parameter of `fn`, lives there, else the CPU.
        kwargs: keyword arguments for `fn`.

    Returns:
        On a CPU, exact bytes. On CUDA, bytes as they were requested, without the allocator's
        rounding to 512, so that they compare with a prediction.

    Raises:
        ValueError: a device that is neither a CPU nor CUDA, or CUDA where there is none.

    Example:
        >>> measure_peak(lambda: torch.ones(256).neg())
        2048
    """
    _check_callable(fn)
    where = _device_of(fn, args, kwargs or {}) if device is None else torch.device(device)
    if where.type == "cpu":
        return measure_curve(fn, *args, kwargs=kwargs).peak_bytes
    if where.type != "cuda":
        raise ValueError(f"measure_peak measures on 'cpu' and 'cuda', not on {str(where)!r}")
    if not torch.cuda.is_available():
        raise ValueError("measure_peak was asked to measure on CUDA, but this machine has no CUDA device")
    with collector_off():
        gc.collect()
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        start_bytes = torch.cuda.memory_stats(where)["requested_bytes.all.current"]
        result = fn(*args, **(kwargs or {}))
        torch.cuda.synchronize(where)
        peak_bytes = torch.cuda.memory_stats(where)["requested_bytes.all.peak"]
    del result
    return peak_bytes - start_bytes


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"the first argument is what to call, but {type(fn).__name__} is not callable")


def _device_of(fn: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        tensors += fn.parameters()
    return next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Python's cyclic garbage collector is off within, so that no release depends on when it wakes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
