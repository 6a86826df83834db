"""``python -m tests.checking.plan_digests``: plans and final traces of a few programs, compiled twice, as JSON.

All that may differ from process to process (hash seed, threads, what was compiled before) must not show.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import thunder
import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzzing.configs import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import ChunkLossHead, MemEfficient, last_plan

__all__ = ["PROGRAMS", "digests"]


class _Block(nn.Module):
    """Attention, a gated MLP with dropout, a statistic written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 8, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 8, 16)
        x = x + self.out(y)
        self.seen.add_(x.detach().mean((0, 1)))
        return x + F.dropout(self.down(F.silu(self.gate(x)) * self.up(x).float()), 0.1)


def _block() -> tuple[Callable, tuple, dict[str, Any]]:
    torch.manual_seed(0)
    return _Block(), (randn(2, 8, 16),), {}


def _fan() -> tuple[Callable, tuple, dict[str, Any]]:
    def fn(paths, x, y):
        opened = {f"path {i}": torch.relu(p) @ y for i, p in enumerate(paths)}
        for path in opened.values():
            x = torch.tanh(path) @ x
        return {"x": x, "sums": [p.sum() for p in opened.values()]}

    return fn, ([randn(12, 12, seed=i) for i in range(3)], randn(12, 12, seed=7), randn(12, 12, seed=8)), {}


def _head() -> tuple[Callable, tuple, dict[str, Any]]:
    def fn(x, w, targets):
        return F.cross_entropy(F.linear(torch.tanh(x), w), targets)

    targets = torch.arange(64) % 32
    return fn, (randn(64, 8), randn(32, 8, seed=1), targets), {"chunk": ChunkLossHead(chunks=4)}


def _budget() -> tuple[Callable, tuple, dict[str, Any]]:
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)) for _ in range(4)))
    return deep, (randn(256, 8),), {"budget": "50KiB", "on_infeasible": "warn"}


FUSED = ["mem_attention", "mem_pointwise"]
PROGRAMS = {"block": (_block, FUSED), "fan": (_fan, []), "head": (_head, FUSED), "budget": (_budget, FUSED)}


def _compiled(make: Callable[[], tuple[Callable, tuple, dict[str, Any]]], executors: list[str]) -> list[str]:
    fn, args, options = make()
    jitted = thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True, **options)])
    jitted(*args)
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    # Names of files stand above the lines of the program; the times that passes took are comments, too.
    texts = [re.sub("(?m)^ *#.*\n?", "", str(trace)) for trace in traces]
    return [json.dumps(last_plan(jitted).to_json(), sort_keys=True), *texts]


def digests() -> dict[str, list[str]]:
    """Per program, the plan and the traces.

    Raises:
        AssertionError: compiled a second time, one comes out otherwise.
    """
    found = {}
    with uncompiled_regions():
        for name, (make, executors) in PROGRAMS.items():
            found[name] = first = _compiled(make, executors)
            assert _compiled(make, executors) == first, f"{name} comes out otherwise the second time"
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(json.dumps(digests()))
