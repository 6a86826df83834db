"""Tiles of more rows, or of fewer stretches, where all of them take too long."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, Tiles, last_plan, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_sizes.tile_choice import TileChoice, _seconds, cheaper_choices, room_bytes, whole_off_peak
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.planning import executor
from thunder_mem.planning.tile_selection import lower_plan
from thunder_mem.trace.reading import read_trace
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


def loops_of(args, rows, accumulate=None):
    tile = Tiles(rows=rows, accumulate=accumulate)
    jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=tile)])
    jitted(*args)
    return stretches_of(thunder.last_traces(jitted)[-1])


def test_on_a_gpu_the_projections_of_all_layers_are_left_whole_first():
    with simulate("H100-80GB"):
        loops = loops_of(inputs("cuda", TOKENS, WIDTH), 2048)
        choices = list(cheaper_choices(loops, 0.01))
    assert len(loops) == 4
    assert {choice.more_rows for choice in choices} == {1}
    assert [choices[0].leaves_whole(loop.plan, "") for loop in loops] == [len(loop.plan.outputs) > 1 for loop in loops]
    assert not any(TileChoice().leaves_whole(loop.plan, "") for loop in loops)


def test_nothing_is_tried_that_saves_too_little():
    with simulate("H100-80GB"):
        loops = loops_of(inputs("cuda", TOKENS, WIDTH), 2048)
        most = [choice for choice in cheaper_choices(loops, 0.01) if choice.left_whole][-1]
        left = [sum(_seconds(loop)) for loop in loops if most.leaves_whole(loop.plan, "")]
        share = sum(left) / sum(sum(_seconds(loop)) for loop in loops)
        assert 0.1 < share < 0.9
        assert not list(cheaper_choices(loops, 1.01 * share))
        assert list(cheaper_choices(loops, 0.99 * share)) == [most]


def test_those_farthest_below_the_peak_stay_whole_until_enough_is_saved():
    with simulate("H100-80GB"):
        loops = loops_of(inputs("cuda", TOKENS, WIDTH), 2048)
        names = [loop.plan.name for loop in loops]
        wide = {loop.plan.name: loop.plan.n * loop.plan.wide_row_bytes for loop in loops}
        room = {name: wide[name] + far for name, far in zip(names, (5, 7, 6, -1), strict=True)}
        assert whole_off_peak(loops, room, 0.01) == {names[1]}
        seconds = [sum(_seconds(loop)) for loop in loops]
        assert whole_off_peak(loops, room, 0.99 * sum(seconds[1:3]) / sum(seconds)) == set(names[1:3])
        assert whole_off_peak(loops, room, 1.01 * sum(seconds[1:3]) / sum(seconds)) == set(names[:3])
        assert whole_off_peak(loops, room, 1.0) is None  # the last one has no room


def test_the_program_of_a_choice_off_the_peak_leaves_that_stretch_whole(monkeypatch):
    found = []

    def noted(tiled, whole, executors, options, others):
        first, *rest = others.loops
        room = {loop.plan.name: 10**12 for loop in rest} | {first.plan.name: 10**13}
        trace, decisions = next(others.cheaper(0.01, lambda: room))
        found.append(([loop.plan.op for loop in rest], stretches_of(trace), decisions))
        return lower_plan(tiled, whole, executors, options, others)

    monkeypatch.setattr(executor, "lower_plan", noted)
    with simulate("H100-80GB"):
        jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True)])
        jitted(*inputs("cuda", 16384, WIDTH))
    ((rest, in_tiles, decisions),) = found
    assert len(rest) == 3 and {loop.plan.op for loop in in_tiles} == set(rest)
    assert sum(d.what == "tiles" for d in decisions) == 3


def test_there_is_room_below_the_peak_or_a_higher_limit():
    with simulate("H100-80GB"):
        jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=Tiles(rows=2048))])
        jitted(*inputs("cuda", TOKENS, WIDTH))
        source = read_trace(thunder.last_traces(jitted)[-1])
        room, more = room_bytes(source), room_bytes(source, 10**12)
    peak_bytes = price_order(source.graph).peak_bytes
    assert len(room) == 4 and all(0 < nbytes < peak_bytes for nbytes in room.values())
    assert {name: more[name] - room[name] for name in room} == dict.fromkeys(room, 10**12 - peak_bytes)


def test_on_a_cpu_tiles_get_more_rows_first_if_sums_are_finer():
    loops = loops_of(inputs("cpu", 1024, 64), 128, "input")
    assert [choice.more_rows for choice in cheaper_choices(loops, 0.01)][:2] == [4, 16]


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
