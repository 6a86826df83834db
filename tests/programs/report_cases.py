"""Programs and made-up timelines that reports are tested on; each is compiled once a session."""

from __future__ import annotations

import functools
import random
from unittest import mock

import thunder
import torch
from torch import nn

from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.fake_execution.replay import Event
from thunder_mem.prediction.predict import Held, Prediction
from thunder_mem.report import Report, explain
from thunder_mem.tiling import heads
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.transforms import ChunkLossHead, MemEfficient


class Blocks(nn.Module):
    """Three equal blocks with shared weights."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        for _ in range(3):
            x = self.narrow(torch.nn.functional.gelu(self.wide(x)))
        return x.sum()


class Stack(nn.Module):
    """Three blocks with weights of their own, and the tanh of each to be saved."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


@functools.cache
def planned() -> Report:
    jitted = thunder.jit(Blocks(), executors=[], transforms=[MemEfficient()])
    jitted(torch.randn(8, 16))
    return explain(jitted, budget=2**20, detail=True)


class Attending(nn.Module):
    """Attention of four heads over two heads of keys, a block, and a loss over 64 words."""

    def __init__(self):
        super().__init__()
        self.projected, self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(16, 64), nn.Linear(64, 16)
        self.words = nn.Linear(16, 64)

    def forward(self, x, targets):
        query, keys, values = self.projected(x).split((16, 8, 8), -1)
        query, keys, values = (t.view(1, 24, -1, 4).transpose(1, 2) for t in (query, keys, values))
        keys, values = (t[:, :, None].expand(1, 2, 2, 24, 4).flatten(1, 2) for t in (keys, values))
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values)
        x = mixed.transpose(1, 2).reshape(x.shape)
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        return nn.functional.cross_entropy(self.words(x).flatten(0, 1), targets)


@functools.cache
def in_parts() -> Report:
    """A program with a stretch in tiles, attention by groups of heads, and a loss head in chunks."""
    transform = MemEfficient(tile=Tiles(rows=8), chunk=ChunkLossHead(chunks=4), strict=True)
    jitted = thunder.jit(Attending(), executors=[mem_attention_ex], transforms=[transform])
    with mock.patch.object(heads, "_CPU_BLOCKS", 1):
        jitted(torch.randn(1, 24, 16), torch.zeros(24, dtype=torch.long))
    return explain(jitted, bounds=False, detail=True)


@functools.cache
def unplanned() -> Report:
    """Thunder alone, with the kernels that `MemEfficient` adds where nothing fuses."""
    jitted = thunder.jit(Blocks(), executors=["mem_attention", "mem_kernels"])
    jitted(torch.randn(8, 16))
    return explain(jitted, detail=True)


@functools.cache
def stacked() -> Report:
    return explain(
        thunder.jit(Stack(), executors=[], transforms=[MemEfficient()]), torch.randn(256, 16), bounds=False, detail=True
    )


def synthetic(ops: int, seed: int = 0, name: str = "op") -> Prediction:
    """A timeline of `ops` operations, half of them backward, with storages that live for random spans."""
    rng = random.Random(seed)
    cpu = torch.device("cpu")
    storages = [Held(4096, "w", (), (32, 32), torch.float32, cpu, "argument", -1, ops - 1)]
    dying = [0] * (ops + 1)
    born = []
    for i in range(ops):
        nbytes = 64 * rng.randrange(1, 1000)
        last = min(ops - 1, i + rng.randrange(0, max(2, ops // 4)))
        storages.append(Held(nbytes, f"{name}_t{i}", (), (nbytes // 4,), torch.float32, cpu, "computed", i, last))
        dying[last + 1] += nbytes
        born.append(nbytes)
    live, events = 4096, []
    for i in range(ops):
        live += born[i] - dying[i]
        phase = "forward" if i < ops // 2 else "backward"
        source = f"/code/{name}.py:{i % 50 + 1}"
        events.append(Event(i, phase, f"{name}{i % 7}", (f"{name}_t{i}",), source, live, born[i]))
    return Prediction(tuple(events), tuple(storages), 4096, "cpu", ("made up",))
