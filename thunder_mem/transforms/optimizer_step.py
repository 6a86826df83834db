"""The part of `MemEfficient` that lets the backward update parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.compile_data import _compile_data
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from torch.utils._pytree import tree_leaves

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.frontend.optimized_parameters import optimized_parameters
from thunder_mem.memory.outside_input import quoted
from thunder_mem.memory.plan import Refusal
from thunder_mem.optimizer.gradient_edges import hooked
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.optimizer.update import check_arguments, is_update, note_forward, see_tangents, update_of
from thunder_mem.rewrites.updates import Optimized
from thunder_mem.semantics.effects import with_subsymbols
from thunder_mem.trace.reading import UNPACKING, read_trace
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["check_optimizer", "with_forward_noted", "with_optimizer", "with_tangents_seen"]

_NOT_FOUND = (
    "the program has no parameter of this optimizer that a module or a closure holds, so step() updates them: "
    "compile the module whose parameters the optimizer has"
)

_OF_THE_MODEL = (
    "ddp and fsdp made parameters of their own: before the first call give StepInBackward an optimizer of them, "
    "optimizer.use(AdamW(step.parameters()))"
)
_HOOKED = "a hook waits for the gradient, so step() updates the parameter"
_SPARSE = "its gradient is sparse, so step() updates the parameter"
_RETURNED = "the program returns the parameter, or a view: its gradient is complete behind the backward, at step()"


def check_optimizer(optimizer: Any) -> None:
    """Raise when `optimizer` is neither None nor a `StepInBackward`.

    Raises:
        TypeError: it is another object; the message says what to write.
    """
    if isinstance(optimizer, StepInBackward | None):
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"wrap the optimizer: MemEfficient(optimizer=StepInBackward({type(optimizer).__name__}(...)))")
    raise TypeError(f"optimizer is a StepInBackward or None, not {quoted(optimizer)}")


def with_optimizer(
    options: PlanningOptions,
    optimizer: StepInBackward | None,
    computation: TraceCtx,
    prologue: TraceCtx,
    data: Any,
) -> PlanningOptions:
    """The options with the program's parameters that its backward updates, or with the reason why there are none.

    Args:
        data: Thunder's compile data.

    Raises:
        ValueError: the optimizer clips by the norm of all gradients, and each rank has a part of them; or its
            parameters are those from before ddp or fsdp.
    """
    if optimizer is None:
        return options
    if optimizer.needs_all and getattr(data, "use_fsdp", False):
        what = "a scaler" if optimizer.max_norm is None else "max_norm"
        raise ValueError(f"{what} needs whole gradients, and under fsdp each rank has a part: use clip_value")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimized_parameters(computation.args, prologue, data.fn, parameters)
    if not found and (getattr(data, "use_ddp", False) or getattr(data, "use_fsdp", False)):
        raise ValueError(_OF_THE_MODEL)
    if not found:
        return replace(options, refused=(*options.refused, Refusal("updates in the backward", _NOT_FOUND)))
    storage_of = read_trace(computation).storage_of
    returned = {storage_of.get(p.name) for p in tree_leaves(_results(computation)) if isinstance(p, TensorProxy)}
    returned.discard(None)
    sparse = {storage_of.get(name) for b in computation.bound_symbols for name in _with_sparse_gradients(b)}
    sparse.discard(None)
    for name, p in list(found.items()):
        storage = storage_of.get(name)
        reason = _HOOKED if hooked(p) else _RETURNED if storage in returned else _SPARSE if storage in sparse else None
        if reason is not None:
            options = replace(options, refused=(*options.refused, Refusal(f"update of {name}", reason)))
            found = {n: q for n, q in found.items() if q is not p}
    return replace(options, optimized=Optimized(optimizer, found))


def _with_sparse_gradients(bsym: BoundSymbol) -> Iterator[str]:
    """The tensors that an operation looks up rows of with ``sparse=True``."""
    for part in with_subsymbols(bsym):
        if part.sym.id == ltorch.embedding.id:
            _, weight, *_, sparse = part.sym.normalize(*part.args, **part.kwargs)[0]
            if sparse is True:
                yield weight.name


def _results(computation: TraceCtx) -> Any:
    """What the program gives its caller."""
    output = computation.output
    return output["output"] if isinstance(output, dict) else output


def with_forward_noted(forward: TraceCtx) -> TraceCtx:
    """The final forward, which tells the optimizer that a backward with updates may follow; unchanged if none does."""
    _, stats = _compile_data.get()
    if TraceTag.AUGMENTED_FORWARD not in forward.tags or not stats.last_backward_traces:
        return forward
    update = next((update_of(b) for b in stats.last_backward_traces[-1].bound_symbols if is_update(b)), None)
    if update is None:
        return forward
    *body, result = forward.bound_symbols
    updates = update.updates
    tensors = {p.name: p for p in forward.args if isinstance(p, TensorProxy)}
    found = [tensors[name] for name in updates.names]
    inputs = [p for name, p in tensors.items() if name not in updates.arguments]
    start = next(i for i, b in enumerate(body) if b.sym.id not in UNPACKING)

    def telling() -> list[BoundSymbol]:
        checks = check_arguments.bind(updates, found, inputs, output=None)
        return [*body[:start], checks, *body[start:], note_forward.bind(updates, output=None), result]

    return rebuilt(forward, telling, "Tell the optimizer of the forward")


def with_tangents_seen(backward: TraceCtx) -> TraceCtx:
    """The final backward, which shows the optimizer the gradients that it begins with; unchanged without two passes."""
    update = next((update_of(b) for b in backward.bound_symbols if is_update(b)), None)
    if update is None or not update.updates.optimizer.two_pass:
        return backward
    body = backward.bound_symbols
    names = {p.name for p in backward.args[1] if isinstance(p, TensorProxy)}
    start = max(i for i, b in enumerate(body) if b.sym.id in UNPACKING)
    tangents = [p for b in body[: start + 1] for p in b.flat_proxy_outs if p.name in names]

    def showing() -> list[BoundSymbol]:
        seen = see_tangents.bind(update.updates, tangents, output=None)
        return [*body[: start + 1], seen, *body[start + 1 :]]

    return rebuilt(backward, showing, "Show the optimizer what the backward begins with")
