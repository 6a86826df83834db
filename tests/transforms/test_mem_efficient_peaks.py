"""Measured peaks of small programs: never above Thunder's own with the same executors, and as planned."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from tests.programs.predict_cases import peaks_as_planned
from thunder_mem import MemEfficient, last_plan, measure_peak
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.prediction.predict import predict
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

FUSED = {"executors": [mem_attention_ex, mem_pointwise_ex]}
UNFUSED = {"executors": []}


def efficient(x, y):
    """Issue 1337: every path ends before the next begins."""
    total = 0
    for scale in range(1, 6):
        total = total + ((x * scale).sin() + y).cos()
    return total


def inefficient(x, y):
    """Issue 1337: all paths begin before the first ends."""
    paths = [(x * scale).sin() + y for scale in range(1, 6)]
    total = 0
    for path in paths:
        total = total + path.cos()
    return total


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gated, self.head = nn.Embedding(96, 32), Gated(), nn.Linear(32, 96, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        return F.cross_entropy(self.head(x + self.gated(x)), targets)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 32)
        for t in range(4):
            h = torch.tanh(self.inner(x[:, t]) + self.outer(h))
        return h


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    )


def bfloat16_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def moving_average(x, average):
    """A buffer written twice a step, as a whole."""
    y = x.tanh()
    average.mul_(0.9).add_(y.detach() * 0.1)
    return (y @ average).sin()


TOKENS = torch.arange(40) % 96
PROGRAMS = {
    "efficient": lambda: (efficient, (randn(64, 64), randn(64, 64, seed=1))),
    "inefficient": lambda: (inefficient, (randn(64, 64), randn(64, 64, seed=1))),
    "MLP": lambda: (nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 24)), (randn(64, 48),)),
    "attention block": lambda: (Block(), (randn(2, 24, 32),)),
    "conv net": lambda: (conv_net(), (randn(2, 3, 16, 16),)),
    "residual": lambda: (Residual(), (randn(32, 48),)),
    "gated": lambda: (Gated(), (randn(48, 32),)),
    "checkpointed": lambda: (Checkpointed(), (randn(48, 32),)),
    "embedding and loss": lambda: (Language(), (TOKENS, (TOKENS + 1) % 96)),
    "recurrent": lambda: (Recurrent(), (randn(8, 4, 16),)),
    "norm in bfloat16": lambda: (
        bfloat16_norm,
        (randn(64, 96, dtype=torch.bfloat16), randn(96, seed=1, dtype=torch.bfloat16)),
    ),
    "dropout": lambda: (
        nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 8)),
        (randn(64, 32),),
    ),
    "moving average": lambda: (moving_average, (randn(48, 48), randn(48, 48, grad=False, seed=1))),
    "softmax of products": lambda: (
        lambda x, y: torch.softmax(x @ y.t(), -1) @ y,
        (randn(48, 16), randn(40, 16, seed=1)),
    ),
}


# A Python number on the left of an operator is a tensor of at most this many bytes while the operator runs.
NUMBER_BYTES = 16


def made(name):
    torch.manual_seed(0)
    return PROGRAMS[name]()


class Run:
    """A program, compiled by its first step."""

    def __init__(self, name, *transforms, **options):
        self.fn, self.args = made(name)
        self.jitted = thunder.jit(self.fn, transforms=transforms, **options)
        self.step()

    def step(self):
        y = self.jitted(*self.args)
        torch.autograd.backward([y], [torch.ones_like(y)])
        for t in (*self.args, *(self.fn.parameters() if isinstance(self.fn, nn.Module) else ())):
            t.grad = None

    def measured(self):
        """Bytes above the start: of the forward, and of a step."""
        return measure_peak(lambda: self.jitted(*self.args)), measure_peak(self.step)

    def predicted(self):
        """Bytes held in the forward and in the backward, while the caller holds arguments and outputs."""
        return peaks_as_planned(predict(self.jitted, *self.args, keep_outputs=True))

    def planned(self):
        candidate = last_plan(self.jitted).candidate
        return [candidate.forward_peak_bytes, candidate.backward_peak_bytes]


def check_measured(name, options):
    run, own = Run(name, MemEfficient(strict=True), **options), Run(name, **options)
    assert run.planned() == run.predicted()
    assert max(run.measured()) <= max(own.measured()) + NUMBER_BYTES
    assert max(run.planned()) <= max(own.predicted())


# At most this share of Thunder's own peak, so that a transform that does nothing cannot pass.
SHARES = {"MLP": 0.95, "attention block": 0.9, "conv net": 0.5, "gated": 0.8, "embedding and loss": 0.9, "dropout": 0.9}


def quick(names):
    """All programs, those that are not named as slow ones."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]


QUICK = quick(["inefficient", "MLP", "conv net", "embedding and loss", "moving average", "norm in bfloat16"])


@pytest.mark.parametrize("name", quick([*SHARES, "inefficient", "residual", "norm in bfloat16"]))
@pytest.mark.slow
def test_planned_peak_of_fused_code_is_what_runs_and_not_above_thunders_own(name):
    with uncompiled_regions():
        run, own = Run(name, MemEfficient(strict=True), **FUSED), Run(name, **FUSED)
        assert run.planned() == run.predicted()
        assert max(run.planned()) <= SHARES.get(name, 1.0) * max(own.predicted())


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_measured_peak_is_never_above_thunders_own(name):
    check_measured(name, UNFUSED)


@pytest.mark.slow  # Inductor
@pytest.mark.parametrize("name", PROGRAMS)
def test_measured_peak_of_fused_code_is_never_above_thunders_own(name):
    check_measured(name, FUSED)
