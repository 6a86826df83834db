"""The updates of compiled backwards: which run, which gradients wait, and what is an error before anything changes.

`StepInBackward` is the optimizer for the training loop around.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import and_
from typing import Any

import torch
from thunder.distributed import get_skip_data_parallel_grad_sync
from torch.optim import Optimizer

from thunder_mem.optimizer.all_gradients import FIRST_IS_MISSING, AllGradients, FirstPass, Verdict, is_on, size_of
from thunder_mem.optimizer.gradient_edges import add_gradient, hooked, is_asked_for
from thunder_mem.optimizer.group_options import GroupOptions, changed_option, group_options
from thunder_mem.optimizer.host_states import step_with
from thunder_mem.runtime.memory_spans import overlapping

__all__ = ["CompiledUpdates", "Updates"]

_NAMED = 3  # so many parameters are named in a message


class Updates:
    """The parameters that one compiled backward updates; opaque to Thunder, which would print a dataclass.

    Attributes:
        optimizer: updates them.
        parameters: each once.
        names: their names in the program.
        arguments: all names under which the program has them.
    """

    def __init__(
        self,
        optimizer: CompiledUpdates,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        arguments: Collection[str],
    ) -> None:
        self.optimizer, self.parameters, self.names = optimizer, tuple(parameters), tuple(names)
        self.arguments = frozenset(arguments)


@dataclass
class _Backward:
    """A backward with updates, from its first update to its last.

    Attributes:
        updates: of its program.
        task: PyTorch's number of the pass through the autograd graph.
        wait: the updates whose gradients wait for `step`.
        groups: by a parameter's `id`, its parameter group.
        left: the updates that have not run.
        summed: gradients that were accumulated before have these of the backward in them.
        unasked: the updates whose gradients nobody asked for.
        verdict: on all gradients together, where the optimizer needs one.
    """

    updates: Updates
    task: int
    wait: frozenset[int]
    groups: dict[int, dict[str, Any]]
    left: set[int]
    summed: bool = False
    unasked: frozenset[int] = frozenset()
    verdict: Verdict | None = None


class CompiledUpdates:
    """What the operations of compiled programs call.

    Attributes:
        wrapped: the optimizer that steps.
        clip_value, max_norm, scaler, two_pass, states, compiled: as in `StepInBackward`.
    """

    wrapped: Optimizer
    clip_value: float | None
    max_norm: float | None
    scaler: torch.amp.GradScaler | None
    two_pass: bool
    states: str
    compiled: bool

    def _forget(self) -> None:
        """Start with nothing updated and no forward pending."""
        self._updated: dict[int, torch.Tensor] = {}
        self._pending: Counter[Updates] = Counter()
        self._backward: _Backward | None = None
        self._late = ""  # gradients that came after their parameters' updates
        self._accumulating = False
        self._measuring = False
        self._first: FirstPass | None = None
        self._tangents: list[list[float]] = []  # sizes of the gradients with which the last backward began
        self._forwards = 0
        self._skipped = False
        self._warned = False
        self._options_warned = False
        self._options: GroupOptions = ()  # those that the last backward's updates read
        self._read: set[int] = set()  # parameters whose memory is that of an input, or of another parameter, too

    @property
    def needs_all(self) -> bool:
        """Whether no update can run before all gradients are known."""
        return self.max_norm is not None or is_on(self.scaler)

    @property
    def consistent(self) -> bool:
        """False after updates without some gradients, or parameters; `load_state_dict` makes it True again."""
        whole = self._backward is None or self._backward.task == torch._C._current_graph_task_id() != -1
        return whole and not self._late

    def check_arguments(self, updates: Updates, found: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Compare a forward's arguments with the compilation's.

        Args:
            found: the parameters that the program reads in this call.
            inputs: its other tensors. A gradient waits for `step` if one of them, or another parameter, shares the
                parameter's memory, which the backward may read after the update.

        Raises:
            RuntimeError: a parameter was replaced after the compilation, or got a hook.
        """
        for name, p, now in zip(updates.names, updates.parameters, found, strict=True):
            if now is not p:
                raise RuntimeError(f"{name} is another tensor than at the compilation: compile the program again")
            if hooked(p):
                raise RuntimeError(f"{name} got a hook after the compilation, which would see no gradient: remove it")
        memory = {t.untyped_storage()._cdata for t in inputs}
        self._read |= {id(p) for p in updates.parameters if p.untyped_storage()._cdata in memory}
        pending = (p for other, forwards in self._pending.items() if forwards > 0 for p in other.parameters)
        self._read |= overlapping([*updates.parameters, *pending])

    def note_forward(self, updates: Updates) -> None:
        """Record a forward whose backward will update parameters."""
        self._pending[updates] += 1
        self._forwards += 1

    def see_tangents(self, tangents: Sequence[torch.Tensor | None]) -> None:
        """Record the gradients of a program's results, before its backward begins."""
        if self.two_pass:
            self._tangents = size_of(tangents)

    def scale_of(self, updates: Updates, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The number by which all gradients of a backward are multiplied, with those that were accumulated before it.

        Raises:
            RuntimeError: as `update`.
        """
        backward = self._running(updates)
        if backward.wait:
            return grads[0].new_ones(())
        found = []
        for p, grad in zip(updates.parameters, grads, strict=True):
            if p.grad is not None:
                p.grad.add_(grad)
            found.append(grad if p.grad is None else p.grad)
        backward.summed = True
        gradients, places = self.all_gradients(), self._places()
        in_order = sorted(zip(updates.parameters, found, strict=True), key=lambda pair: places[id(pair[0])])
        gradients.add_all([grad for _, grad in in_order])
        backward.verdict = gradients.verdict()
        self._skipped |= backward.verdict.skips
        return backward.verdict.scale

    def _places(self) -> dict[int, int]:
        """By a parameter's `id`, its place in the optimizer: the order in which `clip_grad_norm_` adds norms up."""
        return {id(p): i for i, p in enumerate(p for group in self.wrapped.param_groups for p in group["params"])}

    def all_gradients(self) -> AllGradients:
        """What gradients say together, before any was seen."""
        return AllGradients(self.max_norm, self.scaler if is_on(self.scaler) else None)

    def update(self, updates: Updates, index: int, grad: torch.Tensor) -> None:
        """Update one parameter of a compiled backward with its complete gradient, or let the gradient wait.

        A gradient waits under `accumulate`, and if another forward that used the parameter waits for its backward:
        this gradient may be a part of the whole. `step` then updates the parameter.

        Raises:
            RuntimeError: before anything changes: a parameter was updated since the last `step`, the last
                backward ended in the middle, or a first pass is missing.
        """
        if self._measuring:
            self._look(updates, index, grad)
            return
        backward = self._running(updates)
        if index not in backward.left:
            self._check_whole(again=True)
        p = updates.parameters[index]
        if index in backward.unasked:
            pass
        elif index in backward.wait:
            add_gradient(p, grad)
        else:
            if p.grad is not None:
                grad, p.grad = p.grad if backward.summed else p.grad.add_(grad), None
            if backward.verdict is None or not backward.verdict.skips:
                step = step_with(self.states, self.compiled)
                scale = None if backward.verdict is None else backward.verdict.scale
                step(self.wrapped, backward.groups[id(p)], p, grad, clip_value=self.clip_value, scale=scale)
            self._updated[id(p)] = p
        backward.left.discard(index)
        if not backward.left:
            self._pending[updates] -= 1
            self._backward = None
            if self._first is not None and not backward.wait:
                self._first.used.add(updates)

    def steps_now(self, updates: Updates, index: int) -> bool:
        """Whether `update` will step that parameter, and neither look at its gradient nor let it wait.

        Raises:
            RuntimeError: as `update`.
        """
        if self._measuring:
            return False
        backward = self._running(updates)
        return index in backward.left and index not in backward.wait | backward.unasked

    def _running(self, updates: Updates) -> _Backward:
        """The backward of these updates that runs now."""
        backward = self._backward or self._begin(updates)
        if backward.updates is not updates or backward.task != torch._C._current_graph_task_id():
            self._check_whole(again=True)
        return backward

    def _look(self, updates: Updates, index: int, grad: torch.Tensor) -> None:
        """Look at a gradient of a first pass."""
        assert self._first is not None
        if updates not in self._first.left:
            wait, asked = self._waits(updates)
            if any(wait) or not all(asked):
                why = "backward(inputs=...) asks for some alone" if not all(asked) else self._why_waiting(updates)
                raise RuntimeError(f"two_pass needs all gradients in one backward, but {why}")
            self._first.left[updates] = set(range(len(updates.parameters)))
            self._first.tangents[updates] = self._tangents
        if index not in self._first.left[updates]:
            raise RuntimeError("a second backward inside first_pass()")
        p = updates.parameters[index]
        self._first.gradients.add(self._places()[id(p)], grad if p.grad is None else p.grad + grad)
        self._first.left[updates].discard(index)

    def _waits(self, updates: Updates) -> tuple[list[bool], list[bool]]:
        """Which gradients of a backward have to wait for `step`, and which were asked for."""
        others = self._pending - Counter({updates: 1})
        shared = {id(p) for other in others for p in other.parameters}
        known = {id(p) for group in self.wrapped.param_groups for p in group["params"]}
        shared |= self._read
        asked = [is_asked_for(p, name) for p, name in zip(updates.parameters, updates.names, strict=True)]
        alone = self._accumulating or get_skip_data_parallel_grad_sync()  # no_sync: other ranks' parts are missing
        waits = [alone or id(p) in shared or id(p) not in known for p in updates.parameters]
        if self.misses_gradients(updates) or (self.needs_all and not self.two_pass and (any(waits) or not all(asked))):
            waits = [True] * len(waits)
        return waits, asked

    def _begin(self, updates: Updates) -> _Backward:
        waits, asked = self._waits(updates)
        alone = self._accumulating or get_skip_data_parallel_grad_sync()
        pairs = zip(updates.parameters, updates.names, waits, asked, strict=True)
        changed = set(self._updated)
        if changed:
            changed |= overlapping([*updates.parameters, *self._updated.values()])
        if twice := [name for p, name, wait, ask in pairs if ask and not wait and id(p) in changed]:
            raise RuntimeError(
                f"a second backward since the last step() would update {_named(twice)} again: call step() after each "
                "backward, or run all but the last under `with optimizer.accumulate():`"
            )
        if any(map(and_, waits, asked)) and not alone and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradients wait for optimizer.step(), because {self._why_waiting(updates)}",
                stacklevel=2,
            )
        verdict = None
        if self.two_pass and self.needs_all and not alone:
            if self._first is None:
                raise RuntimeError(FIRST_IS_MISSING)
            verdict = self._first.verdict_on(updates, self._forwards, self._tangents, asked)
        self._skipped |= verdict is not None and verdict.skips
        if not all(waits):
            self._options = group_options(self.wrapped.param_groups)
        groups = {id(p): group for group in self.wrapped.param_groups for p in group["params"]}
        wait = frozenset(i for i, waiting in enumerate(waits) if waiting)
        left = set(range(len(updates.parameters)))
        unasked = frozenset(i for i, ask in enumerate(asked) if not ask)
        task = torch._C._current_graph_task_id()
        self._backward = _Backward(updates, task, wait, groups, left, unasked=unasked, verdict=verdict)
        return self._backward

    def misses_gradients(self, updates: Updates) -> bool:
        """Whether all updates need all gradients, and the optimizer has parameters that this backward leaves out."""
        if not self.needs_all or self.two_pass:
            return False
        own = {id(p) for p in updates.parameters}
        return any(p.requires_grad and id(p) not in own for group in self.wrapped.param_groups for p in group["params"])

    def _why_waiting(self, updates: Updates) -> str:
        if self.misses_gradients(updates):
            return "max_norm needs the norm of all, and the compiled backward has not all parameters of the optimizer"
        if self._read:
            return "a parameter shares memory with an input of the program, or with another parameter"
        return "another forward of the same parameters has had no backward: run evaluations under torch.no_grad()"

    def _warn_of_late_options(self) -> None:
        """Warn once if an option changed after the updates that would have read it in an eager step."""
        name = changed_option(self.wrapped.param_groups, self._options, self._updated)
        if name is not None and not self._options_warned:
            self._options_warned = True
            warnings.warn(
                f"{name!r} of a parameter group changed between backward() and step(): the backward has updated "
                "parameters with the value from before. Set it before backward()",
                stacklevel=4,
            )

    def _check_whole(self, again: bool = False) -> None:
        if self._late:
            raise RuntimeError(f"{self._late}, and load the state from before the backward (load_state_dict)")
        if again or not self.consistent:
            assert self._backward is not None
            count = len(self._backward.updates.parameters)
            raise RuntimeError(
                f"the last backward ended with {len(self._backward.left)} of {count} parameters not updated: "
                "load the parameters and the optimizer's state from before it (load_state_dict)"
            )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
