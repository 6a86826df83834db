"""`compare`: one step of a program in eager PyTorch and under several compilers, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder
import torch
from thunder.extend import Executor
from torch import Tensor

from thunder_mem.comparison.differences import Observed, largest_difference
from thunder_mem.comparison.kept_state import kept
from thunder_mem.comparison.reasons import LONGEST_REASON, why_not_lower
from thunder_mem.comparison.result import EAGER, OURS, TORCH_COMPILE, Comparison, Row
from thunder_mem.comparison.step import Step, compiles_itself, step_of
from thunder_mem.frontend.thunderfx import is_fx
from thunder_mem.memory.outside_input import quoted, shortened
from thunder_mem.prediction.training_step import check_steps
from thunder_mem.rendering.progress import stage
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms import MemEfficient

__all__ = ["compare"]


def compare(
    model: Callable[..., Any],
    *args: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    mem_efficient: MemEfficient | None = None,
    executors: Sequence[Executor | str] | None = None,
    torch_compile: bool = False,
    repeats: int = 5,
) -> Comparison:
    """Run a step of a program in eager PyTorch, under Thunder alone and with `MemEfficient`, and compare them.

    A step is forward, loss, backward and, if given, the optimizer; without anything to differentiate, it is the
    forward. Each compiler first runs forward and backward once, from the same state and random numbers, for the
    differences from eager. Then one step is measured, and `repeats` further ones are timed. A compiler that fails has
    the reason in its row, and so has eager PyTorch if the GPU's memory does not suffice.

    Afterwards parameters, buffers, other attributes of modules, gradients, arguments, the optimizer and the generators
    of random numbers are as before. A copy of all of these is in the host's memory meanwhile.

    Args:
        model: a module or a function, not compiled. Or a model of `thunder_mem.integrations.transformers`'
            `memory_efficient`, whose loss alone is compared, and which has its own `MemEfficient`.
        args, kwargs: of its call.
        loss_fn: from the model's result to the scalar loss, run by eager PyTorch. By default a scalar result is the
            loss, and otherwise the sum of all results that require a gradient.
        optimizer: of `torch.optim`, over the model's parameters. By default a step ends after the backward.
        mem_efficient: the transform to compare, such as ``MemEfficient(budget="40GiB")``; by default one without
            arguments.
        executors: of `thunder.jit`, for Thunder alone and with `MemEfficient`; by default Thunder's.
        torch_compile: also compare `torch.compile`.
        repeats: the number of timed steps; the median counts.

    Returns:
        The comparison, whose `str` has a line for each compiler and a verdict. On a GPU, peaks are bytes as requested,
        without the rounding of its allocator; of several GPUs, the first tensor's counts.

    Raises:
        TypeError: the model is compiled already or has a `MemEfficient` and gets another, the optimizer is none or
            needs a closure, the loss is no function, or `executors` is a text.
        ValueError: the loss is no scalar, an argument was computed from a tensor with a gradient, tensors are fake,
            there is nothing to optimise, or `repeats` is below 1.
        Exception: any other that the program raises in eager PyTorch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> found = compare(model, torch.randn(64, 8), executors=[])
        >>> found.best.name, [row.name for row in found.rows], found["Thunder"].result_difference < 1e-6
        ('MemEfficient', ['eager', 'Thunder', 'MemEfficient'], True)
    """
    _check(model, loss_fn, optimizer, mem_efficient, executors, repeats)
    executors = None if executors is None else tuple(executors)  # for two compilations
    step = step_of(model, args, kwargs or {}, loss_fn, optimizer)
    itself = compiles_itself(model)
    if itself is None:
        plain, ours = model, thunder.jit(model, executors=executors, transforms=[mem_efficient or MemEfficient()])
    else:
        plain, ours = itself.plain, itself.ours
        if mem_efficient is not None:
            raise TypeError("the model has a MemEfficient already: give its options to memory_efficient")
    compilers: dict[str, Callable[[], Any]] = {
        EAGER: lambda: plain,
        "Thunder": lambda: thunder.jit(plain, executors=executors),
    }
    if torch_compile:
        compilers[TORCH_COMPILE] = lambda: torch.compile(plain)
    compilers[OURS] = lambda: ours
    with kept(step.modules, step.optimizers, step.others) as put_back:
        put_back()
        reference = _reference(model, step)
        rows = []
        for name, compiler in compilers.items():
            put_back()
            with stage(f"running under {name}"):
                rows.append(_row(name, compiler, step, reference, repeats))
        put_back()
        held_bytes = next((held for _, held in rows if held), 0)
        found = Comparison(
            tuple(row for row, _ in rows), str(step.device), held_bytes, reference.trains, reference.draws
        )
        if not _is_matched(found) or itself is not None:
            return found
        best = found.best.name if found.best is not None else OURS
        return replace(found, why=why_not_lower(ours, step, trains=reference.trains, best=best))


@dataclass(frozen=True)
class _Reference:
    """The eager run.

    Attributes:
        seen: its results and gradients; None if the GPU's memory did not suffice.
        trains: whether it had a backward.
        draws: whether it drew random numbers.
    """

    seen: Observed | None
    trains: bool
    draws: bool = False


def _check(model: Any, loss_fn: Any, optimizer: Any, mem_efficient: Any, executors: Any, repeats: Any) -> None:
    if not callable(model):
        raise TypeError(f"compare takes a module or a function, not {type(model).__name__}")
    if isinstance(model, torch._dynamo.OptimizedModule) or is_fx(model) or thunder.compile_data(model) is not None:
        raise TypeError("the model is compiled already, and compare compiles it itself: give it the module or function")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is a function from the model's result to the loss, not {type(loss_fn).__name__}")
    if isinstance(executors, str):
        raise TypeError(f"executors is a list: write executors=[{quoted(executors)}]")
    check_steps("compare", optimizer)
    if not isinstance(mem_efficient, MemEfficient | None):
        raise TypeError(f"mem_efficient is a MemEfficient(...), not {quoted(mem_efficient)}")
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats is the number of timed steps, an int from 1 up, not {repeats!r}")


def _reference(model: Any, step: Step) -> _Reference:
    before = _generators(step.device)
    try:
        seen, trains = step.observe(model)
    except torch.OutOfMemoryError:
        return _Reference(None, torch.is_grad_enabled() and bool(step.leaves))
    if step.optimizer is not None and not trains:
        raise ValueError("the loss does not depend on anything that requires a gradient: leave the optimizer out")
    draws = any(not torch.equal(a, b) for a, b in zip(before, _generators(step.device), strict=True))
    return _Reference(seen, trains, draws)


def _generators(device: torch.device) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def _row(
    name: str, compiler: Callable[[], Any], step: Step, reference: _Reference, repeats: int
) -> tuple[Row, int | None]:
    """The row of a compiler, and the bytes that the caller held; an error becomes a sentence."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        return _measured(name, compiler(), step, reference, repeats)
    except Exception as error:
        if name == EAGER and not isinstance(error, torch.OutOfMemoryError):
            raise
        failure = shortened(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
        # Thunder leaves a torch.vmap open in which its tracing fails, and everything after it would run inside.
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
    if step.device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(name, failure=failure), None


def _measured(
    name: str, compiled: Callable[..., Any], step: Step, reference: _Reference, repeats: int
) -> tuple[Row, int]:
    results = gradients = None
    if name != EAGER:
        seen, _ = step.observe(compiled)
        step.drop_gradients()
        if reference.seen is not None:
            results = largest_difference(seen.results, reference.seen.results)
            gradients = largest_difference(seen.gradients, reference.seen.gradients) if reference.trains else None
        del seen
    step.run(compiled, trains=reference.trains)  # compiles whatever is left, and makes the optimizer's state
    step.drop_gradients()
    held_bytes = step.held_bytes
    above_bytes = measure_peak(lambda: step.run(compiled, trains=reference.trains), device=step.device)
    seconds = statistics.median(_seconds(compiled, step, reference.trains) for _ in range(repeats))
    return Row(name, held_bytes + above_bytes, seconds, results, gradients), held_bytes


def _seconds(compiled: Callable[..., Any], step: Step, trains: bool) -> float:
    step.drop_gradients()
    _wait_for(step.device)
    start = time.perf_counter()
    step.run(compiled, trains=trains)
    _wait_for(step.device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_matched(found: Comparison) -> bool:
    """Whether another compiler needs as little as MemEfficient, or less."""
    ours_bytes = found[OURS].peak_bytes
    if ours_bytes is None:
        return False
    return any(row.peak_bytes is not None and row.peak_bytes <= ours_bytes for row in found.rows if row.name != OURS)
