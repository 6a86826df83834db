"""Update parameters in the joint trace, where their gradients are complete.

The updates stand last; the plan moves each to where its gradient is complete and its parameter was read for the last
time. The backward then returns None for the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_mem.costs.roofline import device_model_of
from thunder_mem.memory.device_bytes import host_bytes
from thunder_mem.memory.device_models import DEVICE_MODELS
from thunder_mem.memory.plan import Decision
from thunder_mem.optimizer.compiled_updates import Updates
from thunder_mem.optimizer.figures import StepFigures, step_figures
from thunder_mem.optimizer.state_transfers import StateTransfers, state_transfers
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.optimizer.update import Update, clip_scale, is_update, update_of, update_parameter
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.trace.reading import BACKWARD, joint_results

__all__ = ["Optimized", "about_states", "with_updates"]


@dataclass(frozen=True)
class Optimized:
    """The parameters of a program that its backward is to update.

    Attributes:
        optimizer: updates them.
        parameters: by the name of the computation's argument; several names may be one parameter.
        states: where the optimizer's states are in this plan, "device" or "host"; None for where they are now.
    """

    optimizer: StepInBackward
    parameters: Mapping[str, torch.Tensor]
    states: str | None = None

    @property
    def place(self) -> str:
        """Where the optimizer's states are, "device" or "host"."""
        return self.states or self.optimizer.states


def with_updates(trace: TraceCtx, optimized: Optimized) -> TraceCtx:
    """The joint trace that updates its parameters; unchanged if it gives none of them a gradient.

    Args:
        trace: a joint trace before fusion.
        optimized: its parameters.
    """
    *body, result = trace.bound_symbols
    returned = joint_results(result)
    if returned is None:
        return trace
    pairs = list(zip(returned["flat_args"], returned["output"], strict=True))
    gradients: dict[int, list[tuple[TensorProxy, TensorProxy]]] = {}  # per parameter, its arguments and their gradients
    for p, grad in pairs:
        if isinstance(p, TensorProxy) and isinstance(grad, TensorProxy) and p.name in optimized.parameters:
            gradients.setdefault(id(optimized.parameters[p.name]), []).append((p, grad))
    if not gradients:
        return trace
    firsts = [parts[0][0] for parts in gradients.values()]
    parameters, names = [optimized.parameters[p.name] for p in firsts], [p.name for p in firsts]
    arguments = [name for name, p in optimized.parameters.items() if id(p) in gradients]
    updates = Updates(optimized.optimizer, parameters, names, arguments)
    new = from_trace(trace)
    new.bound_symbols = [*body]
    memory = Aliases(body)
    written = {memory(p.name) for p in firsts}
    with tracectx(new):
        start = len(new.bound_symbols)
        figures = _Figures(optimized.optimizer, optimized.place)
        # A gradient that is a parameter's own memory must not change when that parameter is updated.
        totals = [
            reduce(ltorch.add, [prims.clone(grad) if memory(grad.name) in written else grad for _, grad in parts])
            for parts in gradients.values()
        ]
        waits = optimized.optimizer.needs_all and not optimized.optimizer.two_pass
        scale = (clip_scale(updates, *totals),) if waits else ()
        for index, (p, grad) in enumerate(zip(firsts, totals, strict=True)):
            own = figures.of(parameters[index])
            update_parameter(Update(updates, index, own, figures.transfers(parameters[index], own)), p, grad, *scale)
        for bsym in new.bound_symbols[start:]:
            bsym.tags.add(BACKWARD)
        done = {p.name for parts in gradients.values() for p, _ in parts}
        kept = tuple(None if isinstance(p, TensorProxy) and p.name in done else grad for p, grad in pairs)
        new.bound_symbols.append(result.from_bsym(args=({**returned, "output": kept}, *result.args[1:])))
    new.set_provenance(TraceProvenance("Update parameters in the backward"))
    return new


def about_states(trace: TraceCtx) -> tuple[Decision, ...]:
    """The decision to keep states on the host, with its price; none if they are on the device.

    Args:
        trace: a joint trace with its updates.
    """
    updates = [update_of(b) for b in trace.bound_symbols if is_update(b)]
    moved = [u.transfers for u in updates if u.transfers is not None]
    if not moved:
        return ()
    nbytes = sum(
        u.figures.tensors * host_bytes(u.figures.state_bytes // u.figures.tensors, str(u.parameter.device))
        for u in updates
        if u.figures.tensors
    )
    times = sum(moved, StateTransfers())
    count = len(updates)
    how = (
        f"{count:,} {'update' if count == 1 else 'updates'} of {type(updates[0].updates.optimizer.wrapped).__name__} "
        f"on the device, with states from the host: {times.link_s * 1e3:.3g} ms on the link, "
        f"{times.exposed_s * 1e3:.3g} ms of them not hidden behind other work"
    )
    if updates[0].parameter.device.type == "cuda":
        how += f". So they last {times.update_s * 1e3:.3g} ms; on the host's CPU {times.on_host_s * 1e3:.3g} ms"
    return (Decision("optimizer states", how, "host", 0, nbytes),)


class _Figures:
    """Figures of updates, found once for all parameters alike."""

    def __init__(self, optimizer: StepInBackward, states: str) -> None:
        self.optimizer, self.states = optimizer, states
        self.group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.known: dict[Any, StepFigures] = {}

    def of(self, p: torch.Tensor) -> StepFigures:
        group = self.group_of[id(p)]
        key = id(group), tuple(p.shape), p.dtype
        if key not in self.known:
            optimizer = self.optimizer
            self.known[key] = step_figures(
                optimizer.wrapped,
                group,
                p.shape,
                p.dtype,
                p.device.type,
                clip_value=optimizer.clip_value,
                scaled=optimizer.needs_all,
                states=self.states,
                compiled=optimizer.compiled,
            )
        return self.known[key]

    def transfers(self, p: torch.Tensor, figures: StepFigures) -> StateTransfers | None:
        """The copies of the states, if they are on the host."""
        if self.states != "host":
            return None
        return state_transfers(figures, p.nbytes, device_model_of(p.device), DEVICE_MODELS["cpu"])
