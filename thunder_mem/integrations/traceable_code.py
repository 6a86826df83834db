"""Hugging Face's own code, for a time, in a form that Thunder can trace.

Thunder 0.2.6 stops at three habits of transformers, and a fourth costs memory. Here each is done in another way, with
the same values:

- Masks are made by `torch.vmap` over index tensors. The same index functions get index tensors that broadcast.
- Losses are made as modules inside the forward, ``CrossEntropyLoss()``. The name stands for a function that makes
  PyTorch's functional loss. Under `torch.autocast` it computes in float32, as PyTorch does and Thunder does not.
- Attention shares keys between heads by ``enable_gqa``. Keys are repeated, as transformers does wherever it has a mask.
- Outputs name the logits beside the loss. Where ThunderFX breaks the model, they would leave its last graph whole, and
  the head would not run in chunks. Where only the loss is asked for, an output is made without them.

Gradient checkpointing calls `torch.utils.checkpoint` in the form that Thunder takes: not reentrant, no keywords.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from threading import RLock
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils
from transformers.integrations import sdpa_attention
from transformers.loss import loss_utils
from transformers.utils import ModelOutput

__all__ = ["script_function_of", "traceable"]

Positions = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From the numbers of batch, head, query and key to whether the query sees the key."""

_LOCK = RLock()  # the replaced names belong to all threads


@contextmanager
def traceable(model: nn.Module, *, packed: bool, loss_alone: bool) -> Iterator[None]:
    """Inside, Hugging Face's masks and losses are code that Thunder traces.

    Args:
        model: whose modules' code may make losses.
        packed: rows hold several sequences, told apart by `position_ids`. Without this, none are looked for.
        loss_alone: of the model's output only losses are kept.
    """
    with _LOCK, ExitStack() as stack:
        for namespace, name, new in _replacements(model, packed, loss_alone):
            stack.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = new
        yield


def _replacements(model: nn.Module, packed: bool, loss_alone: bool) -> Iterator[tuple[dict[str, object], str, object]]:
    """The namespaces, names and values to set."""
    own = vars(masking_utils)
    yield masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _mask
    yield own, "sdpa_mask", _mask
    yield own, "and_masks", _all_of
    if not packed:
        yield own, "find_packed_sequence_indices", _not_packed
    yield vars(sdpa_attention), "use_gqa_in_sdpa", _repeats_keys
    device = next((p.device.type for p in model.parameters()), "cpu")
    losses = _LOSSES_IN_FLOAT32 if torch.is_autocast_enabled(device) else _LOSSES
    for module in _modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in losses:
                yield vars(module), name, losses[value]
    if loss_alone:
        for cls in type(model).__mro__:
            for name, value in list(vars(sys.modules[cls.__module__]).items()):
                if isinstance(value, type) and issubclass(value, ModelOutput) and hasattr(value, "loss"):
                    yield vars(sys.modules[cls.__module__]), name, _with_losses_alone(value)
    for layer in model.modules():
        if "_gradient_checkpointing_func" in vars(layer):
            yield vars(layer), "_gradient_checkpointing_func", _checkpoint


def _modules(model: nn.Module) -> set[ModuleType]:
    """The Python modules that define the model's classes, and transformers' losses."""
    names = {type(m).__module__ for m in model.modules()}
    return {loss_utils} | {sys.modules[name] for name in names if not name.startswith("torch.")}


def script_function_of(model: nn.Module) -> str | None:
    """The name of a function of `torch.jit.script` in a module that defines the model's classes, such as DeBERTa's."""
    names = (name for module in _modules(model) for name, x in vars(module).items() if _is_script(x))
    return next(names, None)


def _is_script(x: object) -> bool:
    return isinstance(x, torch.jit.ScriptFunction)


# ---- masks ----


def _mask(
    batch_size: int,
    cache_position: Tensor,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Positions = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: object,
) -> Tensor | None:
    """`transformers.masking_utils.sdpa_mask`, a boolean mask of shape (B, 1, queries, keys), without `torch.vmap`.

    None if attention's own `is_causal` does the same: nothing is padded, and no window is shorter than the sequence.
    """
    queries = cache_position.shape[0]
    is_causal = attention_mask is None and queries == kv_length and (local_size is None or kv_length < local_size)
    if allow_is_causal_skip and is_causal:
        return None
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset, _slice=False)
    if padding is not None:
        mask_function = _all_of(mask_function, masking_utils.padding_mask_function(padding))
    device = cache_position.device
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.arange(1, device=device)[None, :, None, None]
    keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    mask = mask_function(batch, head, cache_position[None, None, :, None], keys)
    return mask.expand(batch_size, 1, queries, kv_length)


def _all_of(*functions: Positions) -> Positions:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        result = functions[0](batch, head, query, key)
        for function in functions[1:]:
            result = result & function(batch, head, query, key)
        return result

    return mask


def _not_packed(position_ids: Tensor) -> None:
    return None


def _repeats_keys(attention_mask: Tensor | None, key: Tensor) -> bool:
    return False


# ---- losses ----


def _maker(function: Callable[..., Tensor]) -> Callable[..., Callable[[Tensor, Tensor], Tensor]]:
    """A function in the place of a loss's class."""

    def make(*arguments: object, **options: object) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(result: Tensor, target: Tensor) -> Tensor:
            return function(result, target, *arguments, **options)

        return loss

    return make


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wide(x: object) -> object:
        return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x

    def loss(*arguments: object, **options: object) -> Tensor:
        return function(*[wide(x) for x in arguments], **{name: wide(x) for name, x in options.items()})

    return loss


_FUNCTIONS: dict[type, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.MSELoss: F.mse_loss,
}
_LOSSES = {kind: _maker(function) for kind, function in _FUNCTIONS.items()}
_LOSSES_IN_FLOAT32 = {kind: _maker(_in_float32(function)) for kind, function in _FUNCTIONS.items()}


# ---- outputs ----


@cache  # Dynamo compiles again for another function
def _with_losses_alone(output: type[ModelOutput]) -> Callable[..., ModelOutput]:
    """A function in the place of an output's class: with a loss it keeps no other values."""
    names = tuple(field.name for field in fields(output))

    def make(*values: object, **named: object) -> ModelOutput:
        named.update(zip(names, values, strict=False))
        if named.get("loss") is None:
            return output(**named)
        return output(**{name: value for name, value in named.items() if name in ("loss", "aux_loss")})

    return make


# ---- gradient checkpointing ----


def _checkpoint(function: Callable[..., object], *inputs: object, **options: object) -> object:
    """A layer's `_gradient_checkpointing_func`; its `function` mostly has the layer's keywords already."""

    def layer(*inputs: object) -> object:
        return function(*inputs, **options)

    return checkpoint(layer, *inputs, use_reentrant=False)
