"""Hugging Face's models with `MemEfficient`: ``model = memory_efficient(model)``, and the training loop stays.

The way of a call::

    model(input_ids=..., attention_mask=..., labels=...)
      | call_inputs: is it a training step? else the model's own code runs, as before
      |   inputs by name; a mask of nothing but ones is left out; the decoder's tokens are made of the labels
      v
    programs: `thunder.jit`, or ThunderFX where Thunder cannot trace the model
      | traceable_code: meanwhile masks and losses are code that Thunder traces
      v
    LossOutput(loss=...): the loss alone, so that the head runs in chunks

The model is the same object, of the same class, with the same parameters: only its attribute `forward` is new. So
`state_dict`, `save_pretrained`, `train`, `generate`, `Trainer` and peft go on working.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import NoReturn, TypeVar

import torch
from thunder.extend import Executor
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, find_labels

from thunder_mem.integrations.call_inputs import Inputs, inputs_by_name, not_compiled, prepared
from thunder_mem.integrations.programs import WAYS, Compilation, Program, first_program, tensors_of
from thunder_mem.memory.outside_input import quoted
from thunder_mem.transforms import MemEfficient

__all__ = ["LossOutput", "Program", "memory_efficient", "programs"]

Model = TypeVar("Model", bound=PreTrainedModel)
_STATE = "_thunder_mem"


def memory_efficient(
    model: Model,
    *,
    through: str | None = None,
    executors: Sequence[Executor | str] | None = None,
    **options: object,
) -> Model:
    """Let a Hugging Face model train with less memory.

    A call with labels (CLIP: ``return_loss=True``) returns a `LossOutput`: the loss alone. Without labels the outputs
    are the model's own. Under `torch.no_grad`, in `generate`, and where a call asks for the values of all layers, the
    model's own code runs.

    Args:
        model: of transformers; it is changed in place.
        through: "thunder.jit" or "thunderfx"; by default the first that can compile the model.
        executors: of `thunder.jit`; by default Thunder's.
        options: of `MemEfficient`, such as ``budget="40GiB"``.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is no model of transformers, `executors` is a text, or `MemEfficient` has no such option.
        ValueError: the model's forward was replaced before, or `through` or an option is unknown.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        >>> model = memory_efficient(model, executors=[])
        >>> tokens = torch.randint(50, (2, 8))
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"memory_efficient takes a PreTrainedModel of transformers, not {type(model).__name__}")
    if hasattr(model, _STATE):
        raise ValueError("this model is memory efficient already: call memory_efficient once")
    if "forward" in vars(model):
        raise ValueError("another library has replaced this model's forward: call memory_efficient before it")
    if through is not None and through not in WAYS:
        raise ValueError(f"through is {' or '.join(map(repr, WAYS))}, not {quoted(through)}")
    if isinstance(executors, str):
        raise TypeError(f"executors is a list: write executors=[{quoted(executors)}]")
    transform = MemEfficient(**options)  # type: ignore[arg-type]
    how = Compilation(transform, None if executors is None else tuple(executors), (through,) if through else WAYS)
    setattr(model, _STATE, _State(how))
    model.forward = _Forward(model)
    model._replicate_for_data_parallel = _NoReplicas()
    return model


def programs(model: PreTrainedModel) -> tuple[Program, ...]:
    """What was compiled of a memory-efficient model so far; `explain` takes ``program.compiled``.

    Raises:
        TypeError: the model is not memory efficient.
    """
    state = getattr(model, _STATE, None)
    if not isinstance(state, _State):
        raise TypeError(f"this {type(model).__name__} is not memory efficient: call memory_efficient(model) first")
    return tuple(state.programs.values())


@dataclass
class LossOutput(ModelOutput):
    """What a training step returns.

    Attributes:
        loss: as the model computes it.
        aux_loss: of a mixture of experts, if the model returns it.
    """

    loss: Tensor | None = None
    aux_loss: Tensor | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name} is not kept: memory_efficient returns the loss alone; "
            "under torch.no_grad() the model returns all of its outputs"
        )


class _State:
    """A model's programs, by what distinguishes them; a copy of the model begins without any."""

    def __init__(self, how: Compilation) -> None:
        self.how = how
        self.programs: dict[object, Program] = {}
        self.failures: dict[object, tuple[str, ...]] = {}  # why no way compiled it, so that no step tries again
        self.warned: set[str] = set()

    def __deepcopy__(self, memo: dict[int, object]) -> _State:
        return _State(self.how)

    def __reduce__(self) -> tuple[object, ...]:
        return _State, (self.how,)

    def warn(self, text: str) -> None:
        """Warn of something once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=4)


class _Forward:
    """A model's forward in the place of its class' own; unlike a method, it is copied and pickled with the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _call(self.model, args, kwargs)

    @property
    def plain(self) -> nn.Module:
        """For `compare`: the model's own code, with the outputs that a training step keeps."""
        return _Own(self.model)

    def ours(self, *args: object, **kwargs: object) -> dict[str, object]:
        """For `compare`: the same outputs, compiled."""
        return _kept(self(*args, **kwargs))

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the class' own forward, by which `Trainer` knows the columns of a batch."""
        return inspect.signature(MethodType(type(self.model).forward, self.model))


class _NoReplicas:
    """In the place of what `nn.DataParallel` copies a module by; a replica would run the first device's program."""

    def __call__(self) -> NoReturn:
        raise RuntimeError(
            "nn.DataParallel cannot copy a memory-efficient model: start one process for each GPU (torchrun), "
            "or show PyTorch one GPU (CUDA_VISIBLE_DEVICES=0)"
        )


class _Own(nn.Module):
    """A model without `MemEfficient`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: object, **kwargs: object) -> dict[str, object]:
        return _kept(type(self.model).forward(self.model, *args, **kwargs))


def _kept(output: object) -> dict[str, object]:
    """The losses of an output, or all of it if it has none."""
    assert isinstance(output, dict)
    losses = {name: output[name] for name in ("loss", "aux_loss") if output.get(name) is not None}
    return losses or dict(output)


def _call(model: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    state: _State = getattr(model, _STATE)
    asked = {name: value for name, value in kwargs.items() if name != "return_dict"}
    values = inputs_by_name(model, args, asked)
    why = not_compiled(model, values)
    failures: tuple[str, ...] = ()
    if why is None:
        inputs = prepared(model, values)
        result, failures = _run(model, state, inputs)
        if result is not None:
            output: ModelOutput = LossOutput(**result) if inputs.has_loss else result
            as_dict = kwargs.get("return_dict", model.config.use_return_dict)
            return output if as_dict is not False else output.to_tuple()
    own = type(model).forward(model, *args, **kwargs)
    if failures:  # of the compilation, not of these inputs
        why = f"Thunder cannot trace it ({'; '.join(failures)})"
    if why:
        state.warn(f"{type(model).__name__} runs without MemEfficient: {why}")
    return own


def _settings(model: PreTrainedModel) -> tuple[object, ...]:
    """What the modules are set to, which a program takes as constants: the loss, modes, rates, scales."""
    plain = (bool, int, float, str)
    named = (item for module in model.modules() for item in vars(module).items())
    return getattr(model, "loss_function", None), *((name, repr(x)) for name, x in named if type(x) in plain)


def _run(model: PreTrainedModel, state: _State, inputs: Inputs) -> tuple[dict[str, Tensor] | None, tuple[str, ...]]:
    """The compiled model's result, or None and why Thunder cannot run the model."""
    if not inputs.has_loss and (labels := find_labels(type(model))):
        state.warn(
            f"{type(model).__name__} trains without {' or '.join(labels)}, so its logits exist whole: "
            "give it the labels, and the loss is computed inside"
        )
    device = model.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    key = inputs.key, autocast, repr(vars(model.config)), _settings(model)
    if key in state.failures:
        return None, state.failures[key]
    known = state.programs.get(key)
    if known is not None and known.is_for(tensors_of(model)):
        program, result, failures = known.run(inputs)
    else:
        program, result, failures = first_program(model, inputs, state.how)
    if program is None:
        state.programs.pop(key, None)
        state.failures[key] = failures
    else:
        state.programs[key] = program
    return result, failures
