"""Small programs, each with its arguments, of which all that a version may break is in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS"]

WORDS, WIDTH = 512, 32


class Layer(nn.Module):
    """Attention and an MLP, as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate, self.down = (nn.Linear(*s) for s in ((WIDTH, 64), (WIDTH, 64), (64, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        heads = self.attention(self.before(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """A language model with its loss inside."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers, self.checkpoints = nn.ModuleList(Layer() for _ in range(2)), checkpoints

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Pictures(nn.Module):
    """Convolutions, and a norm whose buffers change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 16, 3), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))


class Written(nn.Module):
    """Writes in place, views and a slice that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layer(x).sin().chunk(3, -1)
        a = a.mul(2)
        a.add_(1)
        a[:, :4] = b[:, :4]
        return (a.exp() * b.t().contiguous().t() + c.unsqueeze(0).expand(4, -1, -1).sum(0)).sum()


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (2, 64)), torch.randint(WORDS, (2, 64))


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "language model": lambda: (Language(checkpoints=False), _tokens()),
    "checkpoints": lambda: (Language(checkpoints=True), _tokens()),
    "bfloat16": lambda: (Language(checkpoints=False).bfloat16(), _tokens()),
    "convolutions": lambda: (Pictures(), (torch.randn(4, 3, 20, 20),)),
    "writes": lambda: (Written(), (torch.randn(16, WIDTH),)),
}
