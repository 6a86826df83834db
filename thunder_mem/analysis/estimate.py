"""A plain PyTorch training step, nothing compiled, followed on fake tensors: what it will hold on a GPU.

The step's own code runs, under PyTorch's own autograd engine and optimizer, so that who holds what, and for how
long, is decided by the code that decides it for real. Tensors are fake ones on the CPU, since the engine does
not run on fake CUDA tensors; they take CUDA's ways where those differ (`cuda_paths.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from thunder_mem.frontend.thunderfx import is_fx
from thunder_mem.memory.device_specs import DeviceSpec
from thunder_mem.prediction.cuda_paths import cuda_paths
from thunder_mem.prediction.fake_optimizer import hold_state, make_state, next_scalars, twin_optimizer
from thunder_mem.prediction.fake_twins import Twins, Watch
from thunder_mem.prediction.predict import Prediction, PredictionError, finish
from thunder_mem.prediction.replay import Ledger
from thunder_mem.prediction.simulate import attention_backend_for, simulate
from thunder_mem.prediction.stand_ins import OnCpu, in_place_of, owned_by, stepping
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
    """Estimate a plain PyTorch training step on a GPU that need not be there; nothing is compiled, nothing computed.

    Any module will do, with LoRA, `torch.autocast`, checkpointing or hooks, also what Thunder cannot compile.
    Modules, optimizer and inputs may live on a CPU, on "meta" or on a GPU, real or simulated; they stay as they
    are. Code within that asks for "cuda" gets tensors that count as the GPU's, and so does code that asks for
    the CPU: what a step copies to the host counts as if it stayed.

    Args:
        model_or_step: called with `args` and `kwargs`; what it returns goes to `loss_fn`. If it returns None, it was
            the whole step, its own `backward`, `optimizer.step` and `zero_grad` included.
        optimizer: of `torch.optim`, over the parameters; None for forward, loss and backward alone.
        loss_fn: from the output to the scalar loss; None if the model returns the loss, or is a step of its own.
        args, kwargs: the inputs, which the caller holds.
        accumulate: number of microbatches.
        set_to_none: drop the gradients at the end; otherwise they stay, filled with zeros.
        first: the very first step, in which the optimizer makes its state, instead of a later one.
        device: one of `thunder_mem.memory.device_specs.DEVICES`. Default: the one being simulated, or else "H100-80GB".

    Returns:
        Whether it fits, with the peak as the allocator counts it (`allocation`), event by event (`prediction`), and
        the workspaces of libraries (`prediction.library`).

    Raises:
        TypeError: what is given cannot be followed: it is compiled, or an optimizer that needs a closure.
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
        # The CPU is where the twins are, whatever device the caller makes tensors on by default.
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
    """Run code on fake CPU tensors that stand for a GPU's, and write down what it holds.

    Args:
        run: the code; it is given a function that takes the name of each phase as it begins.
        twins: of the caller's tensors; what is held before stands in their ledger.
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
            run(lambda phase: _enter(watch, phase))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            last = ledger.events[-1].name if ledger.events else "the first operation"
            cause = f"{type(error).__name__}: {error}"
            raise PredictionError(
                f"the step has an operation after {last} that cannot be followed without data: {cause}"
            ) from error
    ledger.sweep()
    recurrent = [_RECURRENT] if any("rnn" in e.name or "lstm" in e.name for e in ledger.events) else []
    return finish(ledger, [_KERNELS, *notes, *recurrent], spec.capability)


def _enter(watch: Watch, phase: str) -> None:
    watch.phase = phase


@contextlib.contextmanager
def _optimizers_known(watch: Watch) -> Iterator[None]:
    """Within, an optimizer's step is a phase, also in code that says nothing of phases."""
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
    """`training_step`, which says where it is; a `call` that returns None was the whole step."""

    def to_loss(output: Any) -> Tensor | None:
        if output is None and loss_fn is None:
            return None
        enter("loss")
        return _checked(output if loss_fn is None else loss_fn(output))

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


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss has to be a scalar tensor, but it is {what}: give estimate a loss_fn")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on anything that requires a gradient")
    return loss


def _check(model_or_step: Any, optimizer: Any, accumulate: Any) -> None:
    if not callable(model_or_step):
        raise TypeError(f"estimate takes a module or a function, not {type(model_or_step).__name__}")
    if isinstance(model_or_step, torch._dynamo.OptimizedModule):
        raise TypeError("the model is compiled by torch.compile, and estimate follows eager code: give it the module")
    if is_fx(model_or_step) or thunder.compile_data(model_or_step) is not None:
        raise TypeError("the model is compiled by Thunder, and estimate follows eager code: use predict_step")
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(f"estimate takes a torch.optim optimizer or None, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls the model from a closure, as often as it likes: its step cannot be predicted")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate is the number of microbatches, an int from 1 up, not {accumulate!r}")


@contextlib.contextmanager
def _device(name: str | None) -> Iterator[SimulatedDevice]:
    """The simulation that runs, or a new one."""
    running = simulated_device()
    if running is not None and name in (None, running.name):
        yield running
        return
    with simulate(name or _DEFAULT) as simulated:
        yield simulated


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
            for name, t in twin.state.get(p, {}).items():
                if isinstance(t, Tensor):
                    hold_state(twins.ledger, name, t, group, True)
    return twin
