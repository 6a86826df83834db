"""Programs whose values are offloaded, and how to compile them so."""

import pytest
import thunder
import torch
from thunder.core.symbol import BoundSymbol
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient
from thunder_mem.runtime.host_transfers import is_transfer


def block(dropout: float = 0.1) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1), torch.nn.Dropout(dropout))


def stack(blocks: int = 4, dropout: float = 0.1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(block(dropout) for _ in range(blocks)))


def step(model, compiled, x):
    torch.manual_seed(1)
    model.zero_grad()
    compiled(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def compiled(model, budget=None, *, offload=True, executors=(), **options):
    options = {"strict": True, "verify": True, **options}
    if budget is not None:
        options |= {"budget": budget, "offload": offload}
    return thunder.jit(model, executors=list(executors), transforms=[MemEfficient(**options)])


def transfers(trace) -> list[BoundSymbol]:
    return [b for b in trace.bound_symbols if is_transfer(b)]


class InPlace(torch.nn.Module):
    """Writes in place, before and after values that the backward needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            z = torch.tanh(y)
            y = y * 2
            y.add_(z)
            x = torch.sin(y).add_(z)
        return x


class Projected(torch.nn.Module):
    """Three projections to query, key and value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(64, 192) for _ in range(3))


class Views(Projected):
    """Saves views of bases, and of transposed ones."""

    def forward(self, x):
        for layer in self.qkv:
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(0, 1) for t in layer(x).split(64, -1))
            weights = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
            x = x + (weights @ v).transpose(0, 1).flatten(1)
        return x


class Attending(Projected):
    """Attention by the CPU's own kernel, whose results are not contiguous."""

    def forward(self, x):
        for layer in self.qkv:
            q, k, v = (t.view(8, -1, 4, 16).transpose(1, 2) for t in layer(x).split(64, -1))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(block(0.0) for _ in range(4))

    def forward(self, x):
        for part in self.blocks:
            x = checkpoint(part, x, use_reentrant=False)
        return x


PROGRAMS = {
    "softmax": (lambda: stack(dropout=0.0), ()),
    "in place": (InPlace, ()),
    "views": (Views, ()),
    "attention": (Attending, ("mem_attention",)),
    "checkpointed": (Checkpointed, ()),
    "regions": (lambda: stack(5, dropout=0.0), ("mem_pointwise",)),
}


def tightest(make, x, executors, **options) -> tuple[object, list[torch.Tensor]]:
    tight = compiled(make(), 1, executors=executors, on_infeasible="warn", **options)
    with pytest.warns(UserWarning, match="no plan keeps the peak within 1 bytes"):
        return tight, step(tight._model, tight, x)
