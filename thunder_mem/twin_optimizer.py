"""An optimizer over the twins of its parameters, which steps as the original would."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from thunder_mem.replay import Ledger
from thunder_mem.twins import Scalars, Twins

__all__ = ["hold_state", "make_state", "next_steps", "twin_optimizer"]


def twin_optimizer(optimizer: torch.optim.Optimizer, twins: Twins, simulated: bool) -> torch.optim.Optimizer:
    """The same optimizer over the parameters' twins, with twins of whatever state it has."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a learning-rate scheduler binds the original's
    twin.__dict__.pop("zero_grad", None)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = [
        {**group, **_on_device(type(optimizer), group, simulated), "params": [twins.of(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        twin.state[twins.of(p)] = tree_map_only(torch.Tensor, lambda t: _state_twin(t, twins), state)
    return twin


def _state_twin(t: torch.Tensor, twins: Twins) -> torch.Tensor:
    if t.device.type == "cuda":
        return twins.to_cpu(t)
    return t if isinstance(t, FakeTensor) else twins.mode.from_tensor(t, static_shapes=True)


def _on_device(kind: type, group: dict[str, Any], simulated: bool) -> dict[str, Any]:
    """Options that the optimizer would choose by device: on CUDA, one call for all parameters."""
    undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
    if not simulated or not undecided or group.get("differentiable") or kind is torch.optim.Adafactor:
        return {}
    by_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
    return {"foreach": not by_tensor}


def make_state(optimizer: torch.optim.Optimizer, twins: Twins, set_to_none: bool) -> None:
    """Run one step on gradients that come from nowhere, so that later ones find the optimizer's state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    with Scalars():
        optimizer.step()
    for p in parameters:
        if set_to_none:
            p.grad = None
        else:
            twins.ledger.add("gradient", p.grad, "gradient", held=True)


def next_steps(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, twins: Twins) -> dict[int, float]:
    """What the optimizer will read from its step counts, by storage: some optimizers branch on it."""
    done = {id(twins.of(p)): state.get("step") for p, state in optimizer.state.items()}
    known = {}
    for p, state in twin.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            before = done.get(id(p))
            with unset_fake_temporarily():
                count = 1.0 if before is None or isinstance(before, FakeTensor) else float(before)
            known[state["step"].untyped_storage()._cdata] = count + 1
    return known


def hold_state(ledger: Ledger, name: str, t: torch.Tensor, group: dict[str, Any], simulated: bool) -> None:
    if simulated and name == "step" and not (group.get("capturable") or group.get("fused")):
        ledger.ignore(t)  # counted on the host
    else:
        ledger.add(f"optimizer.{name}", t, "optimizer state", held=True)
