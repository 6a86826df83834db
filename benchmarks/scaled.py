"""The models of the benchmark's matrix as they run on a CPU, and the executors that Thunder gets there."""

from __future__ import annotations

import torch
from litgpt import GPT, Config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from benchmarks.litgpt.matrix import MODELS
from benchmarks.litgpt.models import CUSTOM, WithLoss, block_class, build_custom, known_models
from benchmarks.models import Program
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

__all__ = ["EXECUTORS", "scaled_model"]

EXECUTORS = [mem_attention_ex, mem_pointwise_ex]
"""Those that `MemEfficient` adds to Thunder's own."""


def scaled_model(name: str, checkpointing: bool, times_longer: int = 1, dtype: torch.dtype = torch.bfloat16) -> Program:
    """A step of the benchmark's model as it runs on a CPU, perhaps over longer sequences."""
    how = MODELS[name]
    with known_models(how.cpu_scale):
        longer = times_longer * Config.from_name(name).block_size
        config = Config.from_name(name, n_layer=how.cpu_layers, block_size=longer)
        torch.manual_seed(0)
        model = (build_custom(name, config) if name in CUSTOM else GPT(config)).to(dtype)
    if checkpointing:
        block = block_class(name)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))
    tokens, targets = torch.randint(0, config.vocab_size, (2, how.cpu_batch, config.block_size))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    label = f"{name}, scaled, loss inside, checkpointing {'on' if checkpointing else 'off'}"
    return Program(label, WithLoss(model), (tokens, targets), trains=True)
