"""The update of a parameter as an operation of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from thunder.core import dtypes
from thunder.core.dtypes import to_dtype, to_torch_dtype
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_mem.optimizer.all_gradients import AllGradients
from thunder_mem.optimizer.compiled_updates import Updates
from thunder_mem.optimizer.elementwise import BRANCHING
from thunder_mem.optimizer.figures import StepFigures
from thunder_mem.optimizer.host_states import step_with
from thunder_mem.optimizer.one_parameter import first_state, group_of
from thunder_mem.optimizer.state_transfers import StateTransfers
from thunder_mem.optimizer.trial_steps import bare_copy
from thunder_mem.runtime.host_transfers import run_beside, wait_for
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = [
    "Rehearsal",
    "Update",
    "UpdateOnZeros",
    "check_arguments",
    "clip_scale",
    "end_update",
    "finishes_update",
    "is_update",
    "note_forward",
    "rehearsal_now",
    "rehearsed",
    "see_tangents",
    "start_update",
    "update_of",
    "update_parameter",
]

executor = OperatorExecutor("thunder_mem_optimizer", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""


class Temporaries(NamedTuple):
    """Bytes that an update holds: from its start to its end, beside other work, or only while it starts."""

    in_flight: int
    at_start: int


class Update:
    """One update of a program; opaque to Thunder, which passes it through as an object.

    Attributes:
        updates: all of the program's.
        index: of the parameter among them.
        figures: of the optimizer's step.
        transfers: of its states, if they are on the host.
        alone: the same update where nothing runs beside it; None if it is that one.
    """

    def __init__(
        self,
        updates: Updates,
        index: int,
        figures: StepFigures,
        transfers: StateTransfers | None = None,
        alone: Update | None = None,
    ) -> None:
        self.updates, self.index, self.figures, self.transfers = updates, index, figures, transfers
        self.alone = alone

    def beside(self, exposed_s: float) -> Update:
        """The same update beside other work, which waits so many seconds for it."""
        assert self.transfers is not None
        transfers = replace(self.transfers, exposed_s=exposed_s)
        return Update(self.updates, self.index, self.figures, transfers, self.alone or self)

    @property
    def flight_bytes(self) -> int:
        """What an update beside other work holds from its start to its end; on a CPU it runs whole at its start."""
        return self.temporaries().in_flight

    def temporaries(self, kind: str = "step") -> Temporaries:
        """What a step of a kind, "step" or "first", holds beyond parameter, gradient and state."""
        nbytes = self.figures.first_bytes if kind == "first" else self.figures.temporary_bytes
        runs_beside = self.alone is not None and self.parameter.device.type == "cuda"
        return Temporaries(nbytes, 0) if runs_beside else Temporaries(0, nbytes)

    @property
    def label(self) -> str:
        """The parameter's name in the program."""
        return self.updates.names[self.index]

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter itself."""
        return self.updates.parameters[self.index]

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group of the parameter; empty if it left the optimizer after the compilation."""
        return group_of(self.updates.optimizer.wrapped, self.parameter)

    def numbers(self) -> dict[str, float]:
        """The numbers of its state on which the optimizer's arithmetic may branch, as far as they exist."""
        optimizer = self.updates.optimizer.wrapped
        if type(optimizer).__module__.startswith("torch.optim.") and type(optimizer) not in BRANCHING:
            return {}
        with _disable_current_modes():
            state = optimizer.state.get(self.parameter, {})
            return {name: float(v) for name, v in state.items() if _is_number(v)}

    def __repr__(self) -> str:  # the same for updates that do the same
        optimizer, group = self.updates.optimizer, self.group
        options = ", ".join(f"{k}={_shown(v)}" for k, v in group.items() if k != "params")
        clipping = f"clip_value={optimizer.clip_value}, max_norm={optimizer.max_norm}, two_pass={optimizer.two_pass}"
        states = "device" if self.transfers is None else "host"
        how = f"states={states}, compiled={optimizer.compiled}"
        return f"{type(optimizer.wrapped).__name__}({options}, {clipping}, {how})"


def _is_number(v: Any) -> bool:
    if isinstance(v, torch.Tensor):
        return v.dim() == 0 and not isinstance(v, FakeTensor)
    return type(v) in (int, float)


def _shown(option: Any) -> str:
    """An option as text; a tensor's number cannot be read on fake tensors, and changes from step to step."""
    return f"{option.dtype}{list(option.shape)}" if isinstance(option, torch.Tensor) else str(option)


class Rehearsal:
    """Takes the place of updates while a trace runs on fake tensors. This one does nothing.

    Attributes:
        waits: gradients wait, so no step runs.
    """

    waits = False

    @property
    def kind(self) -> str:
        """What an update does: "step", "first" (a step that makes its states), "look" or "look at sum"."""
        return "step"

    def trial(self, update: Update) -> Rehearsal:
        """Runs an update of this kind for real, to measure it."""
        return (
            UpdateOnZeros(update, first=self.kind == "first") if self.kind in ("step", "first") else _Looks(self.kind)
        )

    def update(self, update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Take the place of an update of `p`, the trace's tensor for the parameter."""

    def finish(self) -> None:
        """The update has ended."""


class UpdateOnZeros(Rehearsal):
    """Runs updates for real, by a copy of the optimizer with a state of its own, to measure them.

    The first run makes the state, and later ones step as the optimizer's next step would.

    Args:
        first: each makes its states, which stay.
    """

    def __init__(self, update: Update, *, first: bool = False) -> None:
        optimizer = update.updates.optimizer
        self.clip_value = optimizer.clip_value
        self.scaled = optimizer.needs_all
        self.scale: torch.Tensor | None = None
        self.step = step_with(optimizer.states, optimizer.compiled)
        self.group = update.group
        self.copy = bare_copy(optimizer.wrapped)
        self.state: Any = None
        self.first = first
        self.numbers = update.numbers()
        self.kept: list[Any] = []  # nothing of a run may be released in the next

    def update(self, update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None) -> None:
        begins = self.state is None or self.first
        self.copy.state = first_state(self.copy, self.group, p) if begins else defaultdict(dict, {p: self.state})
        if self.scaled and scale is None:  # a first pass found it
            scale = self.scale = torch.ones(()) if self.scale is None else self.scale
        if not begins:
            for name, number in self.numbers.items():
                own = self.state.get(name)
                if isinstance(own, torch.Tensor):
                    own.fill_(number)
                else:
                    self.state[name] = number if isinstance(own, float) else int(number)
        self.step(self.copy, self.group, p, grad, clip_value=self.clip_value, scale=scale)
        self.state = self.copy.state[p]
        self.kept.append(self.state)
        self.copy.state = defaultdict(dict)


class _Looks(Rehearsal):
    """Looks at gradients as a first pass does."""

    def __init__(self, kind: str) -> None:
        self.summed = kind == "look at sum"

    def update(self, update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None) -> None:
        update.updates.optimizer.all_gradients().add(0, grad + grad if self.summed else grad)


_rehearsal: ContextVar[Rehearsal | None] = ContextVar("thunder_mem_rehearsal", default=None)


@contextmanager
def rehearsed(rehearsal: Rehearsal) -> Iterator[None]:
    """Let traces inside run without touching the optimizer."""
    token = _rehearsal.set(rehearsal)
    try:
        yield
    finally:
        _rehearsal.reset(token)


def rehearsal_now() -> Rehearsal:
    """The rehearsal that takes the place of updates now, else a new one."""
    return _rehearsal.get() or Rehearsal()


def _update(update: Update, p: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    if (rehearsal := _rehearsal.get()) is not None:
        rehearsal.update(update, p, grad, scale)
    else:
        update.updates.optimizer.update(update.updates, update.index, grad)


update_parameter = executor.register_operator(
    "update_parameter", meta=lambda update, p, grad, scale=None: None, fn=_update, tags=(OpTags.DONT_DCE,)
)


def _start_meta(update: Update, p: TensorProxy, grad: TensorProxy) -> TensorProxy:
    return TensorProxy(shape=(update.flight_bytes,), device=p.device, dtype=dtypes.uint8, requires_grad=False)


def _start(update: Update, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if (rehearsal := _rehearsal.get()) is not None:
        rehearsal.update(update, p, grad, None)
        steps = rehearsal.kind in ("step", "first") and not rehearsal.waits
        nbytes = update.temporaries(rehearsal.kind).in_flight if steps else 0
        return p.new_empty(nbytes, dtype=torch.uint8, requires_grad=False)
    optimizer, own = update.updates.optimizer, update.parameter
    flight = own.new_empty(0, dtype=torch.uint8, requires_grad=False)  # on CUDA the stream beside has its own memory
    run = partial(optimizer.update, update.updates, update.index)
    if not optimizer.steps_now(update.updates, update.index):
        run(grad)
        return flight
    # What the step reads and may replace: the memory of a parameter, a gradient or a state must not be free too early.
    state = tree_leaves(optimizer.wrapped.state.get(own, {}))
    kept = (own.data, own.grad, *state, *(v for v in vars(optimizer.wrapped).values() if isinstance(v, torch.Tensor)))
    run_beside(run, flight, grad, kept=kept)
    return flight


start_update = executor.register_operator("start_update", meta=_start_meta, fn=_start, tags=(OpTags.DONT_DCE,))
"""`flight = start_update(update, p, grad)`: the update has begun, beside what is asked of the device later."""


end_update = executor.register_operator(
    "end_update", meta=lambda *_: None, fn=lambda update, flight, *_: wait_for(flight), tags=(OpTags.DONT_DCE,)
)
"""`end_update(update, flight, p, grad)`: the update has ended, as far as what is asked of the device later can tell."""


def _scale_meta(updates: Updates, *grads: TensorProxy) -> TensorProxy:
    dtype = reduce(torch.promote_types, (to_torch_dtype(g.dtype) for g in grads))
    dtype = torch.float32 if updates.optimizer.scaler is not None else dtype
    return TensorProxy(shape=(), device=grads[0].device, dtype=to_dtype(dtype), requires_grad=False)


def _scale(updates: Updates, *grads: torch.Tensor) -> torch.Tensor:
    optimizer, rehearsal = updates.optimizer, _rehearsal.get()
    if rehearsal is None:
        return optimizer.scale_of(updates, grads)
    if optimizer.max_norm is None:
        return grads[0].new_ones((), dtype=torch.float32)
    if rehearsal.waits:
        return grads[0].new_ones(())
    gradients = AllGradients(optimizer.max_norm, None)
    gradients.add_all(grads)
    return gradients.verdict().scale


clip_scale = executor.register_operator("clip_scale", meta=_scale_meta, fn=_scale)
"""The number by which all gradients are multiplied: it clips their norm, and takes back a scaler's scale."""


def _telling(name: str, tell: Callable[..., None]) -> Symbol:
    """An operation that tells the optimizer its arguments, the first of which are the updates; not in a rehearsal."""

    def run(*args: Any) -> None:
        if _rehearsal.get() is None:
            tell(*args)

    return executor.register_operator(name, meta=lambda *_: None, fn=run, tags=(OpTags.DONT_DCE,))


check_arguments = _telling("check_arguments", lambda updates, *args: updates.optimizer.check_arguments(updates, *args))
note_forward = _telling("note_forward", lambda updates: updates.optimizer.note_forward(updates))
see_tangents = _telling("see_tangents", lambda updates, tangents: updates.optimizer.see_tangents(tangents))


def is_update(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol updates a parameter."""
    return bsym.sym is update_parameter or bsym.sym is start_update


def finishes_update(bsym: BoundSymbol) -> bool:
    """Whether an update has ended after the bound symbol."""
    return bsym.sym is update_parameter or bsym.sym is end_update


def update_of(bsym: BoundSymbol) -> Update:
    """The update behind its bound symbol."""
    return bsym.args[0]


def _written(bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
    return (bsym.args[2 if bsym.sym is end_update else 1],)


def _scratch_bytes(bsym: BoundSymbol) -> int:
    return update_of(bsym).temporaries().at_start


def _alone(bsym: BoundSymbol) -> BoundSymbol:
    update, *args = bsym.args
    return bsym if update.alone is None else update_parameter.bind(update.alone, *args, output=None)


_UPDATE = MemoryTraits(writes=_written, scratch_bytes=_scratch_bytes, last_write=True, runs=_alone)
_TRAITS = {
    "update_parameter": _UPDATE,
    "start_update": replace(_UPDATE, beside="starts"),
    "end_update": MemoryTraits(writes=_written, last_write=True, seconds=lambda *_: 0.0, beside="ends"),
}
declare(executor, lambda name: _TRAITS.get(name, PLAIN))
