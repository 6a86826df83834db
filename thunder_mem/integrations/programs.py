"""The compiled part of a Hugging Face model: by `thunder.jit` where it traces the model, else by ThunderFX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from traceback import walk_tb

import thunder
import torch
from thunder.extend import Executor
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from thunder_mem.frontend.thunderfx import by_thunderfx
from thunder_mem.integrations.call_inputs import Inputs
from thunder_mem.integrations.traceable_code import script_function_of, traceable
from thunder_mem.memory.outside_input import shortened
from thunder_mem.runtime.generators import kept_generators
from thunder_mem.runtime.torch_modes import kept_modes
from thunder_mem.transforms import MemEfficient

__all__ = ["WAYS", "Compilation", "Program", "first_program", "tensors_of"]

WAYS = ("thunder.jit", "thunderfx")
_REASON = 160  # characters of an error in a message
# They are left when a program is traced, and when Thunder joins arguments that share memory.
_TRACING = ("thunder.core.interpreter", "thunder.core.jit_ext", "thunder.core.update_aliases")


@dataclass(frozen=True)
class Compilation:
    """How a model is compiled.

    Attributes:
        transform: plans the program.
        executors: of `thunder.jit`; None for Thunder's default.
        ways: to try, in order.
    """

    transform: MemEfficient
    executors: tuple[Executor | str, ...] | None
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A compiled model.

    Attributes:
        way: that compiled it.
        compiled: what `thunder.jit` or `thunderfx` returned.
        model: the model, whose code is replaced while it runs.
        packed, loss_alone: see `traceable`.
        tensors: the model's parameters and buffers, for which it was compiled.
    """

    way: str
    compiled: Callable[..., dict[str, Tensor]] = field(repr=False)
    model: PreTrainedModel = field(repr=False)
    packed: bool
    loss_alone: bool
    tensors: tuple[Tensor, ...] = field(repr=False)

    def __call__(self, values: Mapping[str, object]) -> dict[str, Tensor]:
        code = traceable(self.model, packed=self.packed, loss_alone=self.loss_alone)
        # Dynamo may leave gradients off if it breaks the model's code inside `torch.no_grad()`.
        with kept_modes(), code, torch._dynamo.config.patch(specialize_float=True):
            return self.compiled(**values)

    def run(self, inputs: Inputs) -> Outcome:
        """The result; None if there is no loss, or it has no gradient, though tensors want theirs."""
        result = self(inputs.values)
        if self.loss_alone and not result:
            return None, None, (f"{self.way}: the model makes no loss of these inputs",)
        given = (*self.tensors, *inputs.values.values())
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in given if isinstance(t, Tensor))
        if wanted and "loss" in result and not result["loss"].requires_grad:
            return None, None, (f"{self.way}: its loss has no gradient",)
        return self, result, ()

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a model's tensors are still those of the compilation."""
        return len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True))


Outcome = tuple[Program | None, dict[str, Tensor] | None, tuple[str, ...]]
"""A program that could run or None, its result, and why each way before could not."""


def tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    """A model's parameters and buffers."""
    return tuple(chain(model.parameters(), model.buffers()))


def first_program(model: PreTrainedModel, inputs: Inputs, how: Compilation) -> Outcome:
    """Compile a model by the first way that can, and run it.

    A way that fails leaves the random generators as they were.

    Returns:
        The program or None, its result, and why each way before could not compile it.

    Raises:
        Exception: an error of the plan (`BudgetError`, ...) or of the run.
    """
    reasons: list[str] = []
    put_back_generators = kept_generators({t.device for t in tensors_of(model)})
    scripted = script_function_of(model)
    for way in how.ways:
        if way == "thunder.jit" and scripted:  # Thunder would abort the process
            reasons.append(f"{way}: it cannot trace a call of torch.jit.script's {scripted}")
            continue
        whole = _Loss(model) if inputs.has_loss else _Outputs(model)
        program = Program(way, _compile(whole, way, how), model, inputs.packed, inputs.has_loss, tensors_of(model))
        try:
            taken, result, why = program.run(inputs)
        except Exception as error:
            if not (_is_of_tracing(error) or _is_of_strides(error)):
                raise
            first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            reasons.append(f"{way}: {shortened(first, _REASON)}")
        else:
            reasons += why
            if taken is not None:
                return taken, result, tuple(reasons)
        put_back_generators()  # so that the next way, or the model itself, draws what it would have drawn
    return None, None, tuple(reasons)


def _compile(whole: nn.Module, way: str, how: Compilation) -> Callable[..., dict[str, Tensor]]:
    if way == "thunder.jit":
        return thunder.jit(whole, executors=how.executors, transforms=[how.transform])
    return by_thunderfx(whole, executors=how.executors, transforms=[how.transform], dynamic=False)


def _is_of_tracing(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, TorchDynamoException):
        return True
    return any(frame.f_globals.get("__name__") in _TRACING for frame, _ in walk_tb(error.__traceback__))


def _is_of_strides(error: BaseException) -> bool:
    """Whether a part that Inductor compiled got other strides from Thunder's part than Dynamo had foreseen."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, AssertionError) and any("assert_size_stride" in frame.f_globals for frame in frames)


class _Loss(nn.Module):
    """A model that returns its losses alone, so that no logits outlive it."""

    is_hugging_face = True  # for `explain`, whose advice is code to paste

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **values: object) -> dict[str, Tensor]:
        output = type(self.model).forward(self.model, **values)
        return {name: output[name] for name in ("loss", "aux_loss") if output.get(name) is not None}


class _Outputs(_Loss):
    """A model that returns all that it computes."""

    def forward(self, **values: object) -> dict[str, Tensor]:
        return type(self.model).forward(self.model, **values)
