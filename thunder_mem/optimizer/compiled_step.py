"""An optimizer's step as one kernel of `torch.compile`: in place, over parameter, gradient and states.

Each optimizer of `torch.optim` has its arithmetic in a function, which its `step` calls with lists of tensors
(`torch.optim.adam.adam`). That function is compiled, with the gradient's clipping in it; `step` itself stays Python.
The learning rate is a tensor, so that a scheduler compiles nothing again (PyTorch's recipe for compiled optimizers).
Sizes are symbols: one compilation serves all parameters of a dtype and a layout.

`torch.compile(optimizer.step)` would compile all parameters into one program instead, and again for every other list.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_mem.optimizer.elementwise import BY_ELEMENT, Clip

__all__ = ["compiled_options", "is_compilable", "run_compiled"]

_ASKING = frozenset((torch.optim.ASGD, torch.optim.RAdam))
"""Their arithmetic reads a number of the state on the CPU, which no kernel can, unless it is told `capturable`."""


def is_compilable(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
    """Whether the step of a parameter can be compiled; others run as without compilation."""
    return type(optimizer) in BY_ELEMENT and p.dim() > 0 and p.numel() > 0 and not is_traceable_wrapper_subclass(p)


def compiled_options(options: dict[str, Any]) -> dict[str, Any]:
    """A group's options for a compiled step: single-tensor code, and a rate that may change."""
    rate = options.get("lr")
    if isinstance(rate, float | int):
        options = {**options, "lr": torch.tensor(rate, dtype=torch.float32, device="cpu")}
    return {**options, **({"foreach": False} if "foreach" in options else {})}


def run_compiled(optimizer: torch.optim.Optimizer, grad: torch.Tensor, clip: Clip) -> None:
    """The optimizer's own `step`, with its arithmetic compiled. A warning says why, if that fails: it runs as it is."""
    step = inspect.unwrap(type(optimizer).step)
    name = step.__globals__["__name__"].rpartition(".")[2]
    arithmetic = step.__globals__[name]
    key = grad.dtype, grad.device, grad.is_contiguous(), clip.value, clip.scale is not None

    def compiled(params: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        run, failed = _compiled(arithmetic, type(optimizer) in _ASKING, *key)
        if not failed:
            bare = [_bare(a) for a in args]
            try:
                numbers = run(clip, _bare(params), _bare(grads), bare, kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before it ran
                failed.append(error)
                _warn(type(optimizer).__name__, error)
            else:
                _take_over(args, bare, numbers)
                return
        arithmetic(params, [clip(g) for g in grads], *args, **kwargs)

    # The class's `step` with another value for one global name: nothing of PyTorch changes, in no thread.
    own = FunctionType(step.__code__, {**step.__globals__, name: compiled}, name, step.__defaults__, step.__closure__)
    with torch.no_grad():
        own(optimizer)


@cache
def _compiled(
    arithmetic: Callable[..., None], asks: bool, dtype: torch.dtype, device: torch.device, *layout_and_clip: Any
) -> tuple[Callable[..., list[torch.Tensor]], list[Exception]]:
    """The compiled arithmetic of an optimizer, and room for the error with which it failed.

    `torch.compile` allows few compilations of one code object, so each of these functions has its own.
    """

    def stepped(
        clip: Clip, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        # A kernel for a GPU takes a number of the CPU by value, but not one that the same program writes.
        own = [[t.clone() for t in a] if _are_numbers(a) else a for a in args]
        told = {**kwargs, "capturable": True} if asks else kwargs
        arithmetic(params, [clip(g) for g in grads], *own, **told)
        return [t for a in own if _are_numbers(a) for t in a]

    own = FunctionType(stepped.__code__.replace(), globals(), stepped.__name__, None, stepped.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=True), []


def _bare(values: Any) -> Any:
    """A list of tensors as views of nothing: `torch.compile` would compile again for a view of another tensor."""
    return [t.data if isinstance(t, torch.Tensor) else t for t in values] if isinstance(values, list) else values


def _take_over(args: Sequence[Any], bare: Sequence[Any], numbers: Sequence[torch.Tensor]) -> None:
    """Write the new numbers of the state into the old ones, and the tensors that a step made into its lists."""
    for t, new in zip((t for a in args if _are_numbers(a) for t in a), numbers, strict=True):
        t.copy_(new)
    for a, own in zip(args, bare, strict=True):
        if isinstance(a, list):
            a[:] = [new if t is None else t for t, new in zip(a, own, strict=True)]


def _warn(kind: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    warnings.warn(
        f"torch.compile failed on a step of {kind}, which runs as without compiled=True, with temporaries as large as "
        f"parameters: {type(error).__name__}: {reason[:200]}",
        stacklevel=2,
    )


def _are_numbers(values: Any) -> bool:
    """Whether an argument is a list of numbers, one for each parameter, such as the counts of steps."""
    return isinstance(values, list) and all(isinstance(t, torch.Tensor) and t.dim() == 0 for t in values)
