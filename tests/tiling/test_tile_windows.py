"""Convolutions and pooling in tiles: values and gradients against float64 eager, peaks, and refusals."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tiling.test_tiles import assert_as_exact_as_eager, compiled, made, tiles_of, time_is_free  # noqa: F401
from thunder_mem import Tiles, last_plan, measure_peak, predict, tiled
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.tiling.tiles import TilingError

CHANNELS, WIDE = 4, 32


class Widened(nn.Module):
    """A convolution that widens, an activation between, and one that narrows again."""

    def __init__(self, conv=nn.Conv2d, between=torch.sin, **geometry):
        super().__init__()
        self.between = between
        self.wide, self.narrow = conv(CHANNELS, WIDE, **geometry), conv(WIDE, CHANNELS, 1)

    def forward(self, x):
        return self.narrow(self.between(self.wide(x))).square().mean()


GEOMETRIES = {
    "padding": {"kernel_size": 3, "padding": 1},
    "no padding": {"kernel_size": (3, 2)},
    "same": {"kernel_size": (4, 3), "padding": "same"},
    "stride": {"kernel_size": 2, "stride": (1, 2), "bias": False},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "groups": {"kernel_size": 3, "groups": 2},
    "depthwise": {"kernel_size": 3, "groups": CHANNELS, "bias": False},
    "single positions": {"kernel_size": 1},
    "single positions in groups": {"kernel_size": 1, "groups": 2},
    "single positions, padded": {"kernel_size": 1, "padding": 1},
    "single positions, strided": {"kernel_size": 1, "stride": (2, 1)},
    "rows apart, columns not": {"kernel_size": (1, 3), "padding": (0, 1)},
}


def rows_of(jitted):
    """The rows of the only stretch."""
    (plan,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    return plan.n


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_are_as_exact_as_eagers_whatever_the_window(name, rows):
    module, x = made(Widened(**GEOMETRIES[name]), (5, CHANNELS, 4, 5))
    assert_as_exact_as_eager(module, x, Tiles(rows=rows), 1, factor=4.0)  # up to 100 parts in float32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("conv, space", [(nn.Conv1d, (6,)), (nn.Conv3d, (3, 4, 3))])
@pytest.mark.parametrize("kernel_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_other_dims_and_16_bits(conv, space, kernel_size, dtype):
    module, x = made(Widened(conv, kernel_size=kernel_size), (5, CHANNELS, *space), dtype)
    assert_as_exact_as_eager(module, x, Tiles(rows=2), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("geometry", "between", "n"),
    [
        ({"kernel_size": 1}, torch.sin, 5 * 4 * 6),
        ({"kernel_size": (1, 3)}, torch.sin, 5 * 4),
        ({"kernel_size": 3}, torch.sin, 5),
        ({"kernel_size": 1}, nn.GroupNorm(4, WIDE), 5),
        ({"kernel_size": 1}, nn.Conv2d(WIDE, WIDE, 3, groups=WIDE), 5),
        ({"kernel_size": 1}, nn.LayerNorm([WIDE, 4, 6]), 5),
    ],
    ids=["positions", "rows of a picture", "samples", "norms of groups", "depthwise", "norms of samples"],
)
def test_rows_are_positions_where_all_stay_apart_and_samples_else(geometry, between, n):
    module, x = made(Widened(between=between, **geometry), (5, CHANNELS, 4, 6))
    assert_as_exact_as_eager(module, x, Tiles(rows=2), 1)
    jitted = compiled(module, Tiles(rows=2))
    jitted(x)
    assert rows_of(jitted) == n


POOLINGS = {
    "max": lambda y: F.max_pool2d(y, 2),
    "max of overlaps": lambda y: F.max_pool2d(y, 3, 2, 1),
    "mean": lambda y: F.avg_pool2d(y, 2, padding=1),
    "mean of all": lambda y: F.adaptive_avg_pool2d(y, 1),
    "twice as large": lambda y: F.interpolate(y, scale_factor=2.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_between(name):
    module, x = made(Widened(between=POOLINGS[name], kernel_size=3, padding=1), (5, CHANNELS, 4, 6))
    assert_as_exact_as_eager(module, x, Tiles(rows=2), 1)


def test_a_pooling_is_no_product():
    """Thunder writes it as a convolution, whose result would be wide."""
    jitted = compiled(lambda x: F.max_pool2d(x.sin(), 3).sum(), Tiles(rows=1))
    jitted(torch.randn(5, CHANNELS, 6, 6, requires_grad=True)).backward()
    assert not tiles_of(jitted)


@pytest.mark.parametrize("frozen", ["wide.weight", "wide.bias", "narrow.weight", "all"])
def test_frozen_parameters(frozen):
    module, x = made(Widened(kernel_size=3), (5, CHANNELS, 4, 5))
    for name, p in module.named_parameters():
        p.requires_grad_(frozen not in (name, "all"))
    assert_as_exact_as_eager(module, x, Tiles(rows=2), 1)


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_channels_last(kernel_size):
    module, x = made(Widened(kernel_size=kernel_size), (5, CHANNELS, 4, 5))
    module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert_as_exact_as_eager(module, x, Tiles(rows=3), 1)


class Inverted(nn.Module):
    """A residual block of a network for pictures: wide between two convolutions of single positions."""

    def __init__(self, width=16, norm=nn.GroupNorm):
        super().__init__()
        wide = 4 * width
        self.up, self.down = nn.Conv2d(width, wide, 1), nn.Conv2d(wide, width, 1)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.norm = norm(4, wide) if norm is nn.GroupNorm else norm(wide)

    def forward(self, x):
        return x + self.down(F.silu(self.norm(self.depthwise(self.up(x)))))


class Pictures(nn.Module):
    """Such blocks under checkpoints, and a loss."""

    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Inverted(**options) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.usefixtures("time_is_free")
@pytest.mark.slow
def test_by_default_checkpoints_run_by_samples_and_the_peak_falls_as_predicted():
    module, x = made(Pictures(), (24, 16, 16, 16))
    peaks = {}
    for tile in (False, True):
        jitted = compiled(module, tile)

        def step(jitted=jitted):
            jitted(x).backward()

        step()
        peaks[tile] = measure_peak(step)
        assert len(tiles_of(jitted)) == 2 * tile
        assert 0 <= peaks[tile] - predict(jitted, x).measured_bytes <= 8  # the loss and its gradient
    assert peaks[True] < 0.5 * peaks[False]
    assert "in 24 tiles of 1 row," in tiles_of(jitted)[0].how


def batch_normed(x, w):
    with tiled():
        return F.batch_norm(F.conv2d(x, w), None, None, training=True).relu().sum()


def shifted(x, w):
    with tiled():
        return F.conv2d(x, w).flip(0).sin().sum()


def over_tokens(x, w):
    with tiled():
        wide = F.linear(x, w[..., 0, 0])
        return F.conv1d(wide.transpose(1, 2), torch.ones(w.shape[0], 1, 3), groups=w.shape[0]).sin().sum()


@pytest.mark.parametrize(
    ("fn", "shape", "reason"),
    [
        (batch_normed, (5, CHANNELS, 4, 5), "batch_norm .*test_tile_windows.py:.*"),
        (shifted, (5, CHANNELS, 4, 5), "flip .*test_tile_windows.py:.*reverses the order of the rows"),
        (over_tokens, (5, 6, CHANNELS), "conv1d .*test_tile_windows.py:.*windows reach over neighbouring rows"),
    ],
)
def test_what_couples_rows_is_named_with_its_line(fn, shape, reason):
    x, w = torch.randn(shape).requires_grad_(), torch.randn(WIDE, CHANNELS, 1, 1).requires_grad_()
    with pytest.raises(TilingError, match=reason):
        compiled(fn, True)(x, w)


def test_one_picture_stays_whole_unless_its_positions_stay_apart():
    for kernel_size, count in ((1, 1), (3, 0)):
        module, x = made(Widened(kernel_size=kernel_size), (1, CHANNELS, 4, 5))
        jitted = compiled(module, Tiles(rows=2))
        jitted(x).backward()
        assert len(tiles_of(jitted)) == count
    assert "it has a single row" in str(last_plan(jitted).refused)
