"""An optimizer's step as one kernel of `torch.compile`: in place, over parameter, gradient and states.

Each optimizer of `torch.optim` has its arithmetic in a function, which its `step` calls with lists of tensors
(`torch.optim.adam.adam`). That function is compiled, with the gradient's clipping in it; `step` itself stays Python.
The learning rate is a tensor, so that a scheduler compiles nothing again (PyTorch's recipe for compiled optimizers).
Sizes are symbols: one compilation serves all parameters of a dtype and a layout. Other numbers are constants, which
compile again when they change: with ``dynamic=True`` they would be symbols, too, and PyTorch 2.11 then runs a program
with the first value of `betas` for all others.

`torch.compile(optimizer.step)` would compile all parameters into one program instead, and again for every other list.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from threading import RLock
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_mem.optimizer.elementwise import BRANCHING, BY_ELEMENT, Clip

__all__ = ["compiled_options", "has_failed", "is_compilable", "run_compiled"]

_LOCK = RLock()  # while one thread compiles, no other may call what is compiled


_FAILED: set[type] = set()
"""The optimizers on which `torch.compile` failed."""


def is_compilable(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
    """Whether the step of a parameter can be compiled; others run as without compilation."""
    able = type(optimizer) in BY_ELEMENT and not has_failed(optimizer)
    return able and p.dim() > 0 and p.numel() > 0 and not is_traceable_wrapper_subclass(p)


def has_failed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of such an optimizer could not be compiled before."""
    return type(optimizer) in _FAILED


def compiled_options(options: dict[str, Any]) -> dict[str, Any]:
    """A group's options for a compiled step: single-tensor code, and a rate that may change."""
    rate = options.get("lr")
    if isinstance(rate, float | int):
        options = {**options, "lr": torch.tensor(rate, dtype=torch.float64, device="cpu")}
    return {**options, **{name: False for name in ("foreach", "fused") if name in options}}


def run_compiled(optimizer: torch.optim.Optimizer, grad: torch.Tensor, clip: Clip) -> None:
    """The optimizer's own `step`, with its arithmetic compiled.

    If that fails, a warning says why, and this step runs as it is. Later steps of such optimizers are not compiled: see
    `is_compilable`.
    """
    step = inspect.unwrap(type(optimizer).step)
    name = step.__globals__["__name__"].rpartition(".")[2]
    arithmetic = step.__globals__[name]
    key = grad.dtype, grad.device, grad.is_contiguous(), clip.value, clip.scale is not None

    def compiled(params: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        run, bare = _compiled(arithmetic, type(optimizer) in BRANCHING, *key), [_bare(a) for a in args]
        try:
            with _LOCK:
                numbers = run(clip, _bare(params), _bare(grads), bare, kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before it ran
            _FAILED.add(type(optimizer))
            _warn(type(optimizer).__name__, error)
            arithmetic(params, [clip(g) for g in grads], *args, **kwargs)
        else:
            _take_over(args, bare, numbers)
            increment_version(params)  # autograd's, as any write in place does

    # The class's `step` with another value for one global name: nothing of PyTorch changes, in no thread.
    own = FunctionType(step.__code__, {**step.__globals__, name: compiled}, name, step.__defaults__, step.__closure__)
    with torch.no_grad():
        own(optimizer)


@cache
def _compiled(
    arithmetic: Callable[..., None], branches: bool, dtype: torch.dtype, device: torch.device, *layout_and_clip: Any
) -> Callable[..., list[torch.Tensor]]:
    """The compiled arithmetic of an optimizer, which returns the new numbers of its state.

    `torch.compile` allows few compilations of one code object, so each of these functions has its own. It also adds to
    a function's globals, which Thunder may read meanwhile, so these are a copy.
    """

    number = torch.float64 if branches or dtype == torch.float64 else torch.float32

    def stepped(
        clip: Clip, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        # A kernel for a GPU takes a number of the CPU by value, but not one that the same program writes. A correction
        # such as 1 - .999 in the first step is computed for each element: in 64 bits Adam takes twice the time.
        # A kernel cannot branch on a number, unless it is told `capturable`. On a CPU PyTorch takes that option only
        # while it compiles.
        own = [[t.to(number, copy=True) for t in a] if _are_numbers(a) else a for a in args]
        told = {**kwargs, "capturable": True} if branches and torch.compiler.is_compiling() else kwargs
        arithmetic(params, [clip(g) for g in grads], *own, **told)
        return [t for a in own if _are_numbers(a) for t in a]

    own = FunctionType(stepped.__code__.replace(), {**globals()}, stepped.__name__, None, stepped.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _bare(values: Any) -> Any:
    """A list of tensors of any size, as views of nothing: for views `torch.compile` would compile again."""
    if not isinstance(values, list):
        return values
    bare = [t.data if isinstance(t, torch.Tensor) else t for t in values]
    for t in (t for t in bare if isinstance(t, torch.Tensor)):
        maybe_mark_dynamic(t, list(range(t.dim())))
    return bare


def _take_over(args: Sequence[Any], bare: Sequence[Any], numbers: Sequence[torch.Tensor]) -> None:
    """Write the new numbers of the state into the old ones, and the tensors that a step made into its lists."""
    for t, new in zip((t for a in args if _are_numbers(a) for t in a), numbers, strict=True):
        t.copy_(new)
    for a, own in zip(args, bare, strict=True):
        if isinstance(a, list):
            a[:] = [new if t is None else t for t, new in zip(a, own, strict=True)]


def _warn(kind: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, FailOnRecompileLimitHit):
        limit = torch._dynamo.config.recompile_limit
        reason = f"options other than the learning rate changed too often: {limit} compilations (torch._dynamo.config)"
    warnings.warn(
        f"torch.compile failed on a step of {kind}, whose steps run as without compiled=True from now on: "
        f"{type(error).__name__}: {reason[:200]}",
        stacklevel=2,
    )


def _are_numbers(values: Any) -> bool:
    """Whether an argument is a list of numbers, one for each parameter, such as the counts of steps."""
    return isinstance(values, list) and all(isinstance(t, torch.Tensor) and t.dim() == 0 for t in values)
