"""What `optimizer.step()` holds beside parameters, gradients and states, in each of its variants.

PyTorch's optimizers step one tensor at a time (``foreach=False``), all tensors by one call per operation
(``foreach=True``, the default on a GPU), or in one kernel (``fused=True``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from thunder_mem.optimizer.one_parameter import many_steps_later, unhooked
from thunder_mem.optimizer.trial_steps import bare_copy, on_any_device
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.fake_numbers import FakeNumbers

__all__ = ["StepVariant", "step_variants"]

_OPTIONS: dict[str, dict[str, bool]] = {
    "foreach=True": {"foreach": True, "fused": False},
    "foreach=False": {"foreach": False, "fused": False},
    "fused=True": {"foreach": False, "fused": True},
}


class StepVariant(NamedTuple):
    """One way to run a step.

    Attributes:
        kind: the optimizer's class.
        option: as code.
        temporary_bytes: what it holds at most beside parameters, gradients and states.
        is_used: the optimizer runs in this way.
    """

    kind: str
    option: str
    temporary_bytes: int
    is_used: bool


def step_variants(optimizer: torch.optim.Optimizer, device_type: str) -> tuple[StepVariant, ...]:
    """The variants that all parameter groups of an optimizer have, from steps on meta tensors.

    Gradients count as laid out like their parameters. A variant that meta tensors do not run is left out.

    Args:
        optimizer: of `torch.optim`; others have no known variants.
        device_type: "cpu" or "cuda", which decides for ``foreach=None``.
    """
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim.") or not all("foreach" in group for group in groups):
        return ()
    found = []
    for option, options in _OPTIONS.items():
        if options["fused"] and not all("fused" in group for group in groups):
            continue
        try:
            nbytes = 0 if options["fused"] else _held_bytes(optimizer, options)
        except Exception:  # an option that does not go together with this one
            continue
        is_used = all(_runs(g, device_type) == option for g in groups)
        found.append(StepVariant(type(optimizer).__name__, option, nbytes, is_used))
    return tuple(found)


def _runs(group: dict[str, Any], device_type: str) -> str:
    if group.get("fused"):
        return "fused=True"
    foreach = device_type == "cuda" if group["foreach"] is None else group["foreach"]
    return f"foreach={bool(foreach)}"


def _held_bytes(optimizer: torch.optim.Optimizer, options: dict[str, bool]) -> int:
    """The temporaries of a step on meta tensors, once the state exists."""
    copy = bare_copy(optimizer)
    copy.param_groups, copy.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        twins = []
        for p in group["params"]:
            if p.requires_grad:
                twins.append(_on_meta(p).requires_grad_())
                twins[-1].grad = _on_meta(p)
                if optimizer.state.get(p):
                    copy.state[twins[-1]] = {k: _state_on_meta(optimizer, v) for k, v in optimizer.state[p].items()}
        given = {k: v for k, v in options.items() if k in group}
        copy.param_groups.append({**on_any_device(group), **given, "params": twins})
    step = unhooked(copy)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), FakeNumbers(1.0):  # as in `step_figures`
        step()
        for state in copy.state.values():
            many_steps_later(state)
        with AllocationWatch(("meta",)) as seen:
            step()
    return seen.peak_bytes


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _state_on_meta(optimizer: torch.optim.Optimizer, v: Any) -> Any:
    if not isinstance(v, torch.Tensor):
        return v
    if v.dim() or isinstance(optimizer, torch.optim.ASGD):  # whose numbers are where the parameter is
        return _on_meta(v)
    return torch.ones((), dtype=v.dtype)  # a count of steps, which is read
