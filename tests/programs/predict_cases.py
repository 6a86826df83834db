"""Programs whose peaks are predicted, and the ways to compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from thunder.executors.torch_compile import torch_compile_ex
from torch import nn

from benchmarks.models import efficient, fan, inefficient, shared_efficient, shared_inefficient
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.prediction.predict import Prediction
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.transforms import ChunkLossHead, MemEfficient


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def in_place(x, w):
    y = x @ w
    y.add_(1)
    y = y.sin()
    y.mul_(2)
    return y.exp()


def views(x, w):
    a, b, c = (x @ w).chunk(3, -1)
    e = a.t().reshape(-1) * 2
    f = b.unsqueeze(0).expand(4, -1, -1).contiguous()
    g = (f * c).permute(2, 0, 1).reshape(8, -1)
    return e.sum() + g.sum(), a[::2].contiguous(), b.expand(2, *b.shape).sum(0)


def many_kernels(x):
    """Reductions over both dimensions, each of the one before: Inductor cannot make one kernel of it."""
    for _ in range(3):
        x = (x - x.amax(0)).exp() / x.exp().sum(1, keepdim=True)
        x = x * x.sum(0) + x.mean(1, keepdim=True)
    return x.sum(0)


class Net(nn.Module):
    """Convolution, batch normalisation (whose buffers change in place), pooling, linear."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 16, 3), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.last(F.relu(self.second(x)).mean((2, 3)))


def gpt(layers: int = 1, vocab: int = 128) -> nn.Module:
    from litgpt import GPT, Config

    config = Config(
        block_size=64,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        n_layer=layers,
        n_head=4,
        n_embd=32,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=88,
    )
    return GPT(config).to(torch.bfloat16)


class Tied(nn.Module):
    """An embedding that is the head's weight too: two gradients meet in one parameter."""

    def __init__(self, vocab: int = 128):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 32), nn.Linear(32, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens).sin())


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), y.reshape(-1))


class Trained(nn.Module):
    """A function's arguments as parameters, and the sum of all that it returns as the loss."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        super().__init__()
        self.fn = fn
        self.counts = [len(a) if isinstance(a, list | tuple) else 0 for a in args]
        self.leaves = nn.ParameterList(nn.Parameter(t.detach().clone()) for t in tensors_of(args))

    def forward(self):
        leaves, args = list(self.leaves), []
        for count in self.counts:
            args.append(leaves[:count] if count else leaves[0])
            leaves = leaves[count or 1 :]
        results = self.fn(*args)
        return sum(t.sum() for t in results) if isinstance(results, tuple) else results.sum()


def issue_1337(fn: Callable[..., torch.Tensor]):
    """One of the issue's functions at its size: ten paths of 256 x 256 float32."""
    program = fan(fn)
    return fn, program.args


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "efficient": lambda: issue_1337(efficient),
    "inefficient": lambda: issue_1337(inefficient),
    "shared_efficient": lambda: issue_1337(shared_efficient),
    "shared_inefficient": lambda: issue_1337(shared_inefficient),
    "in_place": lambda: (in_place, (randn(32, 48), randn(48, 64))),
    "views": lambda: (views, (randn(32, 48), randn(48, 96))),
    "many_kernels": lambda: (many_kernels, (randn(48, 64),)),
    "net": lambda: (Net(), (torch.randn(4, 3, 16, 16),)),
    "tied": lambda: (Tied(), (torch.randint(0, 128, (1, 4)),)),
    "gpt": lambda: (gpt(), (torch.randint(0, 128, (2, 32)),)),
    "gpt_loss": lambda: (WithLoss(gpt()), (torch.randint(0, 128, (2, 32)), torch.randint(0, 128, (2, 32)))),
}
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": lambda: {"executors": []},
    "pointwise": lambda: {"executors": [mem_attention_ex, mem_pointwise_ex]},
    "torchcompile": lambda: {"executors": [torch_compile_ex]},
    "planned": lambda: {"executors": [], "transforms": [MemEfficient()]},
    "planned pointwise": lambda: {"executors": [mem_attention_ex, mem_pointwise_ex], "transforms": [MemEfficient()]},
    "planned torchcompile": lambda: {"executors": [torch_compile_ex], "transforms": [MemEfficient()]},
    "chunked": lambda: {"executors": [], "transforms": [ChunkLossHead(chunks=4)]},
}


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def peaks_as_planned(prediction: Prediction) -> list[int]:
    """The peaks of the forward and the backward with scratch as a plan estimates it; a CPU's kernels may hold more."""
    peaks = {"forward": 0, "backward": 0}
    for event in prediction.timeline:
        if event.phase in peaks:
            peaks[event.phase] = max(peaks[event.phase], event.live_bytes + estimated_scratch_bytes(event.bsym))
    return list(peaks.values())


def trained(case: str) -> tuple[nn.Module, tuple[Any, ...], Callable[[Any], torch.Tensor] | None]:
    """A case as a model with parameters, the arguments of its call, and what makes a loss of its result."""
    program, args = CASES[case]()
    if not isinstance(program, nn.Module):
        return Trained(program, args), (), None
    return program, args, None if case == "gpt_loss" else lambda out: out.float().square().mean()
