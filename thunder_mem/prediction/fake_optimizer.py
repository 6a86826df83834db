"""An optimizer over the twins of its parameters, which steps as the original would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from thunder_mem.fake_execution.fake_twins import Twins
from thunder_mem.fake_execution.replay import Ledger
from thunder_mem.optimizer.host_states import is_large
from thunder_mem.optimizer.trial_steps import bare_copy
from thunder_mem.runtime.fake_numbers import FakeNumbers

__all__ = ["hold_states", "make_state", "next_scalars", "state_tensors", "twin_optimizer"]


def twin_optimizer(optimizer: torch.optim.Optimizer, twins: Twins, simulated: bool) -> torch.optim.Optimizer:
    """The same optimizer over the parameters' twins, with twins of its state."""
    twin = bare_copy(optimizer)
    twin.param_groups = [
        {**group, **_on_device(type(optimizer), group, simulated), "params": [twins.of(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        twin.state[twins.of(p)] = tree_map_only(torch.Tensor, lambda t: _state_twin(t, twins), state)
    return twin


_ON_DEVICE = "counts on the device"  # an option of twins alone, for groups with ``capturable=True``


def _state_twin(t: torch.Tensor, twins: Twins) -> torch.Tensor:
    if t.device.type == "cpu" and not isinstance(t, FakeTensor):
        return twins.mode.from_tensor(t, static_shapes=True)
    return twins.to_cpu(t)


def _on_device(kind: type, group: dict[str, Any], simulated: bool) -> dict[str, Any]:
    """Set the options that depend on the device: on CUDA one call for all parameters, and twins cannot be captured."""
    if simulated and group.get("capturable"):
        return {**_on_device(kind, {**group, "capturable": False}, simulated), "capturable": False, _ON_DEVICE: True}
    undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
    if not simulated or not undecided or group.get("differentiable") or kind is torch.optim.Adafactor:
        return {}
    by_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
    return {"foreach": not by_tensor}


def make_state(
    optimizer: torch.optim.Optimizer, twins: Twins, set_to_none: bool, used: Iterable[torch.Tensor] = ()
) -> None:
    """Run one step on made-up gradients, so that later steps find the optimizer's state.

    Args:
        optimizer: over twins; counts in its state that are no tensors stay as they are.
        twins: of the caller's tensors.
        set_to_none: no gradient stays.
        used: parameters whose gradients do not stay anyway.
    """
    counts = {p: {k: v for k, v in s.items() if type(v) in (int, float)} for p, s in optimizer.state.items()}
    gone = {id(p) for p in used}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    with FakeNumbers():
        optimizer.step()
    for p, known in counts.items():
        optimizer.state[p].update(known)
    for p in parameters:
        if set_to_none or id(p) in gone:
            p.grad = None
        else:
            twins.ledger.add("gradient", p.grad, "gradient", held=True)


def next_scalars(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, twins: Twins) -> dict[int, float]:
    """The optimizer's scalars (step counts, coefficients), by storage: some optimizers branch on them.

    The present values, or those after one step if there was no step yet or they cannot be read.
    """
    done = {id(twins.of(p)): state for p, state in optimizer.state.items()}
    known = {}
    for group, rehearsed in zip(twin.param_groups, _rehearse(optimizer), strict=True):
        for p in group["params"]:
            for name, t in twin.state.get(p, {}).items():
                if isinstance(t, torch.Tensor) and t.dim() == 0:
                    now = done.get(id(p), {}).get(name, rehearsed.get(name))
                    with unset_fake_temporarily():
                        value = rehearsed.get(name, 1.0) if now is None or isinstance(now, FakeTensor) else now
                        known[t.untyped_storage()._cdata] = float(value) + (name == "step")
    return known


def _rehearse(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Per group, the scalars of the state after one step of a parameter of one element."""
    scalars: list[dict[str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        with unset_fake_temporarily(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            p = torch.nn.Parameter(torch.ones(1, 1))
            p.grad = torch.ones(1, 1)
            options = {k: 1e-3 if isinstance(v, FakeTensor) else v for k, v in group.items()}
            if "capturable" in options:
                options["capturable"] = False  # which is for GPUs, and changes no scalar
            small = bare_copy(optimizer)
            small.param_groups = [{**options, "params": [p]}]
            small.state = defaultdict(dict)
            try:
                small.step()
            except Exception:  # a custom optimizer that takes no such parameter: its scalars are unknown
                small.state.clear()
            scalars.append({k: t for k, t in small.state[p].items() if isinstance(t, torch.Tensor) and t.dim() == 0})
    return scalars


def hold_states(
    ledger: Ledger,
    p: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    simulated: bool,
    states: str = "device",
    *,
    held: bool = True,
) -> None:
    """Record a parameter's state: on the device or, if `states` is "host", its large tensors on the host.

    Args:
        held: it existed before the step.
    """
    for name, t in state_tensors(state):
        if states == "host" and name in state and is_large(t, p):
            ledger.add_host(t, "cuda" if simulated else "cpu")
        elif simulated and name == "step" and not (group.get(_ON_DEVICE) or group.get("fused")):
            ledger.ignore(t)  # counted on the host
        else:
            ledger.add(f"optimizer.{name}", t, "optimizer state", held=held)


def state_tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter's state, also those in lists and tables, by names such as "history.0"."""
    for path, t in tree_flatten_with_path(state)[0]:
        if isinstance(t, torch.Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), t
