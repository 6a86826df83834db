"""litgpt's `pretrain` and `finetune_lora` with `MemEfficient`, by the command line or in a `with` block.

``python -m thunder_mem.integrations.litgpt`` takes the commands and arguments of ``litgpt``, and of `MemEfficient`::

    python -m thunder_mem.integrations.litgpt finetune_lora checkpoints/EleutherAI/pythia-160m --budget 40GiB

The way of a step::

    logits = model(input_ids)                     a stand-in: no logits are made
    loss = chunked_cross_entropy(logits, targets) `thunder.jit` runs model and loss as one program

Validation and generation, which compute no gradients, run litgpt's own code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import ModuleType
from unittest.mock import patch

import litgpt.pretrain as pretrain
import thunder
import torch
import torch.nn.functional as F
from litgpt.finetune import lora as finetune_lora
from litgpt.lora import LoRAQKVLinear
from thunder.extend import Executor
from torch import Tensor, nn

from thunder_mem.transforms import MemEfficient

__all__ = ["main", "memory_efficient"]

_ROWS = 64
"""Rows of a fine-tuning batch have the length of its longest text. They are filled up to a multiple of this, so that
few programs are compiled. No token sees a later one, so this changes no loss."""

_COMMANDS = ("pretrain", "finetune", "finetune_lora")
"""litgpt's commands that train with `MemEfficient`; "finetune" is "finetune_lora"."""


@contextmanager
def memory_efficient(*, executors: Sequence[Executor | str] | None = None, **options: object) -> Iterator[None]:
    """Inside, litgpt's `pretrain` and `finetune_lora` train with `MemEfficient`, on one device.

    Args:
        executors: of `thunder.jit`; by default Thunder's.
        options: of `MemEfficient`, such as ``budget="40GiB"``.

    Raises:
        TypeError, ValueError: an option of `MemEfficient` is unknown or wrong.

    Example:
        >>> with memory_efficient(budget="40GiB"):
        ...     litgpt.pretrain.setup("pythia-14m", data=data)  # doctest: +SKIP
    """
    transform = MemEfficient(**options)  # type: ignore[arg-type]

    def compiled(module: nn.Module) -> Callable[..., Tensor]:
        return thunder.jit(module, executors=executors, transforms=[transform])

    with ExitStack() as stack:
        for module, where, model_is_at in (
            (pretrain, "initialize_weights", 1),
            (finetune_lora, "mark_only_lora_as_trainable", 0),
        ):
            stack.enter_context(patch.object(module, where, _then_efficient(module, where, model_is_at, compiled)))
            loss = _loss_of_either(module.chunked_cross_entropy)
            stack.enter_context(patch.object(module, "chunked_cross_entropy", loss))
        yield


def _then_efficient(
    module: ModuleType, name: str, model_is_at: int, compiled: Callable[[nn.Module], Callable[..., Tensor]]
) -> Callable[..., None]:
    """litgpt's function of this name, which has the new model among its arguments; then the model is efficient."""
    before: Callable[..., None] = getattr(module, name)

    def function(*args: object, **kwargs: object) -> None:
        before(*args, **kwargs)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            _refuse_several(torch.distributed.get_world_size())
        model = args[model_is_at]
        assert isinstance(model, nn.Module)
        model.forward = _Forward(model, compiled)

    return function


def _refuse_several(ranks: int) -> None:
    if ranks > 1:
        raise ValueError("litgpt with MemEfficient trains on one device: give --devices 1 and --num_nodes 1")


class _Forward:
    """A model's forward in the place of its class' own: in a training step it makes no logits."""

    def __init__(self, model: nn.Module, compiled: Callable[[nn.Module], Callable[..., Tensor]]) -> None:
        self.model = model
        self._compiled = compiled
        self._tensors: tuple[Tensor, ...] = ()
        self._step: Callable[..., Tensor] | None = None

    @torch.compiler.disable
    def __call__(self, idx: Tensor, *args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled() and self.model.training and not args and not kwargs.keys() - {"lm_head_chunk_size"}:
            return _Logits(self, idx)
        return type(self.model).forward(self.model, idx, *args, **kwargs)

    def loss(self, idx: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """The loss of a batch of shape (B, T) by the program for the model's present parameters and buffers."""
        tensors = tuple(chain(self.model.parameters(), self.model.buffers()))
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        if self._step is None or not same:
            self._step, self._tensors = self._compiled(_Loss(self.model, ignored)), tensors
        most = getattr(self.model, "max_seq_length")  # noqa: B009 - of litgpt's GPT
        missing = max(min(-(-idx.shape[1] // _ROWS) * _ROWS, most) - idx.shape[1], 0)
        with patch.object(LoRAQKVLinear, "zero_pad", _zero_pad):
            return self._step(F.pad(idx, (0, missing)), F.pad(targets, (0, missing), value=ignored))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, ignored: int) -> None:
        super().__init__()
        self.model = model
        self.ignored = ignored

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """As `litgpt.utils.chunked_cross_entropy`, which is 0 where all targets are ignored."""
        logits = type(self.model).forward(self.model, idx).float()
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored, reduction="sum")
        return total / (targets != self.ignored).sum().clamp(min=1)


class _Logits:
    """The logits of a training step, which are not made.

    `litgpt.finetune.lora` cuts the last token by ``logits[-1] = logits[-1][..., :-1, :]``, and this is all that it
    may do with them before it asks for the loss.
    """

    def __init__(self, forward: _Forward, idx: Tensor, cut: int = 0) -> None:
        self._forward = forward
        self._idx = idx
        self._cut = cut
        device = idx.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def __getitem__(self, index: object) -> _Logits:
        if index == -1:
            return self
        if index == (Ellipsis, slice(None, -1), slice(None)):
            return _Logits(self._forward, self._idx, self._cut + 1)
        raise TypeError(f"the logits of a training step with MemEfficient are not made, so they have no [{index}]")

    def __setitem__(self, index: object, value: _Logits) -> None:
        if index != -1 or value._idx is not self._idx:
            raise TypeError("the logits of a training step with MemEfficient are not made, so they cannot be changed")
        self._cut = value._cut

    def loss(self, targets: Tensor, ignored: int) -> Tensor:
        whole = F.pad(targets, (0, self._cut), value=ignored)
        enabled = self._autocast is not None
        with torch.autocast(self._idx.device.type, dtype=self._autocast, enabled=enabled):
            return self._forward.loss(self._idx, whole, ignored)


def _loss_of_either(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(logits: object, targets: Tensor, chunk_size: int = 128, ignore_index: int = -100) -> Tensor:
        if isinstance(logits, _Logits):
            return logits.loss(targets, ignore_index)
        return own(logits, targets, chunk_size=chunk_size, ignore_index=ignore_index)

    return loss


def _zero_pad(self: LoRAQKVLinear, x: Tensor) -> Tensor:
    """`LoRAQKVLinear.zero_pad`, without writing: zeros for what of query, key and value has no LoRA."""
    if all(self.enable_lora):
        return x
    parts = iter(x.split(self.qkv_shapes, dim=-1))
    group = self.head_size * self.n_query_groups
    columns = zip(self.enable_lora, (self.head_size * self.n_head, group, group), strict=True)
    zeros = [None if enabled else x.new_zeros(*x.shape[:-1], size) for enabled, size in columns]
    return torch.cat([next(parts) if zero is None else zero for zero in zeros], dim=-1)


def main(arguments: Sequence[str] | None = None) -> None:
    """litgpt's command line, with `--budget` and `--no_fusion` for `MemEfficient`."""
    parser = argparse.ArgumentParser(prog="thunder_mem.integrations.litgpt", add_help=False, allow_abbrev=False)
    parser.add_argument("--budget")
    parser.add_argument("--no_fusion", action="store_true")
    own, others = parser.parse_known_args(arguments)
    command = others[0] if others else None
    if command not in _COMMANDS and (own.budget is not None or own.no_fusion):
        parser.error(f"--budget and --no_fusion are for {', '.join(_COMMANDS)}, not for {command}")
    options = {} if own.budget is None else {"budget": own.budget}
    from litgpt.__main__ import main as litgpt_main

    efficient = memory_efficient(executors=[] if own.no_fusion else None, **options)
    with efficient, patch.object(sys, "argv", ["litgpt", *others]):
        litgpt_main()


if __name__ == "__main__":
    main()
