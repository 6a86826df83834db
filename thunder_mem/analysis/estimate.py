"""The GPU memory of a plain PyTorch training step, by running it on fake tensors without compilation.

The step's own code runs under PyTorch's own autograd engine and optimizer. So the real code decides which tensors are
held, and for how long. The fake tensors are on the CPU, because the engine does not run on fake CUDA tensors. They
take CUDA's code paths where those differ (`cuda_paths.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import thunder
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_mem.analysis.capacity import Capacity, capacity_of
from thunder_mem.fake_execution.fake_twins import Twins, Watch
from thunder_mem.fake_execution.replay import Ledger
from thunder_mem.fake_execution.stand_ins import OnCpu, in_place_of, owned_by, stepping
from thunder_mem.frontend.thunderfx import is_fx
from thunder_mem.memory.device_specs import DeviceSpec
from thunder_mem.prediction.cuda_paths import cuda_paths
from thunder_mem.prediction.fake_optimizer import hold_states, make_state, next_scalars, twin_optimizer
from thunder_mem.prediction.predict import Prediction, PredictionError, finish
from thunder_mem.prediction.simulate import attention_backend_for, simulate
from thunder_mem.prediction.training_step import check_loss, check_steps
from thunder_mem.runtime.simulated_device import SimulatedDevice, simulated_device

__all__ = ["estimate", "follow"]

_KERNELS = "scratch inside the device's own kernels is counted for attention only"
_RECURRENT = "recurrent layers are followed as a CPU runs them, not as cuDNN does"
_DEFAULT = "H100-80GB"


def estimate(
    model_or_step: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any], Tensor] | None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    first: bool = False,
    device: str | None = None,
) -> Capacity:
    """Estimate a plain PyTorch training step on a GPU, real or simulated; nothing is compiled or computed.

    Any module works, with LoRA, `torch.autocast`, checkpointing or hooks, even if Thunder cannot compile it.
    Modules, optimizer and inputs may live on a CPU, on "meta" or on a GPU, real or simulated, and stay
    unchanged. Tensors that the code puts on "cuda" count as the GPU's. So do tensors on the CPU: a value copied
    to the host counts as if it stayed.

    Args:
        model_or_step: called with `args` and `kwargs`; its result goes to `loss_fn`. If the result is None, it was
            the whole step, including its own `backward`, `optimizer.step` and `zero_grad`.
        optimizer: of `torch.optim`, over the parameters; None for forward, loss and backward alone.
        loss_fn: from the output to the scalar loss; None if the model returns the loss, or is the whole step.
        args, kwargs: the inputs, which the caller holds.
        accumulate: number of microbatches.
        set_to_none: drop the gradients at the end; otherwise they stay, filled with zeros.
        first: the very first step, in which the optimizer makes its state, instead of a later one.
        device: one of `thunder_mem.memory.device_specs.DEVICES`. Default: the one being simulated, or else "H100-80GB".

    Returns:
        Whether the step fits, with the allocator's peak (`allocation`), every event (`prediction`), and the
        workspaces of libraries (`prediction.library`).

    Raises:
        TypeError: the model is compiled, or the optimizer needs a closure.
        ValueError: an unknown device, no loss that can be differentiated, or a number of microbatches below 1.
        PredictionError: an operation whose result depends on data, such as a mask as an index.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1))
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> answer = estimate(model, adamw, lambda out: out.mean(), torch.zeros(64, 1024))
        >>> answer.device, bool(answer), answer.prediction.phases
        ('H100-80GB', True, ('forward', 'loss', 'backward', 'optimizer'))
    """
    _check(model_or_step, optimizer, accumulate)
    owned = owned_by(model_or_step, loss_fn)
    optimizers = list({id(o): o for o in (optimizer, *owned.optimizers) if o is not None}.values())
    with _device(device) as simulated, contextlib.ExitStack() as stack:
        twins = Twins(simulated.mode, Ledger("cuda", "cpu"))
        for p in (p for o in optimizers for group in o.param_groups for p in group["params"]):
            twins.hold(p, "parameter", with_grad=False)
        for t in (*tree_leaves((args, dict(kwargs or {}))), *owned.tensors):
            if isinstance(t, Tensor):
                twins.hold(t, "argument")
        # The twins are on the CPU, whatever the caller's default device is.
        for within in (twins.gradients_within(), torch.device("cpu"), in_place_of(twins, owned.modules)):
            stack.enter_context(within)
        given, named = tree_map_only(Tensor, twins.of, (args, dict(kwargs or {})))
        scalars: dict[int, float] = {}
        own = None
        for each in optimizers:
            twin = _twin(each, twins, set_to_none, first, scalars)
            stack.enter_context(stepping(each, twin))
            own = twin if each is optimizer else own
        stack.enter_context(OnCpu(twins))  # not before: optimizers are rehearsed on real numbers

        def run(enter: Callable[[str], None]) -> None:
            _step(lambda: model_or_step(*given, **named), loss_fn, own, enter, accumulate, set_to_none)

        notes = [] if first or not optimizers else ["the optimizer has its state already"]
        return capacity_of(follow(run, twins, simulated.spec, scalars, notes), simulated.spec)


def follow(
    run: Callable[[Callable[[str], None]], None],
    twins: Twins,
    spec: DeviceSpec,
    scalars: Mapping[int, float] | None = None,
    notes: Iterable[str] = (),
) -> Prediction:
    """Run code on fake CPU tensors that stand for a GPU's, and record the memory that it holds.

    Args:
        run: the code; its argument is a function to call with the name of each phase as it begins.
        twins: of the caller's tensors; their ledger has the storages held before.
        spec: the GPU.
        scalars: numbers that the code may read from tensors, by storage.
        notes: assumptions, in sentences.

    Raises:
        PredictionError: an operation that does not run without data.
    """
    ledger = twins.ledger
    watch = Watch(ledger, probe=False, twins=twins)
    watch.phase, watch.scalars = "forward", dict(scalars or {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_optimizers_known(watch))
        stack.enter_context(cuda_paths(attention_backend_for(spec)))
        stack.enter_context(watch)
        try:
            run(partial(setattr, watch, "phase"))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            last = ledger.events[-1].name if ledger.events else "the first operation"
            cause = f"{type(error).__name__}: {error}"
            raise PredictionError(
                f"the step has an operation after {last} that cannot be followed without data: {cause}"
            ) from error
    ledger.sweep()
    recurrent = [_RECURRENT] if any("rnn" in e.name or "lstm" in e.name for e in ledger.events) else []
    return finish(ledger, [_KERNELS, *notes, *recurrent], spec.capability)


@contextlib.contextmanager
def _optimizers_known(watch: Watch) -> Iterator[None]:
    """Make an optimizer's step a phase, also in code that names no phases."""
    before: list[str] = []

    def begin(*_: Any) -> None:
        before.append(watch.phase)
        watch.phase = "optimizer"

    def end(*_: Any) -> None:
        watch.phase = before.pop()

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _step(
    call: Callable[[], Any],
    loss_fn: Callable[[Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    enter: Callable[[str], None],
    accumulate: int,
    set_to_none: bool,
) -> None:
    """`training_step`, which reports its phases; a `call` that returns None was the whole step."""

    def to_loss(output: Any) -> Tensor | None:
        if output is None and loss_fn is None:
            return None
        enter("loss")
        loss = output if loss_fn is None else loss_fn(output)
        check_loss("estimate", loss)
        return loss

    for _ in range(accumulate):
        enter("forward")
        loss = to_loss(call())
        if loss is None:
            return
        enter("backward")
        loss.backward()
    if optimizer is not None:
        enter("optimizer")
        optimizer.step()
        enter("zero_grad")
        optimizer.zero_grad(set_to_none=set_to_none)


def _check(model_or_step: Any, optimizer: Any, accumulate: Any) -> None:
    if not callable(model_or_step):
        raise TypeError(f"estimate takes a module or a function, not {type(model_or_step).__name__}")
    if isinstance(model_or_step, torch._dynamo.OptimizedModule):
        raise TypeError("the model is compiled by torch.compile, and estimate follows eager code: give it the module")
    if is_fx(model_or_step) or thunder.compile_data(model_or_step) is not None:
        raise TypeError("the model is compiled by Thunder, and estimate follows eager code: use predict_step")
    check_steps("estimate", optimizer, accumulate)


def _device(name: str | None) -> contextlib.AbstractContextManager[SimulatedDevice]:
    """The running simulation, or a new one."""
    running = simulated_device()
    if running is not None and name in (None, running.name):
        return contextlib.nullcontext(running)
    return simulate(name or _DEFAULT)


def _twin(
    optimizer: torch.optim.Optimizer, twins: Twins, set_to_none: bool, first: bool, scalars: dict[int, float]
) -> torch.optim.Optimizer:
    """The optimizer over stand-ins, with its state; adds the numbers that it reads to `scalars`."""
    twin = twin_optimizer(optimizer, twins, simulated=True)
    if not first:
        make_state(twin, twins, set_to_none)
        scalars.update(next_scalars(optimizer, twin, twins))
    for group in twin.param_groups:
        for p in group["params"]:
            hold_states(twins.ledger, p, twin.state.get(p, {}), group, True)
    return twin
