"""What a command asks about a program, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thunder_mem.memory.device_specs import DeviceSpec
from thunder_mem.memory.plan import Plan
from thunder_mem.prediction.caching_allocator import Allocation
from thunder_mem.prediction.predict import Prediction

__all__ = ["Outcome", "Question", "limits_of"]

_BUDGET = "the budget"


@dataclass(frozen=True)
class Question:
    """A question about a program.

    Attributes:
        fusion: the fusion executor, see `thunder-mem --help`.
        plain: compile with Thunder alone.
        optimizer: name of one of torch.optim; None: the program's own, if it has one.
        step_in_backward: the backward that `MemEfficient` plans updates the parameters.
        states: where the optimizer's states are then, "device", "host" or "auto".
        loss: "sum" or "mean", if the program has no loss of its own.
        accumulate: microbatches of a step.
        inference: no gradients.
        spec: the simulated GPU, if any.
        budget_bytes: a limit beside the GPU's memory.
        options: further options of `MemEfficient`, unused with `plain`.
        fx: through ThunderFX.
        parts: accept several subgraphs, and predict the one that peaks highest.
    """

    fusion: str | None
    plain: bool
    optimizer: str | None
    step_in_backward: bool
    states: str
    loss: str | None
    accumulate: int
    inference: bool
    spec: DeviceSpec | None
    budget_bytes: int | None
    options: Mapping[str, str] = field(default_factory=dict)
    fx: bool = False
    parts: bool = False


@dataclass(frozen=True)
class Outcome:
    """A prediction compared with its limits.

    Attributes:
        jitted: the compiled program.
        prediction: of a call, or of a training step.
        plan: of MemEfficient, if it ran.
        allocation: the figures of PyTorch's allocator on a GPU; None on a CPU.
        limits: name and bytes of each given limit; for a GPU, the memory that it leaves to tensors.
        asked: this command requested the plan, not the script.
    """

    jitted: Any
    prediction: Prediction
    plan: Plan | None
    allocation: Allocation | None
    limits: tuple[tuple[str, int], ...]
    asked: bool = True

    @property
    def peak_bytes(self) -> int:
        """The peak that must fit, see `Prediction.peak_bytes`."""
        return self.prediction.peak_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The tightest limit; None without any."""
        return min((nbytes for _, nbytes in self.limits), default=None)

    @property
    def fits(self) -> bool:
        """Whether the peak is within every limit; true without any."""
        return all(self.peak_bytes <= nbytes for _, nbytes in self.limits)

    @property
    def own_budget_bytes(self) -> int | None:
        """The budget that the script's own `MemEfficient` had for this very call; None without one."""
        bought = self.plan.budget if self.plan is not None and not self.asked else None
        return None if bought is None or "optimizer" in self.prediction.phases else bought.budget_bytes

    def beside_the_budget(self) -> Outcome:
        """The same outcome without the limit of `--budget`."""
        return replace(self, limits=tuple(limit for limit in self.limits if limit[0] != _BUDGET))


def limits_of(spec: DeviceSpec | None, budget_bytes: int | None, library_bytes: int = 0) -> tuple[tuple[str, int], ...]:
    """Name and bytes of each given limit; for a GPU, the memory that libraries leave."""
    limits = [] if spec is None else [(spec.name, spec.usable_bytes - library_bytes)]
    return (*limits, *([] if budget_bytes is None else [(_BUDGET, budget_bytes)]))
