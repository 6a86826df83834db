"""Let an optimizer of `torch.optim` update one parameter, with the gradient given.

The optimizer's own `step` runs on a group of that parameter alone, so the numbers are its own. Where every element is
updated by itself, it runs slice by slice: its temporaries then have a slice's size instead of the parameter's. Compiled
into one kernel it has none, and runs over the whole parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_mem.optimizer.compiled_step import compiled_options, is_compilable, run_compiled
from thunder_mem.optimizer.elementwise import BY_ELEMENT, Clip

__all__ = [
    "Part",
    "copied",
    "first_state",
    "group_of",
    "in_place_of",
    "many_steps_later",
    "own_gradient",
    "runs_by_slices",
    "single_tensor",
    "slice_elements",
    "slices_of",
    "step_alone",
    "step_part",
    "unhooked",
    "whole",
]

_SLICE_BYTES = {"cpu": 4 << 20}  # a slice with its state stays in a CPU's cache
# A kernel of a GPU that reads and writes two such slices takes 10 us, twice the time to launch it. States from the host
# travel in enough slices to keep the link busy in both directions.
_SLICE_BYTES_ELSEWHERE = 16 << 20
_ROUND = 64  # rows: slices of whole vectors, whose elements all take the same path through a kernel

_CAPTURE_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")  # PyTorch 2.11, 2.8
"""Methods that PyTorch's optimizers call in each step. With `lightning` they open the driver's library each time."""


def step_alone(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    *,
    clip_value: float | None = None,
    scale: torch.Tensor | None = None,
    device_type: str | None = None,
    compiled: bool = False,
) -> None:
    """Update one parameter of an optimizer, as its `step` would do with all others left out.

    Step hooks do not run. Where the group leaves open whether many parameters are updated by one call
    (``foreach=None``), single-tensor code runs.

    Args:
        optimizer: its state for `p` is updated, too.
        group: the parameter group of `p`.
        p: the parameter; no gradient is left on it.
        grad: its gradient, which does not change.
        clip_value: the gradient counts as clipped to [-clip_value, clip_value].
        scale: a number by which the gradient is multiplied before.
        device_type: the device for which slices are sized, "cpu" or "cuda"; by default the parameter's.
        compiled: the step is one kernel, if it updates each element by itself.
    """
    options, clip = single_tensor(group), Clip(clip_value, scale)
    compiled = compiled and is_compilable(optimizer, p)
    parts = [whole(p, grad)] if compiled else slices_of(optimizer, options, p, grad, device_type or p.device.type)
    if parts:
        _step_by_slices(optimizer, options, p, grad, parts, clip, compiled=compiled)
    else:
        step_part(optimizer, options, p, own_gradient(optimizer, p, grad), optimizer.state, clip)


class Part(NamedTuple):
    """A part of a parameter and of the tensors laid out like it: some of its elements, or of its rows."""

    flat: bool
    start: int
    stop: int

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        return (t.view(-1) if self.flat else t)[self.start : self.stop]

    def of_gradient(self, grad: torch.Tensor, compiled: bool) -> torch.Tensor:
        """The part of a gradient: as it lies for a compiled kernel, which takes any strides, else contiguous."""
        return self(grad) if compiled else self(grad).contiguous()


def single_tensor(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, with single-tensor code where they leave that open."""
    return {**group, **({"foreach": False} if group.get("foreach", False) is None else {})}


def own_gradient(optimizer: torch.optim.Optimizer, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with the parameter's strides, as autograd gives it to an optimizer, which may change it.

    PyTorch's own optimizers leave gradients as they are. In a trace other values may share the gradient's memory.
    """
    if grad.stride() == p.stride() and type(optimizer).__module__.startswith("torch.optim."):
        return grad
    return torch.empty_like(p, requires_grad=False).copy_(grad)


def runs_by_slices(optimizer: torch.optim.Optimizer, options: dict[str, Any], from_host: bool = False) -> bool:
    """Whether the optimizer updates every element by itself, and slices save memory.

    A fused kernel has no temporaries that slices would make smaller, but states from the host travel by slices.
    """
    return type(optimizer) in BY_ELEMENT and (from_host or not options.get("fused"))


def slices_of(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    device_type: str,
    from_host: bool = False,
) -> list[Part]:
    """Slices along the flat parameter, or along its rows if the gradient has other strides; [] for none.

    Args:
        from_host: the states are on the host.
    """
    if not runs_by_slices(optimizer, options, from_host) or not p.is_contiguous():
        return []
    least = slice_elements(p.dtype, device_type)
    if p.numel() <= least:
        return []
    if flat := grad.is_contiguous():
        count, each = p.numel(), least
    else:
        count, each = p.shape[0], -(-least // (p.numel() // p.shape[0]) // _ROUND) * _ROUND
    return [Part(flat, start, min(start + each, count)) for start in range(0, count, each)]


def slice_elements(dtype: torch.dtype, device_type: str) -> int:
    """The elements of a slice on a device."""
    return _SLICE_BYTES.get(device_type, _SLICE_BYTES_ELSEWHERE) // dtype.itemsize


def whole(p: torch.Tensor, grad: torch.Tensor) -> Part:
    """All of a parameter as one slice: flat if it can be, since one kernel then takes parameters of any shape."""
    flat = p.is_contiguous() and grad.is_contiguous()
    return Part(flat, 0, p.numel() if flat else p.shape[0])


def _step_by_slices(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    parts: Sequence[Part],
    clip: Clip,
    *,
    compiled: bool = False,
) -> None:
    """A step by slices. The state of a slice is a view of the parameter's, or a copy if it is one number for all."""
    state = optimizer.state[p]
    before = dict(state)  # empty in the first step, in which each slice makes its state
    numbers: dict[str, Any] = {}
    for part in parts:
        piece = part(p)
        alone = defaultdict(dict, {piece: {k: part(v) if _is_like(v, p) else copied(v) for k, v in before.items()}})
        step_part(optimizer, options, piece, part.of_gradient(grad, compiled), alone, clip, compiled=compiled)
        for name, v in alone[piece].items():
            if not _is_like(v, piece):
                numbers[name] = v
                continue
            if not _is_like(state.get(name), p):
                if len(parts) == 1 and v.stride() == piece.stride():  # some states take the gradient's
                    state[name] = v.view(p.shape)
                    continue
                state[name] = torch.empty_like(p, dtype=v.dtype, requires_grad=False)
            if v.untyped_storage()._cdata != (target := part(state[name])).untyped_storage()._cdata:
                target.copy_(v)
        if isinstance(p, FakeTensor):  # every slice takes the same memory and makes the same kind of state
            break
    state.update({name: in_place_of(before.get(name), v) for name, v in numbers.items()})


def _is_like(v: Any, p: torch.Tensor) -> bool:
    return isinstance(v, torch.Tensor) and v.shape == p.shape and v.dim() > 0


def copied(v: Any) -> Any:
    """A number of the state for one slice, which the step may change in place."""
    return v.clone() if isinstance(v, torch.Tensor) else v


def in_place_of(before: Any, after: Any) -> Any:
    """A number of the state after a step by slices, in the memory that it had before, as without slices."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return after
    same = (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)
    return before.copy_(after) if same else after


def step_part(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    state: defaultdict[torch.Tensor, Any],
    clip: Clip,
    *,
    compiled: bool = False,
) -> None:
    """The optimizer's step over one parameter, or a part of one, with a state that takes the place of its own."""
    compiled = compiled and is_compilable(optimizer, p)  # it may have failed on the part before
    with _only(optimizer, compiled_options(options) if compiled else options, p, state):
        p.grad = grad if compiled else clip(grad)
        try:
            run_compiled(optimizer, grad, clip) if compiled else unhooked(optimizer)()
        finally:
            p.grad = None


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], p: torch.Tensor, state: defaultdict[torch.Tensor, Any]
) -> Iterator[None]:
    """The optimizer over one parameter and with another state, for the moment."""
    own, groups, whole = optimizer.__dict__, optimizer.param_groups, optimizer.state
    on_cpu = p.device.type == "cpu"  # where no graph of a GPU is captured
    unchecked = [name for name in _CAPTURE_CHECKS if on_cpu and name not in own]
    optimizer.param_groups, optimizer.state = [{**options, "params": [p]}], state
    own.update(dict.fromkeys(unchecked, _nothing))
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, whole
        for name in unchecked:
            del own[name]


def _nothing() -> None:
    """Takes the place of a check."""


def first_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor
) -> defaultdict[torch.Tensor, Any]:
    """The state with which a parameter's first step begins: Adagrad alone makes it before, with the optimizer."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return defaultdict(dict)
    with torch.device("cpu"):
        new = torch.optim.Adagrad([p], initial_accumulator_value=group["initial_accumulator_value"])
    return defaultdict(dict, new.state)


def many_steps_later(state: dict[str, Any]) -> None:
    """Set a state's count of steps to a large number: RAdam's arithmetic holds more from its sixth step on."""
    count = state.get("step")
    if isinstance(count, torch.Tensor) and not count.is_meta:
        count.fill_(_MANY)
    elif isinstance(count, int):
        state["step"] = _MANY


_MANY = 1000


def group_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, Any]:
    """The parameter group of a parameter; empty if it is in none."""
    return next((group for group in optimizer.param_groups if any(q is p for q in group["params"])), {})


def unhooked(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's `step` as its class has it: without step hooks, and without what schedulers bound to it."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", None) else step
    return lambda: step(optimizer)
