"""Compile a program and predict it: the work behind every command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import thunder
import torch

from thunder_mem.allocator import Allocation, allocate
from thunder_mem.command_line.program import Program, UsageError
from thunder_mem.delegate import last_plan
from thunder_mem.devices import DeviceSpec
from thunder_mem.frontier import memory_time_frontier
from thunder_mem.frontier_table import Frontier
from thunder_mem.plan import Plan
from thunder_mem.predict import Prediction, predict
from thunder_mem.simulate import simulate
from thunder_mem.training_step import predict_step
from thunder_mem.transforms import MemEfficient

__all__ = ["Outcome", "Question", "ask", "limits_of", "machine", "survey"]

_BUDGET = "the budget"


@dataclass(frozen=True)
class Outcome:
    """A prediction against what there is.

    Attributes:
        jitted: the compiled program.
        prediction: of a call, or of a training step.
        plan: what MemEfficient decided, if it was asked.
        allocation: what PyTorch's allocator makes of it on a GPU; None on a CPU.
        limits: name and bytes of each limit that was given.
        asked: this command asked for the plan, not the script.
    """

    jitted: Any
    prediction: Prediction
    plan: Plan | None
    allocation: Allocation | None
    limits: tuple[tuple[str, int], ...]
    asked: bool = True

    @property
    def peak_bytes(self) -> int:
        """What has to fit, see `Prediction.peak_bytes`."""
        return self.prediction.peak_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The tightest limit; None without any."""
        return min((nbytes for _, nbytes in self.limits), default=None)

    @property
    def fits(self) -> bool:
        """Within every limit; without any, it does."""
        return all(self.peak_bytes <= nbytes for _, nbytes in self.limits)

    @property
    def own_budget_bytes(self) -> int | None:
        """The budget that the script's own `MemEfficient` had for this very call; None without one."""
        bought = self.plan.budget if self.plan is not None and not self.asked else None
        return None if bought is None or "optimizer" in self.prediction.phases else bought.budget_bytes

    def beside_the_budget(self) -> Outcome:
        """The same without the limit that `--budget` set."""
        return replace(self, limits=tuple(limit for limit in self.limits if limit[0] != _BUDGET))


@contextlib.contextmanager
def machine(device: str | None, fusion: str) -> Iterator[DeviceSpec | None]:
    """The machine that a command asks about: a simulated GPU, on which tensors are made by default, or this CPU."""
    if device is None:
        yield None
        return
    with simulate(device, fusion=None if fusion == "none" else fusion) as simulated, torch.device("cuda"):
        yield simulated.spec


@dataclass(frozen=True)
class Question:
    """What is asked of a program.

    Attributes:
        fusion: which fusion there is, see `thunder-mem --help`.
        plain: compile as Thunder alone would.
        optimizer: name of one of torch.optim; None: the program's own, if it has one.
        loss: "sum" or "mean", where the program has no loss of its own.
        accumulate: microbatches of a step.
        inference: no gradients.
        spec: the simulated GPU, if one is.
        budget_bytes: a limit besides the GPU's memory.
        options: others of `MemEfficient`, which `plain` leaves out.
    """

    fusion: str
    plain: bool
    optimizer: str | None
    loss: str | None
    accumulate: int
    inference: bool
    spec: DeviceSpec | None
    budget_bytes: int | None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def limits(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each limit that was given."""
        return limits_of(self.spec, self.budget_bytes)


def limits_of(spec: DeviceSpec | None, budget_bytes: int | None) -> tuple[tuple[str, int], ...]:
    """Name and bytes of each limit that was given."""
    limits = [] if spec is None else [(spec.name, spec.usable_bytes)]
    return (*limits, *([] if budget_bytes is None else [(_BUDGET, budget_bytes)]))


def survey(
    program: Program,
    fusion: str,
    simulated: bool,
    points: int,
    offload: bool | str = False,
    options: Mapping[str, str] | None = None,
) -> Frontier:
    """The program's plans from no recomputation to the smallest peak.

    Args:
        program: jitted or not.
        fusion: which fusion there is, see `thunder-mem --help`.
        simulated: for a simulated device.
        points, offload: as for `memory_time_frontier`.
        options: of `MemEfficient`.

    Raises:
        UsageError: the options do not go together.
        PredictionError, ValueError: as `memory_time_frontier`.
    """
    _check_options(program, options or {})
    model: Any = program.model
    if not program.is_jitted:
        executors = None if simulated else _executors(fusion)
        given: dict[str, Any] = {} if executors is None else {"executors": executors}
        model = thunder.jit(model, transforms=[_mem_efficient(options or {})], **given)
    return memory_time_frontier(model, *program.args, kwargs=program.kwargs, points=points, offload=offload)


def _mem_efficient(options: Mapping[str, str], budget_bytes: int | None = None) -> MemEfficient:
    # The verdict says whether it suffices.
    return MemEfficient(budget=budget_bytes, on_infeasible="warn", **options)  # type: ignore[arg-type]


def _check_options(program: Program, options: Mapping[str, str]) -> None:
    if program.is_jitted and (name := next(iter(options), None)):
        raise UsageError(f"the program is jitted already: give {name}= to its own MemEfficient, not --{name}")


def _executors(fusion: str) -> list[str] | None:
    """What `thunder.jit` is given on a machine that is not simulated; None for its defaults."""
    if fusion == "nvfuser-like":
        return None
    return [] if fusion == "none" else ["torchcompile"]


def ask(program: Program, question: Question) -> Outcome:
    """Compile and predict; if that does not fit, again with the limit as the budget of MemEfficient.

    Raises:
        UsageError: the options do not go together.
        PredictionError, ValueError: as `predict` and `predict_step`.
    """
    if question.plain and program.is_jitted:
        raise UsageError("the program is jitted already: what thunder.jit got there decides how it is compiled")
    _check_options(program, question.options)
    found = _compiled(program, question, None)
    if found.fits or question.plain or program.is_jitted or found.limit_bytes is None:
        return found
    # What lives outside of the compiled function (an optimizer's state) is not for the plan to save.
    call = predict(found.jitted, *program.args, kwargs=program.kwargs, keep_outputs=True)
    outside_bytes = found.peak_bytes - call.peak_bytes
    if found.limit_bytes <= outside_bytes:
        return found
    best, budget_bytes = found, found.limit_bytes - outside_bytes
    for attempt in range(_ATTEMPTS + 1):
        # What a plan holds may differ from what the step needs by where their peaks are: then the budget is lowered
        # by what is too much, and at the end to nothing, so that the least there is decides whether it fits.
        leanest = attempt == _ATTEMPTS or budget_bytes <= 0
        bought = _compiled(program, question, 1 if leanest else budget_bytes)
        best = min(best, bought, key=lambda o: o.peak_bytes)
        if best.fits or leanest or _nothing_smaller(bought.plan):
            break
        budget_bytes -= bought.peak_bytes - found.limit_bytes
    return best


_ATTEMPTS = 2


def _nothing_smaller(plan: Plan | None) -> bool:
    return plan is None or plan.budget is None or plan.budget.method == "smallest"


def _compiled(program: Program, question: Question, budget_bytes: int | None) -> Outcome:
    jitted = program.model
    if not program.is_jitted:
        plan = _mem_efficient(question.options, budget_bytes)
        options: dict[str, Any] = {"transforms": [] if question.plain else [plan]}
        executors = _executors(question.fusion) if question.spec is None else None
        if executors is not None:
            options["executors"] = executors
        jitted = thunder.jit(program.model, **options)
    stepper = _optimizer(program, jitted, question.optimizer)
    if stepper is not None and question.inference:
        raise UsageError("--inference has no training step: leave the optimizer out")
    if stepper is None:
        prediction = predict(jitted, *program.args, kwargs=program.kwargs, keep_outputs=True)
    else:
        prediction = predict_step(
            jitted,
            stepper,
            _loss(program, question.loss),
            *program.args,
            kwargs=program.kwargs,
            accumulate=question.accumulate,
        )
    allocation = allocate(prediction, question.spec.usable_bytes) if question.spec is not None else None
    return Outcome(jitted, prediction, last_plan(jitted), allocation, question.limits, not program.is_jitted)


def _optimizer(program: Program, jitted: Any, name: str | None) -> torch.optim.Optimizer | None:
    if name is None:
        return program.optimizer
    kind: Any = getattr(torch.optim, name, None)
    if not _is_optimizer(kind):
        known = sorted(name for name, k in vars(torch.optim).items() if _is_optimizer(k))
        raise UsageError(f"torch.optim has no optimizer {name!r}; it has {', '.join(known)}")
    owner = jitted if hasattr(jitted, "parameters") else program.model
    if isinstance(owner, torch.nn.Module):
        parameters: list[torch.Tensor] = [p for p in owner.parameters() if p.requires_grad]
    else:
        given = torch.utils._pytree.tree_leaves((program.args, program.kwargs))
        parameters = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if not parameters:
        raise UsageError(f"there is nothing that {name} could train: no parameter, and no input, requires a gradient")
    make: Any = kind
    return make(parameters)


def _is_optimizer(kind: Any) -> bool:
    base = torch.optim.Optimizer
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def _loss(program: Program, name: str | None) -> Callable[[Any], torch.Tensor] | None:
    if program.loss is not None or name is None:
        return program.loss

    def loss(output: Any) -> torch.Tensor:
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        return getattr(tensors[0].float(), name)()

    return loss
