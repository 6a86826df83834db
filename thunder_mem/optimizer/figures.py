"""What the update of one parameter takes, from a step on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.optimizer.compiled_step import is_compilable
from thunder_mem.optimizer.elementwise import BY_ELEMENT
from thunder_mem.optimizer.host_states import is_large, step_with
from thunder_mem.optimizer.one_parameter import (
    first_state,
    many_steps_later,
    runs_by_slices,
    slice_elements,
)
from thunder_mem.optimizer.trial_steps import bare_copy, on_any_device
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.fake_numbers import FakeNumbers
from thunder_mem.runtime.measure import record_curve

__all__ = ["StepFigures", "large_state_bytes", "step_figures"]


class StepFigures(NamedTuple):
    """What a step of one parameter takes, once its state exists.

    Attributes:
        temporary_bytes: held at most beyond parameter, gradient and state; states on their way from and to the host
            count here.
        launches: operators that write memory.
        moved_bytes: what the step reads and writes, without copies from and to the host.
        state_bytes: of the state's tensors that are as large as the parameter.
        tensors: the number of these.
        first_bytes: `temporary_bytes` in the first step, which makes the state slice by slice.
        slices: the step runs over so many parts of the parameter, one after the other.
    """

    temporary_bytes: int
    launches: int
    moved_bytes: int = 0
    state_bytes: int = 0
    tensors: int = 0
    slices: int = 1
    first_bytes: int = 0


def step_figures(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    device_type: str,
    *,
    clip_value: float | None = None,
    scaled: bool = False,
    states: str = "device",
    compiled: bool = False,
) -> StepFigures:
    """The figures of an update; zeros if the optimizer does not run on meta tensors.

    The gradient counts as laid out like the parameter.

    Args:
        states: where the states are, "device" or "host".
        compiled: the step is one kernel.
    """
    many = partial(_many_kernels, optimizer, shape=shape, dtype=dtype, device_type=device_type, states=states)
    one = partial(_one_kernel, optimizer, shape, dtype, device_type, states == "host")
    if compiled and is_compilable(optimizer, torch.empty(tuple(shape), device="meta")):
        scale = torch.ones(()) if scaled else None
        try:
            numbers_bytes = _numbers_bytes(optimizer, group, dtype, clip_value, scale) if device_type == "cpu" else 0
        except Exception:  # as any step of this optimizer will fail
            return many(group)
        return one(many(group), numbers_bytes)
    if group.get("fused") and type(optimizer) in BY_ELEMENT:
        clips = scaled or clip_value is not None
        elements = min(prod(shape), slice_elements(dtype, device_type)) if states == "host" else prod(shape)
        return one(many({**group, "fused": False}), elements * dtype.itemsize if clips else 0, clips=clips)
    return many(group, clip_value=clip_value, scaled=scaled)


def _many_kernels(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device_type: str,
    states: str,
    clip_value: float | None = None,
    scaled: bool = False,
) -> StepFigures:
    """The figures of a step that PyTorch's operators compute, as for `step_figures`."""
    from_host = states == "host"
    # Counts of steps are real numbers on the CPU, whatever device the caller makes tensors on by default.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        p = torch.empty(tuple(shape), dtype=dtype, device="meta")
        share, slices = 1.0, 1
        if runs_by_slices(optimizer, group, from_host):
            each = slice_elements(dtype, device_type)
            some = p.view(-1)[: 2 * each]  # all slices are alike
            share, slices, p = p.numel() / max(1, some.numel()), max(1, -(-p.numel() // each)), some
        meta, options = bare_copy(optimizer), on_any_device(group)
        meta.state = first_state(meta, options, p)
        clip = {"clip_value": clip_value, "scale": p.new_ones(()) if scaled else None}
        step = partial(step_with(states), meta, options, p, torch.empty_like(p), **clip, device_type=device_type)
        counted = ("meta", "cpu") if device_type == "cpu" else ("meta",)
        began, seen = AllocationWatch(counted), AllocationWatch(counted)
        try:
            with FakeNumbers(1.0):  # as ASGD's is for its first steps; all other numbers are on the CPU
                with began:
                    step()
                first_bytes = began.peak_bytes - began.live_bytes()
                many_steps_later(meta.state.get(p, {}))
                with seen:
                    step()
        except Exception:
            return StepFigures(0, 0)
    state = meta.state.get(p, {})
    large, state_bytes = [v for v in state.values() if is_large(v, p)], _large_bytes(state, p)
    copied_bytes = 4 * state_bytes if from_host else 0  # there and back, each read and written
    launches, moved_bytes, whole_bytes = (
        round(n * share) for n in (seen.launches, seen.moved_bytes - copied_bytes, state_bytes)
    )
    return StepFigures(seen.peak_bytes, launches, moved_bytes, whole_bytes, len(large), slices, first_bytes)


def _one_kernel(
    optimizer: torch.optim.Optimizer,
    shape: Sequence[int],
    dtype: torch.dtype,
    device_type: str,
    from_host: bool,
    many: StepFigures,
    held_bytes: int,
    *,
    clips: bool = False,
) -> StepFigures:
    """The figures of a step by one kernel, or by one a slice if the states come from the host.

    Args:
        many: of the same step with many kernels.
        held_bytes: by the kernel beside parameter, gradient and states.
        clips: another kernel clips the gradient before.
    """
    if not many.launches:  # it does not run on meta tensors
        return many
    count = prod(shape)
    moved_bytes = (5 if clips else 3) * count * dtype.itemsize + 2 * many.state_bytes
    if not from_host:
        launches = 2 if clips else 1
        return many._replace(
            temporary_bytes=held_bytes, launches=launches, moved_bytes=moved_bytes, slices=1, first_bytes=held_bytes
        )
    share = slice_elements(dtype, device_type) / max(1, count)
    one, two = (round(many.state_bytes * min(1.0, n * share)) for n in (1, 2))  # slices of the states
    return many._replace(
        temporary_bytes=two + held_bytes,
        launches=many.slices * (2 * many.tensors + (2 if clips else 1)),
        moved_bytes=moved_bytes,
        first_bytes=(two if isinstance(optimizer, torch.optim.Adagrad) else one) + held_bytes,  # see `first_state`
    )


def large_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of an optimizer's states that are as large as their parameters, once all of them exist.

    A step of a small parameter on the CPU tells how many there are; if it fails, those count that exist already.
    """
    known: dict[Any, float | None] = {}
    nbytes = 0.0
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p.requires_grad):
            shape = tuple(min(s, _SMALL) for s in p.shape)
            key = id(group), shape, p.dtype
            if key not in known:
                known[key] = _state_bytes_of_each(optimizer, group, shape, p.dtype)
            if (each := known[key]) is None:
                nbytes += _large_bytes(optimizer.state.get(p, {}), p)
            else:
                nbytes += p.numel() * each
    return round(nbytes)


_SMALL = 3  # a row of so many numbers is smaller than the parameter: factored states are not large


def _state_bytes_of_each(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> float | None:
    """The bytes of large states for each element of such parameters; None if a step on the CPU fails."""
    copy = bare_copy(optimizer)
    options = {**on_any_device(group), **({"fused": False} if "fused" in group else {})}
    try:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = torch.ones(shape, dtype=dtype)
            copy.state = first_state(copy, options, small)
            step_with("device")(copy, options, small, torch.ones_like(small))
    except Exception:
        return None
    return _large_bytes(copy.state[small], small) / max(1, small.numel())


def _large_bytes(state: Mapping[str, Any], p: torch.Tensor) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if is_large(v, p))


def _numbers_bytes(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    clip_value: float | None,
    scale: torch.Tensor | None,
) -> int:
    """What a compiled step holds on the CPU: the few numbers from which its kernel starts, such as the rate."""
    copy = bare_copy(optimizer)
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        p = torch.ones(_SOME, dtype=dtype)
        copy.state = first_state(copy, group, p)
        step = partial(step_with("device", True), copy, group, p, torch.ones_like(p))
        run = partial(step, clip_value=clip_value, scale=scale)
        run()  # it compiles, and makes the state
        return record_curve(run).peak_bytes


_SOME = 64  # elements: one would be compiled apart
