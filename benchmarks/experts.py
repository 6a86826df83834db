"""A Mixtral that Thunder traces whole: every expert sees all tokens, and its result is multiplied by a token's share.

litgpt's experts take the rows that chose them. How many these are depends on the data, so Thunder cannot trace that.
Both compute the same numbers, but here each expert works for all tokens.
"""

from __future__ import annotations

import torch
from litgpt import GPT, Config
from litgpt.model import LLaMAMoE
from torch import Tensor, nn

__all__ = ["MaskedExperts", "MaskedMixtral"]


class MaskedExperts(nn.Module):
    """litgpt's experts and their router, without rows chosen by data."""

    def __init__(self, experts: LLaMAMoE) -> None:
        super().__init__()
        self.gate, self.experts = experts.gate, experts.experts
        self.chosen = experts.config.n_expert_per_token

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.gate(x), self.chosen)
        shares = scores.softmax(-1, dtype=torch.float).to(x.dtype)
        total = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            total = total + torch.where(chosen == k, shares, 0.0).sum(-1, keepdim=True) * expert(x)
        return total


class MaskedMixtral(GPT):
    """litgpt's model with such experts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp = MaskedExperts(block.mlp)
