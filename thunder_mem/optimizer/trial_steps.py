"""Steps on trial, by a copy of the optimizer, which leave the optimizer itself as it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.optimizer.one_parameter import unhooked

__all__ = ["bare_copy", "changed_for_all", "on_any_device"]


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer without attributes that other code added; its groups and state are still to be replaced.

    What a step may change in place (tensors, containers, generators) are copies, and parameters are the same. An
    optimizer that wraps another gets a copy of that one, to which its groups and state belong.
    """
    copy = object.__new__(type(optimizer))
    shared = {"param_groups", "state"}
    with _disable_current_modes():
        copy.__dict__.update({k: v if k in shared else _apart(v) for k, v in vars(optimizer).items()})
    if isinstance(wrapped := vars(optimizer).get("wrapped"), torch.optim.Optimizer):
        copy.__dict__["wrapped"] = bare_copy(wrapped)
    copy.__dict__.pop("step", None)  # a learning-rate scheduler binds the original's
    copy.__dict__.pop("zero_grad", None)
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return copy


def _apart(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) is dict:
        return {k: _apart(v) for k, v in value.items()}
    return type(value)(map(_apart, value)) if type(value) in (list, tuple, set) else value


def changed_for_all(optimizer: torch.optim.Optimizer) -> str | None:
    """What a step changes that its parameters share, in words; None if there is nothing.

    That is an option of the parameter group, or a number of the optimizer, such as a count of steps. Each group's step
    is tried on a parameter of one element.
    """
    for group in optimizer.param_groups:
        p = torch.nn.Parameter(torch.ones(1, 1))
        small = bare_copy(optimizer)
        small.param_groups, small.state = [{**_apart(on_any_device(group)), "params": [p]}], defaultdict(dict)
        options, own = _numbers_of_group(small), _own_numbers(small)
        p.grad = torch.ones(1, 1)
        try:
            with torch.random.fork_rng(devices=[]):
                unhooked(small)()
        except Exception:  # it takes no such parameter, and shows when it runs
            continue
        if changed := _first_changed(options, _numbers_of_group(small)):
            return f"{changed!r} of its parameter group"
        if changed := _first_changed(own, _own_numbers(small)):
            return f"its own {changed!r}"
    return None


_Numbers = dict[tuple[Any, ...], Any]
"""Numbers by their place: the name of an attribute or an option, then keys."""


def _numbers_of_group(optimizer: torch.optim.Optimizer) -> _Numbers:
    (group,) = optimizer.param_groups
    return dict(_numbers({k: v for k, v in group.items() if k != "params"}, (int, float, bool)))


def _own_numbers(optimizer: torch.optim.Optimizer) -> _Numbers:
    """Those of the optimizer; a flag says what it has prepared, such as tables."""
    return dict(
        _numbers({k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}, (int, float))
    )


def _numbers(value: Any, kinds: tuple[type, ...], *path: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The numbers in a value, also those in its containers and small tensors, each with its place."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_meta:
            yield path, value.item()
    elif type(value) in kinds:
        yield path, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, kinds, *path, k)
    elif isinstance(value, list | tuple):
        for k, v in enumerate(value):
            yield from _numbers(v, kinds, *path, k)


def _first_changed(before: _Numbers, after: _Numbers) -> Any:
    """The first name under which a number has changed, or is new beside the optimizer's own; None if there is none.

    A list that grows, such as a log, counts nothing for the others.
    """
    for path, value in after.items():
        if path not in before:
            if len(path) == 1:
                return path[0]
        elif before[path] != value:
            return path[0]
    return None


def on_any_device(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, for a trial step on another device: without those for a GPU, and with a plain rate."""
    rate = {"lr": 1e-3} if isinstance(group.get("lr"), torch.Tensor) else {}
    return {**group, **rate, **({"capturable": False} if "capturable" in group else {})}
