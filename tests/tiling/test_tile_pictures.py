"""Random programs over pictures in forced tiles: values and gradients against float64 eager."""

from random import Random

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.tiling.test_tile_programs import run
from thunder_mem import MemEfficient, Tiles, last_plan

CHANNELS = (4, 16)
KERNELS = (1, 1, 3, (1, 3), (2, 1))


def by_channels(a, w):
    """A product over channels, which lie last meanwhile."""
    return F.linear(a.permute(0, 2, 3, 1), w[:, :, 0, 0]).permute(0, 3, 1, 2)


SAME_SHAPE = (
    torch.sin,
    F.silu,
    lambda a: a * torch.sigmoid(a.mean((2, 3), keepdim=True)),
    lambda a: F.group_norm(a, 2),
    lambda a: F.layer_norm(a.permute(0, 2, 3, 1), a.shape[1:2]).permute(0, 3, 1, 2),
    lambda a: torch.softmax(a.flatten(2), -1).view(a.shape),
    lambda a: F.batch_norm(a, torch.zeros(a.shape[1]).to(a), torch.ones(a.shape[1]).to(a) + 1),
    lambda a: F.max_pool2d(a, 3, 1, 1),
    lambda a: F.avg_pool2d(a, 3, 1, 1),
    lambda a: a.transpose(2, 3).contiguous().transpose(2, 3),
)
COUPLED = (lambda a: a - a.mean(0, keepdim=True), lambda a: F.batch_norm(a, None, None, training=True))


def drawn_program(seed):
    """A function of pictures and weights, with shapes of both; all of it follows from the seed."""
    rng = Random(seed)
    size, channels, steps, weights = (rng.randint(4, 6), rng.randint(4, 6)), [CHANNELS[0]], [], []
    for _ in range(rng.randint(4, 10)):
        a = rng.randrange(max(0, len(channels) - 3), len(channels))
        kind = rng.choices(["conv", "linear", "same", "sum", "coupled"], [5, 1, 4, 2, 0.3])[0]
        if kind in ("conv", "linear"):
            out, kernel = rng.choice(CHANNELS), rng.choice(KERNELS) if kind == "conv" else 1
            groups = rng.choice((1, 1, 2, 4)) if kind == "conv" else 1
            kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
            weights.append((out, channels[a] // groups, *kernel))
            conv = by_channels if kind == "linear" else lambda x, w, g=groups: F.conv2d(x, w, padding="same", groups=g)
            steps.append((conv, (a,), len(weights) - 1))
            channels.append(out)
            continue
        same = [i for i, c in enumerate(channels) if c == channels[a]]
        given = (a, rng.choice(same)) if kind == "sum" else (a,)
        fn = torch.add if kind == "sum" else rng.choice(SAME_SHAPE if kind == "same" else COUPLED)
        steps.append((fn, given, None))
        channels.append(channels[a])
    read = sorted({len(channels) - 1, *(i for i in range(1, len(channels)) if rng.random() < 0.15)})
    inner = rng.choice((True, False))

    def body(x, *given):
        values = [x]
        for fn, operands, weight in steps:
            found = [values[i] for i in operands]
            values.append(fn(*found) if weight is None else fn(*found, given[weight]))
        return tuple(values[i] for i in read)

    def program(x, *given):
        found = checkpoint(body, x, *given, use_reentrant=False) if inner else body(x, *given)
        return sum(value.square().mean() for value in found)

    return program, (rng.choice((2, 5)), CHANNELS[0], *size), weights, rng.choice((1, 7, 30, 64, 200))


def drawn(seed):
    program, shape, shapes, rows = drawn_program(seed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    weights = [torch.randn(s, generator=g) / (s[1] * s[2] * s[3]) ** 0.5 for s in shapes]
    transform = MemEfficient(tile=Tiles(rows=rows), strict=True, verify=True)
    return program, thunder.jit(program, executors=[], transforms=[transform]), x, weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 100))])
def test_random_programs(seed):
    program, jitted, x, weights = drawn(seed)
    exact = run(program, x, weights, torch.float64)
    eager = run(program, x, weights, torch.float32)
    scale = max(e.norm().item() for e in exact)
    for ours, theirs, right in zip(run(jitted, x, weights, torch.float32), eager, exact, strict=True):
        error, allowed = ((result.double() - right).norm().item() for result in (ours, theirs))
        assert error <= 4 * allowed + 1e-6 * scale


@pytest.mark.slow
def test_most_of_them_have_tiles():
    """The programs above would prove nothing without any."""
    tiled = 0
    for seed in range(8):
        _, jitted, x, weights = drawn(seed)
        run(jitted, x, weights, torch.float32)
        tiled += any(d.what == "tiles" for d in last_plan(jitted).decisions)
    assert tiled >= 3
