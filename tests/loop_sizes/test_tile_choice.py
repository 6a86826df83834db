"""Tiles of more rows, or of fewer stretches, where all of them take too long."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, Tiles, last_plan, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_sizes.tile_choice import TileChoice, cheaper_choices
from thunder_mem.transforms.other_tiles import stretches_of

TOKENS, WIDTH = 8192, 1024


def mlp(x, up, down):
    return x + F.linear(F.relu(F.linear(x, up)), down)


def projections(x, qkv):
    """Three results of full width: much to copy for few bytes between."""
    q, k, v = F.linear(x, qkv).split(x.shape[-1], dim=-1)
    return q.cos().cumsum(0) + k.sin().cumsum(0) * v.cumsum(0)


def step(x, layers):
    for qkv, up, down in layers:
        x = checkpoint(projections, x, qkv, use_reentrant=False)
        x = checkpoint(mlp, x, up, down, use_reentrant=False)
    return x.sum(dtype=torch.float32)


def inputs(device, tokens, width, layers=2):
    def made(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    sizes = ((3 * width, width), (4 * width, width), (width, 4 * width))
    return made(tokens, width), [tuple(made(*s) for s in sizes) for _ in range(layers)]


def loops_of(args, rows):
    jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=Tiles(rows=rows))])
    jitted(*args)
    return stretches_of(thunder.last_traces(jitted)[-1])


def test_on_a_gpu_the_projections_of_all_layers_are_left_whole_first():
    with simulate("H100-80GB"):
        loops = loops_of(inputs("cuda", TOKENS, WIDTH), 2048)
        choices = list(cheaper_choices(loops, 1e-9))
    assert len(loops) == 4
    assert {choice.more_rows for choice in choices} == {1}
    assert [choices[0].leaves_whole(loop.plan) for loop in loops] == [len(loop.plan.outputs) > 1 for loop in loops]
    assert not any(TileChoice().leaves_whole(loop.plan) for loop in loops)


def test_nothing_is_tried_that_saves_too_little():
    with simulate("H100-80GB"):
        assert not list(cheaper_choices(loops_of(inputs("cuda", TOKENS, WIDTH), 2048), 1.0))


def test_on_a_cpu_tiles_get_more_rows_first(monkeypatch):
    monkeypatch.setattr("thunder_mem.chunk_loop.sum_price.multiplies", lambda device, dtype: True)
    loops = loops_of(inputs("cpu", 1024, 64), 128)
    assert [choice.more_rows for choice in cheaper_choices(loops, 1e-9)][:2] == [4, 16]


@pytest.mark.slow
def test_by_default_only_mlps_run_in_tiles_where_projections_take_too_long():
    """All four stretches in tiles would take 2 % more time; without the projections they take less than the whole."""
    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(step, transforms=[MemEfficient(strict=True)])
        jitted(*inputs("cuda", 16384, 2048))
    tiles = [d for d in last_plan(jitted).decisions if d.what == "tiles"]
    assert len(tiles) == 2 and all("1 more product" in d.how for d in tiles)
    loops = [loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)]
    assert {len(plan.outputs) for plan in loops} == {1}
