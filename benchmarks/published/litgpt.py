"""litgpt's figures of finetuning: the resource tables of October 2023, and the table of its recipes (`config_hub`).

Both print `torch.cuda.max_memory_allocated` after `finetune/lora.py`, in GB of 10**9 bytes, for bfloat16 on an
A100-40GB or an A10G. Here litgpt's own model of today runs one microbatch as that script does it.

- Lightning Fabric turns the logits, a list of chunks of 128 rows, into float32.
- Norms compute in float32, as they do since litgpt's commit 6178c7cc. The tables name an earlier commit, 8641822.
- The tables' longest sample comes first, before there are gradients or AdamW's state. Recipes cut samples to 512
  tokens, so that longest batches come again, with both.
- Sliding windows came to Mistral and Phi-3 in September 2024 (litgpt #1741), after these figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from litgpt.lora import GPT, Config, LoRAQKVLinear, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy
from torch import Tensor

from benchmarks.published.case import Case, Predicted, of_fit
from thunder_mem import estimate

__all__ = ["CASES"]

_TABLES = "https://github.com/Lightning-AI/litgpt/blob/069f6584/tutorials/resource-tables.md"
_RECIPES = "https://github.com/Lightning-AI/litgpt/blob/00af8b0d/config_hub/finetune/README.md"
_ATTENTION = {"lora_query": True, "lora_value": True}
_RECIPE_TOKENS = 512
_EVERYWHERE = {f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp", "head")}


def _lora(name: str, tokens: int, **options: Any) -> GPT:
    """The model as Fabric makes it for "bf16-true": parameters in bfloat16, tables of the rotation in float32."""
    config = Config.from_name(name, lora_alpha=16, **{"lora_dropout": 0.05, **options})
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = GPT(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.max_seq_length = tokens
    mark_only_lora_as_trainable(model)
    for layer in model.modules():
        if isinstance(layer, LoRAQKVLinear):
            _ = layer.lora_ind  # made at the first use, and kept: not by a step that is only followed
    return model


def _step(model: GPT, batch: int, tokens: int, microbatches: int) -> Callable[[], None]:
    """Microbatches of `litgpt.finetune.lora.fit`: logits stay until the next ones are there."""
    inputs, targets = (torch.empty(batch, tokens, dtype=torch.long, device="meta") for _ in range(2))

    def step() -> None:
        for _ in range(microbatches):
            logits: list[Tensor] = [chunk.float() for chunk in model(inputs, lm_head_chunk_size=128)]
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, targets[..., 1:])
            loss.backward()

    return step


def _first(name: str, batch: int, tokens: int) -> Predicted:
    """The first microbatch, with LoRA of rank 8 for queries and values."""
    model = _lora(name, tokens, lora_r=8, **_ATTENTION)
    return of_fit(estimate(_step(model, batch, tokens, 1), None, None, device="A100-40GB"))


def _later(name: str, batch: int, **options: Any) -> Predicted:
    """A later microbatch."""
    model = _lora(name, _RECIPE_TOKENS, **options)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return of_fit(estimate(_step(model, batch, _RECIPE_TOKENS, 2), adamw, None, device="A10G"))


def _table_case(name: str, tokens: int, batch: int, published: float) -> Case:
    configuration = f"LoRA of {name}, {batch} x {tokens}"
    predict = partial(_first, name, batch, tokens)
    return Case("litgpt, 2023-10-20", _TABLES, configuration, "A100-40GB", published, "GB", predict)


def _recipe_case(recipe: str, name: str, batch: int, published: float, **options: Any) -> Case:
    configuration = f"recipe {recipe}/lora.yaml, {batch} x {_RECIPE_TOKENS}"
    predict = partial(_later, name, batch, **options)
    return Case("litgpt, 2024", _RECIPES, configuration, "A10G", published, "GB", predict)


_OF_32 = {"lora_r": 32, **_ATTENTION}
CASES = (
    _table_case("phi-1_5", 1044, 1, 4.82),
    _table_case("phi-1_5", 1044, 2, 6.76),
    _table_case("phi-1_5", 1044, 4, 10.68),
    _table_case("stablelm-base-alpha-3b", 1034, 1, 9.69),
    _table_case("stablelm-base-alpha-3b", 1034, 2, 12.10),
    _table_case("stablelm-base-alpha-3b", 1034, 4, 16.92),
    _table_case("Llama-2-7b-hf", 1304, 1, 21.30),
    _table_case("Llama-2-7b-hf", 1304, 2, 29.07),
    _table_case("Llama-2-13b-hf", 1304, 1, 38.12),
    _recipe_case("stablelm-base-alpha-3b", "stablelm-base-alpha-3b", 1, 8.58, **_OF_32),
    _recipe_case("llama-2-7b", "Llama-2-7b-hf", 2, 19.77, **_OF_32),
    _recipe_case("mistral-7b-v0.2", "Mistral-7B-v0.2", 2, 20.66, **_OF_32),
    _recipe_case("llama-3-8b", "Llama-3-8B", 1, 19.73, **_OF_32),
    _recipe_case("falcon-7b", "falcon-7b", 1, 16.69, **_OF_32),
    _recipe_case("phi-2", "phi-2", 4, 13.98, lora_r=8, **_EVERYWHERE),
    _recipe_case("phi-3", "Phi-3-mini-4k-instruct", 4, 19.75, lora_r=8, **_EVERYWHERE, sliding_window_size=None),
    _recipe_case("tiny-llama", "tiny-llama-1.1b", 8, 13.50, lora_r=32, **_EVERYWHERE),
    _recipe_case("gemma-2b", "Gemma-2b", 2, 12.62, lora_r=8, lora_dropout=0.1, **_EVERYWHERE),
)
