"""Optimizer states in the host's memory: each update fetches them slice by slice, and sends them back.

Two slices of the states are on the device at once. While one is stepped, the next is fetched and the one before has
left:

    to the device   fetch 0   fetch 1          fetch 2
    device                    step 0           step 1
    to the host                        send 0           send 1

Copies run on the side streams of `runtime/host_transfers.py`. Three rules make that safe on CUDA:

- A fetch starts after all work that the device has before it, so nothing else uses the memory that it fills.
- A step waits for the fetch of its slice, and a send for the step.
- The device waits for the send of a slice before the slice's memory is free, and so before the fetch after the next.

The last send ends inside the update too, so the device's next update, of any parameter, finds all states on the host.
The CPU does not wait: `settle` makes it wait, before it reads a state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_mem.optimizer.compiled_step import is_compilable
from thunder_mem.optimizer.elementwise import Clip
from thunder_mem.optimizer.one_parameter import (
    Part,
    copied,
    group_of,
    in_place_of,
    own_gradient,
    single_tensor,
    slices_of,
    step_alone,
    step_part,
    whole,
)
from thunder_mem.runtime.host_transfers import host_like, start_copy, wait_for

__all__ = [
    "is_large",
    "load_on_host",
    "move_to_host",
    "settle",
    "stays_on_device",
    "step_each",
    "step_from_host",
    "step_with",
]


def step_with(states: str, compiled: bool = False) -> Callable[..., None]:
    """`step_alone`, or its equal for states on the host; with compiled steps or without."""
    return partial(step_from_host if states == "host" else step_alone, compiled=compiled)


def is_large(v: Any, p: torch.Tensor) -> bool:
    """Whether a value of a parameter's state is as large as the parameter, and so may be on the host."""
    return isinstance(v, torch.Tensor) and v.dim() > 0 and v.numel() == p.numel()


def step_from_host(
    optimizer: Optimizer,
    group: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    *,
    clip_value: float | None = None,
    scale: torch.Tensor | None = None,
    device_type: str | None = None,
    compiled: bool = False,
) -> None:
    """`step_alone` for a parameter whose states are on the host; they are there afterwards, too.

    Optimizers that do not update each element by itself take the whole parameter's states at a time.

    Raises:
        TypeError: a state is a tensor of another class than PyTorch's own.
    """
    options, clip = single_tensor(group), Clip(clip_value, scale)
    travels = _Travels(optimizer, p)
    compiled = compiled and is_compilable(optimizer, p)
    parts: list[Part] | list[None]
    parts = slices_of(optimizer, options, p, grad, device_type or p.device.type, from_host=True)
    parts = parts or ([whole(p, grad)] if compiled else [None])
    coming = travels.fetch(parts[0])
    for i, part in enumerate(parts):
        own = coming
        travels.settle()  # the memory of the slice before is free, and the next fetch may fill it
        coming = travels.fetch(parts[i + 1]) if i + 1 < len(parts) else {}
        _end_copies(own)
        own = {**own, **travels.numbers(part)}
        own = _stepped(optimizer, options, p, grad, part, own, clip, compiled)
        travels.send(own, part)
    travels.settle()
    if travels.states or p in optimizer.state:
        optimizer.state[p] = travels.states if parts == [None] else travels.states_in_place()


class _Travels:
    """The copies of one parameter's states in one update. A part that is None is the whole parameter.

    Attributes:
        states: of the parameter: large tensors on the host, and numbers, as the last part left them.
    """

    def __init__(self, optimizer: Optimizer, p: torch.Tensor) -> None:
        self._p = p
        self._kind = type(optimizer).__name__
        self._before = dict(optimizer.state.get(p, {}))  # empty in the first step, in which each part makes its state
        self._hosts = {name: v for name, v in self._before.items() if is_large(v, p)}
        self._leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.states: dict[str, Any] = {}

    def numbers(self, part: Part | None) -> dict[str, Any]:
        """What is not large; a slice gets copies, which its step may change."""
        small = {name: v for name, v in self._before.items() if name not in self._hosts}
        return small if part is None else {name: copied(v) for name, v in small.items()}

    def fetch(self, part: Part | None) -> dict[str, torch.Tensor]:
        """Memory on the device for a part's states, which copies have begun to fill."""
        found = {}
        for name in self._before:
            if name in self._hosts:
                host = _of(part, self._hosts[name])
                found[name] = torch.empty_like(host, device=self._p.device)
                start_copy(found[name], host, to_host=False)
        return found

    def send(self, own: dict[str, Any], part: Part | None) -> None:
        """Start to copy a part's states to the host."""
        piece = _of(part, self._p)
        self.states = dict(own)
        for name, v in own.items():
            if not is_large(v, piece):
                continue
            if is_traceable_wrapper_subclass(v):
                raise TypeError(_SUBCLASS.format(self._kind, name, type(v).__name__))
            host = self._hosts.get(name)
            if host is None or (part is None and (host.shape != v.shape or host.dtype != v.dtype)):
                host = self._hosts[name] = host_like(v if part is None else self._p, v.dtype)
            self.states[name] = host
            target = _of(part, host)
            start_copy(target, v, to_host=True)
            self._leaving.append((target, v))

    def states_in_place(self) -> dict[str, Any]:
        """`states` after the last slice, with numbers in the memory that they had before."""
        return {
            name: v if name in self._hosts else in_place_of(self._before.get(name), v)
            for name, v in self.states.items()
        }

    def settle(self) -> None:
        """Work that is asked of the device from now on runs after all that was sent."""
        for target, _ in self._leaving:
            wait_for(target)
        self._leaving.clear()


def _end_copies(own: dict[str, torch.Tensor]) -> None:  # whose loop keeps no tensor alive
    for target in own.values():
        wait_for(target)


def _of(part: Part | None, t: torch.Tensor) -> torch.Tensor:
    return t if part is None else part(t)


def _stepped(
    optimizer: Optimizer,
    options: dict[str, Any],
    p: torch.Tensor,
    grad: torch.Tensor,
    part: Part | None,
    own: dict[str, Any],
    clip: Clip,
    compiled: bool,
) -> dict[str, Any]:
    """The state of a part after its step."""
    if part is not None:
        piece = part(p)
        alone: defaultdict[torch.Tensor, Any] = defaultdict(dict, {piece: own})
        step_part(optimizer, options, piece, part.of_gradient(grad, compiled), alone, clip, compiled=compiled)
        return alone[piece]
    if own:
        optimizer.state[p] = own
    step_part(optimizer, options, p, own_gradient(optimizer, p, grad), optimizer.state, clip)
    return optimizer.state.get(p, {})


def step_each(optimizer: Optimizer, device_type: str | None = None) -> None:
    """Update the parameters that have a gradient, one after the other; the gradients stay.

    Args:
        device_type: see `step_alone`.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if (grad := p.grad) is None:
            continue
        step_from_host(optimizer, group_of(optimizer, p), p, grad, device_type=device_type)
        p.grad = grad


def move_to_host(optimizer: Optimizer) -> None:
    """Move the states that an optimizer has already.

    Raises:
        TypeError: a parameter or a state is a tensor of another class than PyTorch's own.
    """
    if (obstacle := stays_on_device(optimizer)) is not None:
        raise TypeError(obstacle)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for name, v in optimizer.state.get(p, {}).items():
            if is_large(v, p):
                optimizer.state[p][name] = _on_host(v, p, v.dtype)


def stays_on_device(optimizer: Optimizer) -> str | None:
    """Why an optimizer's states, as far as they exist, cannot move to the host; None if they can."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if is_traceable_wrapper_subclass(p):
            return f"states='host' takes plain parameters, as fsdp of Thunder has them, not {type(p).__name__}"
        for name, v in optimizer.state.get(p, {}).items():
            if is_large(v, p) and is_traceable_wrapper_subclass(v):
                return _SUBCLASS.format(type(optimizer).__name__, name, type(v).__name__)
    return None


def _on_host(v: torch.Tensor, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a state in host memory, pinned if the parameter is on a GPU."""
    on_device = v if v.device.type == p.device.type else p if p.shape == v.shape else p.detach().view(v.shape)
    return host_like(on_device, dtype).copy_(v)


def load_on_host(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`, whose large states go to the host without a way over the device."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    owners = dict(zip(saved, (p for group in optimizer.param_groups for p in group["params"]), strict=False))
    state = {
        i: {k: _Carried(v) if is_large(v, owners[i]) else v for k, v in entries.items()} if i in owners else entries
        for i, entries in state_dict["state"].items()
    }
    settle(optimizer)
    optimizer.load_state_dict({**state_dict, "state": state})
    for p in owners.values():
        for name, v in optimizer.state.get(p, {}).items():
            if isinstance(v, _Carried):
                dtype = p.dtype if p.is_floating_point() else v.tensor.dtype
                optimizer.state[p][name] = _on_host(v.tensor, p, dtype)


class _Carried:
    """A tensor that `Optimizer.load_state_dict` hands on as it is, instead of moving it to the parameter's device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def settle(optimizer: Optimizer) -> None:
    """Wait until all states that were sent are on the host, so that the CPU may read them."""
    for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
        if device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize(device)


_SUBCLASS = "{} keeps {!r} as a {}, which states='host' cannot move: leave states= out"
