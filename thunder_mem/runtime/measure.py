"""Measure the memory of a call: tests compare predictions and plans with it.

On a CPU the allocator reports every allocation and release to PyTorch's profiler. The running sum over these events is
exact and repeatable to the byte. On CUDA the caching allocator keeps the same sum itself, before its rounding, as
`requested_bytes`.

A measurement does not count:

- allocations made by Python threads other than the caller's (CPU);
- memory that does not come from PyTorch's allocator: numpy, oneDNN's and BLAS' own workspaces, the
  cuBLAS workspace PyTorch keeps between calls once it exists;
- releases of tensors that existed before the call (CPU), so keep inputs alive, or the peak is an
  upper bound.

It does count one-time work of a first call, such as compilation or constants. Call the function once before, unless
you want to measure that. Attention's scratch on a CPU grows with `torch.get_num_threads()`. Never measure Inductor's
regions under a `TorchDispatchMode`: they fall back to eager there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from thunder_mem.runtime.collector import collector_off

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
        """Bytes above the start at the end, including the call's result."""
        return sum(self.deltas)


def measure_curve(fn: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> MemoryCurve:
    """Call `fn(*args, **kwargs)` once and return the CPU allocator's events.

    The result of `fn` stays alive until the measurement ends. Python's cyclic garbage collector runs before
    the call and is off during it, so that no release depends on its timing.

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
    """The peak of `fn(*args, **kwargs)` in bytes above the start.

    Args:
        fn: called once; call it before if it compiles on first use.
        args: passed to `fn`; they exist already, so they do not count.
        device: where to measure, "cpu" or "cuda" (or "cuda:1", ...). Default: CUDA if a tensor among
            `args`, a parameter of `fn`, or a tensor or module that `fn` closes over, lives there, else the CPU.
        kwargs: keyword arguments for `fn`.

    Returns:
        Exact bytes on a CPU. On CUDA, requested bytes without the allocator's rounding to 512, so that they
        compare with a prediction.

    Raises:
        ValueError: the device is neither a CPU nor CUDA, or CUDA is not available. Or no device is given, and
            the call uses CUDA although none of the above shows it. Or tensors are fake, also inside
            `simulate`, and take no memory.

    Example:
        >>> measure_peak(lambda: torch.ones(256).neg())
        2048
    """
    _check_callable(fn)
    tensors = _tensors_of(fn, args, kwargs or {})
    _check_real(tensors)
    told = torch.device("cpu") if device is None else torch.device(device)
    where = next((t.device for t in tensors if t.is_cuda), told) if device is None else told
    if where.type == "cpu":
        before = _cuda_allocations()
        peak_bytes = measure_curve(fn, *args, kwargs=kwargs).peak_bytes
        if device is None and _cuda_allocations() != before:
            raise ValueError(
                "the call allocates on CUDA, which nothing among its arguments shows: say device='cuda' or device='cpu'"
            )
        return peak_bytes
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
        raise TypeError(f"the first argument is the function to measure, but {type(fn).__name__} is not callable")


def _tensors_of(fn: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call that are visible from outside."""
    values: list[Any] = tree_leaves((args, dict(kwargs), fn))
    while isinstance(fn, functools.partial):
        values += tree_leaves((fn.args, fn.keywords))
        fn = fn.func
    values += [fn, getattr(fn, "__self__", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name that has no value yet
            values += tree_leaves(cell.cell_contents)
    owned = [t for v in values if isinstance(v, torch.nn.Module) for t in (*v.parameters(), *v.buffers())]
    return [*(v for v in values if isinstance(v, torch.Tensor)), *owned]


def _check_real(tensors: Iterable[torch.Tensor]) -> None:
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, FakeTensorMode) for mode in modes) or any(isinstance(t, FakeTensor) for t in tensors):
        raise ValueError(
            "fake tensors, such as those inside of simulate(...), take no memory to measure: "
            "use thunder_mem.predict or predict_step there"
        )


def _cuda_allocations() -> tuple[int, ...]:
    """The number of allocations on each CUDA device so far; all 0 before CUDA is used."""
    if not torch.cuda.is_initialized():
        return ()
    stats = (torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count()))
    return tuple(count) if any(count := [s.get("allocation.all.allocated", 0) for s in stats]) else ()
