"""The models of the benchmark: two that litgpt no longer lists, two that it never had, and all of them scaled down.

Every model is known by a litgpt `Config`, by which Thunder's benchmark takes sizes and prints them; GPT-2
(Thunder's nanoGPT) and BERT (transformers) are built from the sizes in it, and return logits as litgpt's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from litgpt import config as litgpt_config
from litgpt.model import CausalSelfAttention
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["CUSTOM", "WithLoss", "block_class", "build_custom", "known_models", "scaled", "with_windows_at_once"]

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "padding_multiple": 64,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "norm_eps": 1e-6,
    "mlp_class_name": "LLaMAMLP",
}

_ADDED: dict[str, dict[str, Any]] = {
    # Both were in litgpt until 0.5.3.
    "longchat-7b-16k": {
        **_LLAMA,
        "hf_config": {"org": "lmsys", "name": "longchat-7b-16k"},
        "block_size": 16384,
        "n_layer": 32,
        "n_head": 32,
        "n_embd": 4096,
        "intermediate_size": 11008,
        "rope_condense_ratio": 8,
    },
    "vicuna-33b-v1.3": {
        **_LLAMA,
        "hf_config": {"org": "lmsys", "name": "vicuna-33b-v1.3"},
        "block_size": 2048,
        "n_layer": 60,
        "n_head": 52,
        "n_embd": 6656,
        "intermediate_size": 17920,
    },
    "gpt2-124m": {
        "hf_config": {"org": "openai-community", "name": "gpt2"},
        "block_size": 1024,
        "vocab_size": 50257,
        "padded_vocab_size": 50304,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "intermediate_size": 3072,
    },
    "bert-base-mlm": {
        "hf_config": {"org": "google-bert", "name": "bert-base-uncased"},
        "block_size": 512,
        "vocab_size": 30522,
        "padded_vocab_size": 30522,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "intermediate_size": 3072,
    },
}

CUSTOM = ("gpt2-124m", "bert-base-mlm")
"""The models that litgpt's `GPT` does not build."""


@contextmanager
def known_models(scale: float = 1.0) -> Iterator[None]:
    """Within, litgpt's registry has the models above too, and every model is of the given scale.

    Example:
        >>> with known_models(1 / 16):
        ...     config = litgpt_config.Config.from_name("longchat-7b-16k")
        >>> config.block_size, config.n_embd, config.n_head, config.head_size, config.padded_vocab_size
        (1024, 256, 16, 16, 2000)
    """
    table = {name: {"name": name, **sizes} for name, sizes in _ADDED.items()}
    table = {**table, **litgpt_config.name_to_config}
    if scale != 1:
        table = {name: scaled(sizes, scale) for name, sizes in table.items()}
    with mock.patch.dict(litgpt_config.name_to_config, table):
        yield


def scaled(sizes: dict[str, Any], scale: float) -> dict[str, Any]:
    """A litgpt configuration with sequence, width, MLP and vocabulary all multiplied by `scale`.

    So every activation and every matrix shrinks by `scale` squared, and keeps its share of the peak. Heads
    shrink to 16 at the least, then there are fewer of them. The number of layers stays.

    Raises:
        ValueError: `scale` is not in (0, 1].

    Example:
        >>> falcon = {"name": "f", "block_size": 2048, "n_embd": 8192, "n_head": 128, "n_query_groups": 8}
        >>> small = scaled(falcon, 1 / 16)
        >>> small["block_size"], small["n_embd"], small["n_head"], small["n_query_groups"]
        (128, 512, 32, 2)
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale is a fraction of the model's size, in (0, 1], not {scale!r}")
    full = litgpt_config.Config(**sizes)
    head_size = max(16, _multiple(full.head_size * scale, 8))
    n_head = max(1, round(full.n_head * full.head_size * scale / head_size))
    groups = max(1, full.n_query_groups * n_head // full.n_head)
    n_head = max(groups, n_head // groups * groups)
    assert full.padded_vocab_size is not None and full.intermediate_size is not None
    vocab = _multiple(full.padded_vocab_size * scale, 8)
    own_width = full.n_embd != full.n_head * full.head_size  # Gemma's heads are wider than its residual stream
    return {
        **sizes,
        "block_size": _multiple(full.block_size * scale, 16),
        "n_embd": _multiple(full.n_embd * scale, 8) if own_width else n_head * head_size,
        "n_head": n_head,
        "head_size": head_size,
        "n_query_groups": groups,
        "intermediate_size": _multiple(full.intermediate_size * scale, 8),
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
    }


def _multiple(size: float, of: int) -> int:
    return max(of, round(size / of) * of)


class WithLoss(nn.Module):
    """A model that returns its loss: `(tokens (B, T), targets (B, T)) -> mean cross entropy`, -1 ignored."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        return cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


def with_windows_at_once(model: nn.Module) -> nn.Module:
    """The same litgpt model, whose sliding windows are masks that few operations make.

    litgpt makes each mask by one assignment for each token, which a compiler traces one by one: minutes for a layer.
    """
    for module in model.modules():
        if type(module) is CausalSelfAttention and module.apply_sliding_window_attention:
            module.__class__ = _Windowed
            module.apply_sliding_window_attention = False
    return model


class _Windowed(CausalSelfAttention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *more: None) -> Tensor:
        """litgpt's `forward` for training: a mask that is given is not read, as there."""
        size = x.size(1)
        everything = torch.ones(size, size, dtype=torch.bool, device=x.device)
        seen = everything.tril() & ~everything.tril(-self.config.sliding_window_size)
        window = torch.zeros(1, 1, size, size, dtype=x.dtype, device=x.device).masked_fill(~seen, float("-inf"))
        return CausalSelfAttention.forward(self, x, cos, sin, window, *more)


class _NanoGPT(nn.Module):
    def __init__(self, config: Any) -> None:
        from thunder.tests.nanogpt_model import GPT, GPTConfig

        super().__init__()
        self.config = config
        self.gpt = GPT(
            GPTConfig(config.block_size, config.padded_vocab_size, config.n_layer, config.n_head, config.n_embd)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)[0]


class _Positional(nn.Module):
    """A layer of BERT's, called by position alone, as Thunder's activation checkpointing needs it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, *_: None, **__: object) -> Any:
        return self.layer(hidden, attention_mask)  # what else the encoder gives is for decoders


class _Bert(nn.Module):
    def __init__(self, config: Any) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.config = config
        sizes = BertConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.n_embd,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.block_size,
        )
        self.bert = BertForMaskedLM(sizes)
        encoder = self.bert.bert.encoder
        encoder.layer = nn.ModuleList(_Positional(layer) for layer in encoder.layer)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


def build_custom(name: str, config: Any) -> nn.Module:
    """One of `CUSTOM`, in float32 on the default device, with the sizes of `config`; `(B, T) -> logits (B, T, V)`.

    BERT has its dropout of 0.1, nanoGPT none, as both come. BERT's loss counts every position here, as for the others.
    """
    return {"gpt2-124m": _NanoGPT, "bert-base-mlm": _Bert}[name](config)


def block_class(name: str) -> type[nn.Module]:
    """The class of the layers that activation checkpointing wraps."""
    if name == "gpt2-124m":
        from thunder.tests import nanogpt_model

        return nanogpt_model.Block
    if name == "bert-base-mlm":
        from transformers.models.bert.modeling_bert import BertLayer

        return BertLayer
    from litgpt.model import Block

    return Block
