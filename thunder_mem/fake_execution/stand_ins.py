"""Fake CPU tensors that replace a program's own tensors during a prediction.

Modules, optimizers and tensors may be real, fake or without data: none is read or written. Inside `in_place_of`, a
module's parameters and buffers are stand-ins, and an optimizer steps over them. Other tensors of the code are replaced
where they enter an operation (`OnCpu`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from thunder_mem.fake_execution.fake_twins import Twins

__all__ = ["OnCpu", "Owned", "in_place_of", "owned_by", "stepping"]


@dataclass(frozen=True)
class Owned:
    """The objects that values are, are bound to, or refer to by closures and globals, each once."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


def owned_by(*values: Any) -> Owned:
    """Search functions, methods, partials and containers, but not inside modules.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> owned_by(lambda x: layer(x).sum()).modules == [layer]
        True
    """
    found = Owned()
    seen: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.tensors.append(value)
        elif isinstance(value, nn.Module):
            found.modules.append(value)
            todo += [hook for p in value.parameters() for hook in _hooks(p)]
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif inspect.ismethod(value):
            todo += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            names = inspect.getclosurevars(value)
            todo += [*names.nonlocals.values(), *names.globals.values(), *(value.__defaults__ or ())]
    return found


def _hooks(p: Tensor) -> list[Callable[[Tensor], None]]:
    """The hooks that run once the gradient of `p` is complete: optimizers that step in the backward."""
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


@contextmanager
def in_place_of(twins: Twins, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the modules' parameters, buffers and other tensors by their twins."""
    with ExitStack() as stack:
        for module in modules:
            for prefix, part in module.named_modules():
                for held in (part._parameters, part._buffers, vars(part)):
                    own = {name: t for name, t in held.items() if isinstance(t, Tensor)}
                    kind = "parameter" if held is part._parameters else "buffer"
                    for name, t in own.items():
                        twins.hold(t, kind)
                        twins.name(twins.of(t), f"{prefix}.{name}" if prefix else name)
                        _hook_as(t, twins.of(t))
                    stack.enter_context(mock.patch.dict(held, {name: twins.of(t) for name, t in own.items()}))
        yield


@contextmanager
def stepping(optimizer: Optimizer, twin: Optimizer) -> Iterator[None]:
    """Let the optimizer step over its twin's parameters, with the twin's state."""
    before = optimizer.param_groups, optimizer.state
    inherited = {"param_groups", "state"} - vars(optimizer).keys()
    optimizer.param_groups, optimizer.state = twin.param_groups, twin.state
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = before
        for name in inherited & vars(optimizer).keys():  # `StepInBackward` asks the optimizer that it wraps
            delattr(optimizer, name)


def _hook_as(t: Tensor, twin: Tensor) -> None:
    """Run a parameter's hook when its twin's gradient is complete, with the parameter for identification."""
    if twin is not t and twin.requires_grad and twin.is_leaf and not _hooks(twin):
        for hook in _hooks(t):
            twin.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(t))


class OnCpu(TorchFunctionMode):
    """Gives the CPU to code that requests CUDA, and twins to code that uses the caller's tensors."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self.twins = twins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(self._here, (args, kwargs))
        if isinstance(kwargs.get("device"), str | int):
            kwargs = {**kwargs, "device": _cpu(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | int):
            args = (args[0], _cpu(args[1]), *args[2:])
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.twins.met(value)
        return _cpu(value) if isinstance(value, torch.device) else value


def _cpu(device: Any) -> Any:
    """The CPU for a CUDA device or its number; any other device is unchanged."""
    return torch.device("cpu") if isinstance(device, int) or torch.device(device).type == "cuda" else device
