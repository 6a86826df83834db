"""Are results right on the device: losses and gradients of a small step, compared with eager in float64."""

from __future__ import annotations

import copy
from typing import Any

import thunder
import torch
from litgpt import Config
from thunder.extend import Executor
from torch import nn

from benchmarks.models import gpt_module, small_llama
from thunder_mem import ChunkLossHead, MemEfficient
from thunder_mem.fusers.fusion_executors import fuser_of, with_fuser

__all__ = ["LONG", "SHORT", "check"]

SHORT = small_llama(vocab=1000, layers=2, tokens=256, width=128, heads=4, mlp_width=344)
LONG = small_llama(vocab=1000, layers=2, tokens=4096, width=512, heads=8, mlp_width=1376)
"""Of many tokens, so that attention runs by groups of heads."""
_SLACK = 1.5
"""How many times Thunder's own error in the same dtype MemEfficient's may be: both round, in different places."""

_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk": ChunkLossHead(rows=128)},
    {"budget": 1, "on_infeasible": "warn"},
)


def check(device: str, fusion: str, dtype: torch.dtype, config: Config = SHORT) -> list[dict[str, Any]]:
    """With and without checkpointing, a budget and a chunk loop: errors against float64, of Thunder's and ours.

    Args:
        device: "cuda" or "cpu".
        fusion: who fuses, one of `thunder_mem.fusers.fusion_executors.FUSIONS`.
        dtype: of the model.
        config: its sizes.

    Returns:
        Rows with "right": whether our largest error of a gradient, relative to its norm, is at most 1.5 times
        Thunder's own, or within the dtype's rounding.

    Raises:
        ValueError: `fusion` does not work here.
    """
    executors = with_fuser(thunder.extend.get_default_executors(), fuser_of(fusion))
    rows = []
    for checkpointing in (True, False):
        torch.manual_seed(0)
        model = gpt_module(config, checkpointing, True, device, dtype)
        tokens, targets = torch.randint(0, 1000, (2, 2, config.block_size), device=device)
        exact = _gradients(copy.deepcopy(model).double(), tokens, targets)
        thunders = _thunders_error(model, executors, tokens, targets, exact)
        for options in _OPTIONS:
            transform = MemEfficient(strict=True, verify=True, **options)
            ours = _error(_gradients(_jit(model, executors, transform), tokens, targets), exact)
            rows.append(
                {
                    "checkpointing": checkpointing,
                    "transform": repr(transform),
                    "thunders_error": thunders,
                    "error": ours,
                    "right": ours <= max(_SLACK * (thunders or 0.0), 8 * torch.finfo(dtype).eps),
                }
            )
    return rows


def _thunders_error(
    model: nn.Module,
    executors: list[Executor],
    tokens: torch.Tensor,
    targets: torch.Tensor,
    exact: dict[str, torch.Tensor],
) -> float | None:
    """The error of Thunder alone; None if it fails, for then nothing but the dtype's rounding excuses ours."""
    try:
        return _error(_gradients(_jit(model, executors), tokens, targets), exact)
    except RuntimeError as error:
        print(f"Thunder alone: {error}"[:2000])
        return None


def _jit(model: nn.Module, executors: list[Executor], *transforms: MemEfficient) -> Any:
    return thunder.jit(copy.deepcopy(model), executors=executors, transforms=list(transforms))


def _gradients(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(tokens, targets)
    loss.backward()
    named = {name.removeprefix("_model."): p.grad.double() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double(), **named}


def _error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    if found.keys() != exact.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(found.keys() ^ exact.keys())}")
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
