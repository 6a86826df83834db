"""Models compiled without a fusion executor, beside eager PyTorch: ``python -m benchmarks.without_fusion``.

Small vision, diffusion and language models of random weights, forward and backward, their loss inside, on one
thread of a CPU. Eager PyTorch saves for the backward what its own kernels need, which is less than what Thunder's
decompositions keep. Peaks are measured twice: with gradients that do not exist before the step, as after
``zero_grad()``, and with gradients that do, to which autograd adds. Writes
``benchmarks/results/without_fusion.json``; names of programs as arguments measure those alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import thunder
import torch
from rich.console import Console
from thunder.dynamo import ThunderCompiler
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Program
from thunder_mem import MemEfficient, measure_peak

RESULTS = Path(__file__).parent / "results"
STEPS = 15


class PatchEmbedding(nn.Module):
    """Images (B, C, H, W) as tokens (B, T, D)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2)


class DiTBlock(nn.Module):
    """A block with adaLN-Zero (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attend(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=2)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Predicts the noise in latents (B, 4, H, W); returns the mean squared error."""

    def __init__(self, *, size: int = 16, width: int = 128, depth: int = 4, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.embed = PatchEmbedding(4, width, patch)
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch * 4)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        frequencies = torch.exp(-9.2 * torch.arange(32, device=times.device) / 32)
        angles = times[:, None] * frequencies
        c = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.label(labels)
        x = self.embed(latents) + self.position
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=2)
        return F.mse_loss(self.head(self.norm(x) * (1 + scale) + shift), noise)


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A narrow ResNet-18 of images (B, 3, H, W); returns the mean cross entropy."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 100) -> None:
        super().__init__()
        first = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        pairs = zip((first, *widths[:-1]), widths, strict=True)
        blocks = [
            block
            for i, (inner, outer) in enumerate(pairs)
            for block in (Residual(inner, outer, 1 if i == 0 else 2), Residual(outer, outer, 1))
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), targets)


class UNetBlock(nn.Module):
    """Two convolutions with group norm and SiLU, and the time between them (Ho et al., DDPM, 2020)."""

    def __init__(self, inner: int, outer: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time_width, outer)
        self.norm2, self.conv2 = nn.GroupNorm(8, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class ImageAttention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv, self.project = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, h, w)
        return x + self.project(y)


class UNet(nn.Module):
    """Predicts the noise in images (B, 3, H, W); returns the mean squared error."""

    def __init__(self, width: int = 16, time_width: int = 64) -> None:
        super().__init__()
        a, b, c = width, 2 * width, 4 * width
        self.time = nn.Sequential(nn.Linear(1, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.enter = nn.Conv2d(3, a, 3, padding=1)
        self.down1, self.shrink1 = UNetBlock(a, a, time_width), nn.Conv2d(a, b, 3, stride=2, padding=1)
        self.down2, self.shrink2 = UNetBlock(b, b, time_width), nn.Conv2d(b, c, 3, stride=2, padding=1)
        self.middle1, self.attention, self.middle2 = (
            UNetBlock(c, c, time_width),
            ImageAttention(c),
            UNetBlock(c, c, time_width),
        )
        self.grow2, self.up2 = nn.Conv2d(c, b, 3, padding=1), UNetBlock(2 * b, b, time_width)
        self.grow1, self.up1 = nn.Conv2d(b, a, 3, padding=1), UNetBlock(2 * a, a, time_width)
        self.norm, self.leave = nn.GroupNorm(8, a), nn.Conv2d(a, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        time = self.time(times[:, None])
        x1 = self.down1(self.enter(images), time)
        x2 = self.down2(self.shrink1(x1), time)
        y = self.middle2(self.attention(self.middle1(self.shrink2(x2), time)), time)
        y = self.up2(torch.cat([self.grow2(F.interpolate(y, scale_factor=2.0, mode="nearest")), x2], dim=1), time)
        y = self.up1(torch.cat([self.grow1(F.interpolate(y, scale_factor=2.0, mode="nearest")), x1], dim=1), time)
        return F.mse_loss(self.leave(F.silu(self.norm(y))), noise)


class LossOf(nn.Module):
    """A Hugging Face model that returns its loss alone."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs, **self.kwargs).loss


class Called(nn.Module):
    """`model` called with its arguments by keyword."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, args, strict=True)))


def vit() -> Program:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        image_size=64,
        patch_size=8,
        num_labels=10,
        problem_type="single_label_classification",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = Called(LossOf(ViTForImageClassification(config)), ("pixel_values", "labels"))
    return Program("ViT", model, (torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))), trains=True)


def dit() -> Program:
    args = torch.randn(4, 4, 16, 16), torch.rand(4), torch.randint(0, 10, (4,)), torch.randn(4, 64, 16)
    return Program("DiT", DiT(), args, trains=True)


def resnet() -> Program:
    return Program("ResNet", ResNet(), (torch.randn(8, 3, 96, 96), torch.randint(0, 100, (8,))), trains=True)


def unet() -> Program:
    args = torch.randn(4, 3, 32, 32), torch.rand(4), torch.randn(4, 3, 32, 32)
    return Program("U-Net", UNet(), args, trains=True)


def clip() -> Program:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 500, "max_position_embeddings": 32, "eos_token_id": 499},
        vision_config={**sizes, "image_size": 48, "patch_size": 8},
        projection_dim=64,
    )
    tokens = torch.randint(0, 499, (8, 32))
    tokens[:, -1] = 499
    model = Called(LossOf(CLIPModel(config), return_loss=True), ("input_ids", "pixel_values"))
    return Program("CLIP", model, (tokens, torch.randn(8, 3, 48, 48)), trains=True)


def mixtral() -> Program:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    tokens = torch.randint(0, 1000, (4, 128))
    # Given, as ThunderFX takes no `vmap`, by which transformers makes it.
    mask = torch.full((128, 128), -float("inf")).triu(1).expand(4, 1, 128, 128)
    model = Called(LossOf(MixtralForCausalLM(config)), ("input_ids", "labels", "attention_mask"))
    return Program("Mixtral, ThunderFX", model, (tokens, tokens, mask), trains=True)


def readme() -> Program:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return Program("README", model, (torch.randn(32, 64),), trains=True)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "readme": readme,
    "vit": vit,
    "dit": dit,
    "resnet": resnet,
    "unet": unet,
    "clip": clip,
    "mixtral": mixtral,
}
THROUGH_FX = {"mixtral"}


def compiled(name: str, fn: nn.Module, peer: str) -> Callable[..., Any]:
    """`fn` by a peer: "eager", "thunder", or "MemEfficient"."""
    if peer == "eager":
        return fn
    transforms = [MemEfficient(strict=True)] if peer == "MemEfficient" else []
    if name in THROUGH_FX:
        return torch.compile(fn, backend=ThunderCompiler(executors=[], transforms=transforms))
    return thunder.jit(fn, executors=[], transforms=transforms)


PEERS = ("eager", "thunder", "MemEfficient")


def step(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    call(*args).sum().backward()


def measure(name: str) -> dict[str, Any]:
    """Peaks in bytes above the start, and milliseconds of a step, of all peers."""
    peaks: dict[str, dict[str, int]] = {"new_gradients": {}, "gradients_kept": {}}
    calls, programs = {}, {}
    for peer in PEERS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        programs[peer] = program = PROGRAMS[name]()
        program.fn.train()
        calls[peer] = call = compiled(name, program.fn, peer)
        run = partial(step, call, program.args)
        for _ in range(2):
            run()
        peaks["gradients_kept"][peer] = measure_peak(run)
        for p in program.fn.parameters():
            p.grad = None
        peaks["new_gradients"][peer] = measure_peak(run)
    times: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(STEPS):
        for peer in PEERS:
            start = time.perf_counter()
            step(calls[peer], programs[peer].args)
            times[peer].append((time.perf_counter() - start) * 1e3)
    return {
        "program": programs["eager"].name,
        "parameter_bytes": sum(p.nbytes for p in programs["eager"].fn.parameters()),
        "peak_bytes": peaks,
        "median_ms": {peer: round(statistics.median(t), 2) for peer, t in times.items()},
    }


def main(*names: str) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in names or PROGRAMS:
        rows.append(measure(name))
        Console().print(rows[-1])
    if not names:
        record = {"command": "python -m benchmarks.without_fusion", "torch": torch.__version__, "rows": rows}
        (RESULTS / "without_fusion.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
