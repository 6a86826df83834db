"""A call of a Hugging Face model: its inputs by name, whether it trains, and the inputs for the compiled part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss
from transformers.utils import can_return_loss, find_labels

from thunder_mem.integrations.made_of_labels import made_of_labels

__all__ = ["Inputs", "inputs_by_name", "not_compiled", "prepared"]

_MASKS = {"attention_mask": "", "decoder_attention_mask": "decoder_"}
"""The masks that may be left out, and how the names of their half's inputs begin."""

_PADDING = ("pad_token_id", "pad_index", "padding_idx")
"""The names that transformers has for the token that fills rows up."""


_Constant = bool | int | float | str


@dataclass(frozen=True)
class Inputs:
    """What the compiled part gets.

    Attributes:
        values: by argument, without those that are None.
        has_loss: the model computes its loss.
        packed: `position_ids` tell several sequences of a row apart.
    """

    values: dict[str, object]
    has_loss: bool
    packed: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What has to be equal for one program: Thunder itself compares only the tensors' shapes and dtypes."""
        constants = {name: None if isinstance(value, Tensor) else value for name, value in self.values.items()}
        return (self.has_loss, self.packed, *sorted(constants.items()))


def inputs_by_name(model: PreTrainedModel, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call by name.

    Raises:
        TypeError: as the call of the model itself would.
    """
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    names = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    values = dict(bound.arguments)
    del values[next(iter(values))]  # self
    for name in names:
        values.update(values.pop(name, {}))
    return values


def not_compiled(model: PreTrainedModel, values: Mapping[str, object]) -> str | None:
    """Why the model's own code runs this call: "" if nothing is trained, a reason, or None if it is compiled."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return ""
    if not any(t.requires_grad for t in (*model.parameters(), *values.values()) if isinstance(t, Tensor)):
        return ""
    if (hooked := _hooked(model)) is not None:
        return f"{hooked} has a hook, which a compiled step would not call"
    if values.get("past_key_values") is not None or values.get("cache_position") is not None:
        return "past_key_values continue a sequence, which is generation and no training step"
    if values.get("use_cache"):
        return "use_cache=True asks for keys and values that only generation needs"
    if _restarts(values) and (values.get("use_cache") is None and getattr(model.config, "use_cache", False)):
        return "position_ids restart inside a row, and a cache hides that from the model: give it use_cache=False"
    for name in ("output_attentions", "output_hidden_states"):
        asked = values.get(name)
        if getattr(model.config, name, False) if asked is None else asked:
            return f"{name}=True asks for values of all layers, which then stay alive"
    odd = [name for name, value in values.items() if not isinstance(value, Tensor | _Constant | None)]
    return f"{odd[0]} is a {type(values[odd[0]]).__name__}, and the compiled part takes tensors" if odd else None


def prepared(model: PreTrainedModel, values: Mapping[str, object]) -> Inputs:
    """The inputs for the compiled part: what depends on their data, or writes into tensors, is done here."""
    found = {**values, **made_of_labels(model, values)}
    packed = _restarts(found)
    for name, half in _MASKS.items():
        if _is_left_out(model, found.get(name), found, half):
            found[name] = None  # so that attention is causal by itself, and no mask exists
    items = found.get("num_items_in_batch")
    if isinstance(items, int):
        found["num_items_in_batch"] = torch.tensor(items)  # one program for all numbers
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        found["use_cache"] = False
    _settle_problem_type(model, found.get("labels"))
    given = {name: value for name, value in found.items() if value is not None}
    return Inputs(given, _has_loss(model, values), packed)


def _is_left_out(model: PreTrainedModel, mask: object, values: Mapping[str, object], half: str) -> bool:
    """Whether a mask of (B, T) is of ones, and the model makes no other mask where it gets none.

    Some models make one of the tokens that fill rows up, and Pix2Struct one of its patches; UDOP hides patches only
    where it gets a mask.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask == 1).all()):
        return False
    tokens, embeddings = (values.get(half + name) for name in ("input_ids", "inputs_embeds"))
    is_of_text = any(isinstance(x, Tensor) for x in (tokens, embeddings, values.get("input_ids")))
    if not is_of_text or values.get("bbox") is not None:
        return False
    kinds: set[Any] = {type(m) for m in model.modules()}
    if not any(_names_padding(kind) for kind in kinds):
        return True
    if isinstance(tokens, Tensor):
        return not any(bool((tokens == token).any()) for token in _padding_tokens(model))
    return isinstance(embeddings, Tensor)  # else a decoder's tokens are made of the encoder's, and not known here


def _padding_tokens(model: PreTrainedModel) -> set[int]:
    inside = (config for config in vars(model.config).values() if isinstance(config, PretrainedConfig))
    named = [vars(x).get(name) for x in (model.config, *inside, *model.modules()) for name in _PADDING]
    return {token for token in named if isinstance(token, int)}


@cache
def _names_padding(kind: type[nn.Module]) -> bool:
    """Whether a module's forward, or a function that it calls, names the token that fills rows up."""
    seen: set[object] = set()
    left = [] if kind.__module__.startswith("torch.") else [inspect.unwrap(kind.forward)]
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
            continue
        seen.add(function)
        names = function.__code__.co_names
        if any(name in _PADDING for name in names):
            return True
        left += [function.__globals__.get(name) or getattr(kind, name, None) for name in names]
    return False


def _hooked(model: PreTrainedModel) -> str | None:
    """The first module inside with a hook; those of the model itself run around its forward.

    That of `enable_input_require_grads` does not count: it lets reentrant checkpoints of frozen layers have gradients,
    and compiled checkpoints are not reentrant.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    unneeded = getattr(getattr(model, "_require_grads_hook", None), "id", None)
    inside = (pair for pair in model.named_modules() if pair[1] is not model)
    return next(
        (name for name, module in inside if any(set(getattr(module, kind)) - {unneeded} for kind in kinds)), None
    )


def _settle_problem_type(model: PreTrainedModel, labels: object) -> None:
    """Write the kind of a classification into the model's configuration, as transformers does in the first forward.

    It looks at the dtype of the labels, which is another object while Thunder traces.
    """
    classifies = LOSS_MAPPING.get(model.loss_type) is ForSequenceClassificationLoss
    if not classifies or not isinstance(labels, Tensor) or model.config.problem_type is not None:
        return
    if model.config.num_labels == 1:
        model.config.problem_type = "regression"
    elif labels.dtype in (torch.long, torch.int):
        model.config.problem_type = "single_label_classification"
    else:
        model.config.problem_type = "multi_label_classification"


def _restarts(values: Mapping[str, object]) -> bool:
    """Whether `position_ids` tell several sequences of a row apart; transformers looks only where no mask is given."""
    positions = values.get("position_ids")
    if not isinstance(positions, Tensor) or values.get("attention_mask") is not None:
        return False
    return bool(positions.diff().ne(1).any())


def _has_loss(model: PreTrainedModel, values: Mapping[str, object]) -> bool:
    kind = type(model)
    asked = values.get("return_loss", can_return_loss(kind))
    return bool(asked) or any(values.get(name) is not None for name in find_labels(kind))
