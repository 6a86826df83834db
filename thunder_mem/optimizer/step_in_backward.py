"""`StepInBackward`: an optimizer whose updates run inside the compiled backward.

A compiled backward hands over all gradients at its end, so they are all alive together. As operations of the backward,
the updates use each gradient when it is complete, and its memory is free again. (torchtune's `optimizer_in_bwd` and
PyTorch's tutorial on `register_post_accumulate_grad_hook` do this in eager mode.)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import and_
from typing import Any

import torch
from thunder.distributed import get_skip_data_parallel_grad_sync
from torch.optim import Optimizer

from thunder_mem.optimizer.arguments import check_clipping, check_optimizer, check_states
from thunder_mem.optimizer.gradient_edges import add_gradient, hooked, is_asked_for
from thunder_mem.optimizer.host_states import load_on_host, move_to_host, settle, step_each, step_with
from thunder_mem.optimizer.one_parameter import unhooked

__all__ = ["StepInBackward", "Updates"]

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
        optimizer: StepInBackward,
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
    """

    updates: Updates
    task: int
    wait: frozenset[int]
    groups: dict[int, dict[str, Any]]
    left: set[int]
    summed: bool = False
    unasked: frozenset[int] = frozenset()


class StepInBackward(Optimizer):
    """An optimizer that updates each parameter inside the backward, as soon as its gradient is complete.

    Pass it to the transform and use it as the optimizer of the training loop. `loss.backward()` then updates the
    parameters. `step` updates the parameters whose gradients the backward handed over in the usual way, such as those
    of a part that Thunder does not compile, and checks the rest. `.grad` stays None where the backward updates.

    Between two calls of `step` each parameter is updated once. To add up gradients of several backwards, run all but
    the last under `accumulate`. Hooks of parameters do not see gradients that the backward uses itself, nor does
    `torch.nn.utils.clip_grad_norm_`: see `clip_value` and `max_norm`.

    Args:
        optimizer: any optimizer of `torch.optim` but LBFGS, or one whose `step` treats each parameter by itself.
        clip_value: gradients are clipped to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_` does.
        max_norm: gradients are scaled as `torch.nn.utils.clip_grad_norm_` does, exactly. So all gradients of the
            backward wait for their norm, and are alive together. If the optimizer has parameters that the backward
            does not update, all wait for `step`.
        states: "device", or "host": the tensors of the optimizer's state that are as large as their parameter are in
            the host's memory, pinned for a GPU. Each update fetches them slice by slice and sends them back, at most
            two slices of 16 MiB (4 MiB on a CPU) of each on the device at once. Optimizers that do not update each
            element by itself take the states of one whole parameter at a time.

    Attributes:
        wrapped: the given optimizer. Its parameter groups and state are this object's, too.

    Raises:
        TypeError: `optimizer` is no optimizer, or cannot update one parameter alone.
        ValueError: `clip_value` or `max_norm` is not positive, or both are given; the optimizer is made for
            `differentiable=True`; or `states` is unknown.

    Example:
        >>> import torch, thunder
        >>> from thunder_mem import MemEfficient, StepInBackward
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = StepInBackward(torch.optim.AdamW(model.parameters()))
        >>> compiled = thunder.jit(model, transforms=[MemEfficient(optimizer=optimizer)])
        >>> compiled(torch.ones(4, 8)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        clip_value: float | None = None,
        max_norm: float | None = None,
        states: str = "device",
    ) -> None:
        check_clipping(clip_value, max_norm)
        check_states(states)
        self.clip_value = clip_value
        self.max_norm = max_norm
        self.states = states
        self.use(optimizer)

    def _forget(self) -> None:
        """Start with nothing updated and no forward pending."""
        self._updated: dict[int, torch.Tensor] = {}
        self._pending: Counter[Updates] = Counter()
        self._backward: _Backward | None = None
        self._accumulating = False
        self._warned = False
        self._read: set[int] = set()  # parameters whose memory is that of an input, too

    # ---- the optimizer for the loop around ----

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # while the object is being made
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "GradScaler scales gradients back after the backward, which has used them by then: train in bfloat16, "
            "which needs no scaling"
        )

    @property
    def consistent(self) -> bool:
        """False after a backward that ended in the middle of its updates; `load_state_dict` makes it True again."""
        return self._backward is None or self._backward.task == torch._C._current_graph_task_id() != -1

    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish a training step: update the parameters whose gradients the backward handed over, if there are any.

        Args:
            closure: computes the loss and its gradients; it is called first.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: no backward ran since the last call; the backward ended in the middle; a parameter got a
                gradient from elsewhere after its update; or gradients are being accumulated.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._check_whole()
        if self._accumulating:
            raise RuntimeError("step() inside accumulate(): leave the context before the last backward")
        waiting = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not waiting and not self._updated:
            raise RuntimeError("no backward gave a gradient since the last step(): call loss.backward() before it")
        if late := [p for p in waiting if id(p) in self._updated]:
            raise RuntimeError(
                f"{len(late)} parameters, the first of shape {tuple(late[0].shape)}, got a gradient from outside of "
                "the compiled program after the backward had updated them: keep each parameter inside of it"
            )
        if waiting:
            if self.clip_value is not None:
                torch.nn.utils.clip_grad_value_(waiting, self.clip_value)
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(waiting, self.max_norm)
            if self.states == "host":
                step_each(self.wrapped)
            else:
                unhooked(self.wrapped)()
        self._updated.clear()
        self._pending.clear()
        self._read.clear()
        return result

    def use(self, optimizer: Optimizer) -> None:
        """Take another optimizer in place of the wrapped one.

        `ddp` and `fsdp` of Thunder make parameters of their own, so their optimizer can only be made after the
        transform: ``optimizer.use(torch.optim.AdamW(step.parameters()))``, before the first call.

        Raises:
            TypeError: as `StepInBackward`.
        """
        if isinstance(optimizer, StepInBackward):
            raise TypeError("the optimizer is a StepInBackward already")
        check_optimizer(optimizer)
        if self.states == "host":
            move_to_host(optimizer)
        self.wrapped = optimizer
        self._forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for `step`, or fill them with zeros."""
        self.wrapped.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backwards add to `.grad` and update nothing; the next backward outside uses the sums."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, also with states on the host: any optimizer of the kind loads it."""
        self._check_whole()
        if self.states == "host":
            settle(self.wrapped)
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer, wherever its states were; parameters are to be loaded with it."""
        if self.states == "host":
            load_on_host(self.wrapped, state_dict)
        else:
            self.wrapped.load_state_dict(state_dict)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; programs that are compiled already leave its parameters to `step`."""
        self.wrapped.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        if self.states == "host":
            settle(self.wrapped)
        return {name: getattr(self, name) for name in ("wrapped", "clip_value", "max_norm", "states")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.use(self.wrapped)

    def __repr__(self) -> str:
        return f"StepInBackward({self.wrapped!r})"

    # ---- for the compiled programs ----

    def check_arguments(self, updates: Updates, found: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Compare a forward's arguments with the compilation's.

        Args:
            found: the parameters that the program reads in this call.
            inputs: its other tensors. A gradient waits for `step` if one of them shares the parameter's memory, which
                the backward may read after the update.

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

    def note_forward(self, updates: Updates) -> None:
        """Record a forward whose backward will update parameters."""
        self._pending[updates] += 1

    def totals(self, updates: Updates, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of all parameters of a backward, with those that were accumulated before it.

        Raises:
            RuntimeError: as `update`.
        """
        backward = self._running(updates)
        found = []
        for p, grad in zip(updates.parameters, grads, strict=True):
            if p.grad is not None and not backward.wait:
                p.grad.add_(grad)
            found.append(grad if p.grad is None else p.grad)
        backward.summed = True
        return found

    def update(self, updates: Updates, index: int, grad: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update one parameter of a compiled backward with its complete gradient, or let the gradient wait.

        A gradient waits under `accumulate`, and if another forward that used the parameter waits for its backward:
        this gradient may be a part of the whole. `step` then updates the parameter.

        Raises:
            RuntimeError: before anything changes: a parameter was updated since the last `step`, or the last
                backward ended in the middle.
        """
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
            step = step_with(self.states)
            step(self.wrapped, backward.groups[id(p)], p, grad, clip_value=self.clip_value, scale=scale)
            self._updated[id(p)] = p
        backward.left.discard(index)
        if not backward.left:
            self._pending[updates] -= 1
            self._backward = None

    def _running(self, updates: Updates) -> _Backward:
        """The backward of these updates that runs now."""
        backward = self._backward or self._begin(updates)
        if backward.updates is not updates or backward.task != torch._C._current_graph_task_id():
            self._check_whole(again=True)
        return backward

    def _begin(self, updates: Updates) -> _Backward:
        others = self._pending - Counter({updates: 1})
        shared = {id(p) for other in others for p in other.parameters}
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        shared |= self._read
        asked = [is_asked_for(p, name) for p, name in zip(updates.parameters, updates.names, strict=True)]
        alone = self._accumulating or get_skip_data_parallel_grad_sync()  # no_sync: other ranks' parts are missing
        waits = [alone or id(p) in shared or id(p) not in groups for p in updates.parameters]
        if self.max_norm is not None and (any(waits) or not all(asked) or self._has_more_than(updates)):
            waits = [True] * len(waits)
        pairs = zip(updates.parameters, updates.names, waits, asked, strict=True)
        if twice := [name for p, name, wait, ask in pairs if ask and not wait and id(p) in self._updated]:
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
        wait = frozenset(i for i, waiting in enumerate(waits) if waiting)
        left = set(range(len(updates.parameters)))
        unasked = frozenset(i for i, ask in enumerate(asked) if not ask)
        self._backward = _Backward(updates, torch._C._current_graph_task_id(), wait, groups, left, unasked=unasked)
        return self._backward

    def _has_more_than(self, updates: Updates) -> bool:
        """Whether the optimizer has trainable parameters that these updates leave out."""
        own = {id(p) for p in updates.parameters}
        return any(p.requires_grad and id(p) not in own for group in self.param_groups for p in group["params"])

    def _why_waiting(self, updates: Updates) -> str:
        if self.max_norm is not None and self._has_more_than(updates):
            return "max_norm needs the norm of all, and the compiled backward has not all parameters of the optimizer"
        if self._read:
            return "an input of the program shares memory with a parameter"
        return "another forward of the same parameters has had no backward: run evaluations under torch.no_grad()"

    def _check_whole(self, again: bool = False) -> None:
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
