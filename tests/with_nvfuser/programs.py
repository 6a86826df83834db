"""The programs whose plans nvFuser has to express: layers, losses, models, and what users ask of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from litgpt import GPT, Config
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.litgpt.models import CUSTOM, WithLoss, build_custom, known_models
from tests.with_nvfuser.definitions import Program
from thunder_mem import ChunkLossHead, StepInBackward, Tiles

__all__ = ["PROGRAMS"]

BF16 = torch.bfloat16


class Around(nn.Module):
    """A layer between a product and a residual."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(self.layer(x)) + x).float().pow(2)


def around(layer: Callable[[], Any], dtype: torch.dtype = BF16, **options: Any) -> Program:
    def make() -> tuple[Any, tuple[Any, ...]]:
        return Around(layer()).to(dtype), (torch.randn(32, 64, dtype=dtype, requires_grad=True),)

    return Program(make, **options)


def of(fn: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = BF16, **options: Any) -> Program:
    """A function of matrices."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        return fn, tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes or ((32, 64),))

    return Program(make, **options)


class Checkpointed(nn.Module):
    """Two layers, each in a checkpoint."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        layers = (nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), *layers) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed(dropout: float = 0.0, **options: Any) -> Program:
    return Program(lambda: (Checkpointed(dropout=dropout).to(BF16), (torch.randn(256, 64, dtype=BF16),)), **options)


class Head(nn.Module):
    """An embedding and a loss head, as large as chunking wants one."""

    def __init__(self, loss: Callable[..., torch.Tensor], tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(8192, 64), nn.Linear(64, 8192, bias=False), loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(F.silu(self.embedding(tokens))), targets)


def head(loss: Callable[..., torch.Tensor], tied: bool = False, **options: Any) -> Program:
    def make() -> tuple[Any, tuple[Any, ...]]:
        return Head(loss, tied).to(BF16), tuple(torch.randint(8192, (4096,)) for _ in range(2))

    return Program(make, **options)


def model(
    name: str,
    *,
    layers: int = 2,
    scale: float = 1 / 16,
    batch: int = 1,
    inside: bool = True,
    wrap: bool = False,
    **options: Any,
) -> Program:
    """One of the benchmark's models, or of litgpt's."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        with known_models(scale):
            config = Config.from_name(name, n_layer=layers)
        made = build_custom(name, config) if name in CUSTOM else GPT(config)
        if wrap:
            for i, block in enumerate(made.transformer.h):
                made.transformer.h[i] = InCheckpoint(block)
        tokens, targets = (torch.randint(100, (batch, config.block_size)) for _ in range(2))
        made = made.to(BF16)
        return (WithLoss(made), (tokens, targets)) if inside else (made, (tokens,))

    return Program(make, **options)


class InCheckpoint(nn.Module):
    """A layer in a checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False)


class GatedBlock(nn.Module):
    """What runs in tiles: a norm, a gated MLP wider than its input, a residual sum."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.norm(x)
        return x + self.down(F.silu(self.gate(wide)) * self.up(wide))


def tiled_blocks(in_checkpoint: bool = True, rows: int = 64, **options: Any) -> Program:
    def make() -> tuple[Any, tuple[Any, ...]]:
        blocks: list[nn.Module] = [GatedBlock() for _ in range(2)]
        made = nn.Sequential(*(map(InCheckpoint, blocks) if in_checkpoint else blocks))
        return made.to(BF16), (torch.randn(256, 64, dtype=BF16),)

    return Program(make, mem={"tile": Tiles(rows=rows)}, loops=4, **options)


def stepping(program: Program, **options: Any) -> Program:
    """The same program, whose backward updates its parameters."""
    return replace(program, step=partial(StepInBackward, **options))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", BF16):
            return F.softmax(self.layers(x), -1)


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y.add_(1).mul_(y.sigmoid())
    F.relu(y, inplace=True)
    y[:4] = 0
    return y @ w


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scores = (x @ w) @ x.t() / 8
    mask = torch.ones(32, 32, dtype=torch.bool, device=x.device).tril()
    return F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), 0.1) @ x


def written_by_views(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[1:3].mul_(2)
    y[:, ::2].add_(1)
    y.t()[0].zero_()
    return y


class Averaged(nn.Module):
    """Convolutions, norms with statistics, and a buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(4, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4))
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms(self.conv(x))
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1, 2)), alpha=0.1)
        return F.relu(y + self.mean)


def odd(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.gelu(x @ w), 0.1).softmax(-1).sin() * x[:, :1]


def fused_attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q, k = (t.view(1, 2, 128, 64) for t in (q.sin(), k.cos()))
    return F.scaled_dot_product_attention(q, k, q, is_causal=True) * 2


def rotary(x: torch.Tensor) -> torch.Tensor:
    a, b = x.view(8, 4, 64).transpose(0, 1).chunk(2, -1)
    return (torch.cat((-b, a), -1) * x.view(8, 4, 64).transpose(0, 1).cos()).sum(0)


def statistics(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    mean, std = y.mean(-1, keepdim=True), y.std(-1, keepdim=True)
    return ((y - mean) / std).amax(0) + y.var(0) + y.prod(0) + y.logsumexp(0)


def picks(x: torch.Tensor) -> torch.Tensor:
    best, at = x.sin().topk(4, -1)
    return best.cos().sum() + torch.gather(x, 1, at).exp().sum() + x[at[:, 0]].sum() + x.cumsum(-1).argsort(-1).sum()


def shapes(x: torch.Tensor) -> torch.Tensor:
    parts = torch.stack([p.exp() for p in x.split(16, -1)])
    return F.pad(parts.permute(1, 2, 0).reshape(32, -1), (1, 2))[:, 2:40:2].sum(-1)


def creations(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(64, device=x.device)
    return torch.where(at > 8, x, torch.zeros_like(x)) * torch.full((64,), 2.0, device=x.device) + at.float()


def draws(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x)
    return F.dropout(x * noise, 0.5) + F.dropout(x.sin(), 0.1) + torch.randn_like(x)


def a_scalar_of_the_host(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * torch.tensor(2.0, device="cpu") + 1


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w) * (x @ w.t()) + F.gelu(x, approximate="tanh")


def scattered(x: torch.Tensor) -> torch.Tensor:
    best = x.argmax(-1, keepdim=True)
    return torch.zeros_like(x).scatter(1, best, 1.0) * x + F.one_hot(best.squeeze(-1), 64)


def indexed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w[x.argmax(-1)].sin() + x[..., ::2].repeat(1, 2)


def activations(x: torch.Tensor) -> torch.Tensor:
    kinked = x.log().nan_to_num() * x.clamp(0, 1) + F.leaky_relu(x) + F.hardswish(x)
    return kinked + F.softplus(x) + F.elu(x) + F.mish(x)


def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    soft = -(x.log_softmax(-1) * y.softmax(-1)).sum(-1).mean()
    return F.mse_loss(x.sin(), y) + soft + (x - y).abs().mean()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, **options)


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, label_smoothing=0.1, ignore_index=3)


def each(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.log_softmax(-1), targets)


SMALLEST = {"mem": {"budget": 1, "on_infeasible": "warn"}}
OFFLOAD = {"mem": {"budget": 1, "on_infeasible": "warn", "offload": True}}
ALONE = {"executors": ["nvfuser"]}
DATAFLOW = {"jit": {"fusion_type": "dataflow"}}

PROGRAMS: dict[str, Program] = {
    "layer norm": around(lambda: nn.LayerNorm(64)),
    "RMS norm": around(lambda: nn.RMSNorm(64)),
    "batch norm": around(lambda: nn.BatchNorm1d(64), torch.float32),
    "group norm": around(lambda: nn.GroupNorm(4, 64)),
    "GELU": around(nn.GELU),
    "SiLU, float32": around(nn.SiLU, torch.float32),
    "softmax": around(lambda: nn.Softmax(-1)),
    "dropout": around(lambda: nn.Dropout(0.1)),
    "dropout, without gradients": around(lambda: nn.Dropout(0.1), train=False),
    "float16, dataflow": around(lambda: nn.LayerNorm(64), torch.float16, **DATAFLOW),
    "float64": around(nn.GELU, torch.float64),
    "autocast": Program(lambda: (Autocast(), (torch.randn(256, 64),))),
    "in place": of(in_place, (32, 64), (64, 64)),
    "attention by hand": of(attention, (32, 64), (64, 64)),
    "attention": of(fused_attention, (256, 64), (256, 64)),
    "rotary": of(rotary),
    "statistics": of(statistics, dtype=torch.float32),
    "picks": of(picks, dtype=torch.float32),
    "shapes": of(shapes),
    "creations": of(creations),
    "draws": of(draws),
    "a scalar of the host": of(a_scalar_of_the_host, dtype=torch.float32),
    "gated": of(gated, (32, 64), (64, 64)),
    "scattered": of(scattered, dtype=torch.float32),
    "indexed": of(indexed, (32, 64), (64, 64)),
    "activations": of(activations, dtype=torch.float32),
    "losses": of(losses, (32, 64), (32, 64)),
    "written by views": of(written_by_views),
    "convolutions and a buffer": Program(lambda: (Averaged(), (torch.randn(2, 4, 9, 9),))),
    "odd sizes": of(odd, (7, 13), (13, 13)),
    "odd sizes, smallest budget": of(odd, (33, 17), (17, 17), **SMALLEST),
    "no rows": of(odd, (0, 13), (13, 13)),
    "eight dimensions": of(lambda x: (x.sin() * x.transpose(0, 7)).sum((1, 3)), (2,) * 8, dtype=torch.float32),
    "checkpoints": checkpointed(),
    "checkpoints with dropout": checkpointed(0.1),
    "checkpoints, dataflow": checkpointed(**DATAFLOW),
    "smallest budget": checkpointed(0.1, **SMALLEST),
    "offload": checkpointed(**OFFLOAD),
    "all layers alike": checkpointed(mem={"recompute": "layerwise"}),
    "products in regions": checkpointed(jit={"nv_enable_linear": True, "nv_enable_matmul": True}),
    "attention in regions": of(fused_attention, (256, 64), (256, 64), jit={"nv_enable_sdpa": True, **ALONE}),
    "beside mem_pointwise": checkpointed(0.1, jit={"executors": ["nvfuser", "mem_pointwise"]}),
    "head": head(cross_entropy),
    "head, tied": head(cross_entropy, True),
    "head, whole": head(cross_entropy, mem={"chunk": False}),
    "head, whole, with nvFuser's loss": head(cross_entropy, mem={"chunk": False}, jit=ALONE),
    "head, chunked by 64": head(F.cross_entropy, mem={"chunk": ChunkLossHead(rows=64)}),
    "head, smoothed": head(smoothed),
    "head, each loss": head(each),
    "head, likelihoods": head(log_likelihood),
    "head, smallest budget": head(cross_entropy, **SMALLEST),
    "tiles": tiled_blocks(),
    "tiles outside of checkpoints": tiled_blocks(in_checkpoint=False),
    "tiles, the last one smaller": tiled_blocks(rows=96),
    "tiles, dataflow": tiled_blocks(**DATAFLOW),
    "step in the backward": stepping(checkpointed()),
    "step in the backward, clipped by value": stepping(checkpointed(), clip_value=1.0),
    "step in the backward, clipped by norm": stepping(checkpointed(), max_norm=1.0),
    "step in the backward, states on the host": stepping(checkpointed(), states="host"),
    "step in the backward, head, tied": stepping(head(cross_entropy, True)),
    "step in the backward, tiles": stepping(tiled_blocks()),
    "longchat, full size, tiles, stepping": stepping(model("longchat-7b-16k", scale=1, layers=1, wrap=True, loops=2)),
    "pythia-14m": model("pythia-14m", scale=1, layers=1),
    "Llama-3.2-1B": model("Llama-3.2-1B", scale=1 / 4, layers=1),
    "longchat": model("longchat-7b-16k", wrap=True),
    "longchat, full size, loss outside": model("longchat-7b-16k", scale=1, layers=1, inside=False),
    "vicuna": model("vicuna-33b-v1.3", layers=1, batch=4, wrap=True, **SMALLEST),
    "falcon": model("falcon-40b", layers=1, batch=4, **DATAFLOW),
    "Gemma": model("Gemma-7b", layers=1, inside=False),
    "pythia-12b": model("pythia-12b", layers=1, batch=4, **OFFLOAD),
    "Llama-3": model("Llama-3-8B", layers=1, train=False),
    "GPT-2": model("gpt2-124m", scale=1 / 4, layers=1),
    "BERT": model("bert-base-mlm", scale=1 / 4, layers=1),
}
"""By name; each is planned strictly and verified."""
