"""The modelled time of tiles, against bounds by arithmetic; no clock decides."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.loop_calls import row_of
from thunder_mem import ChunkLossHead, MemEfficient, Tiles, last_plan, predict, simulate
from thunder_mem.chunk_loop.price import device_seconds, host_calls, loop_seconds, rounding_seconds
from thunder_mem.chunk_loop.sum_price import product_sum_seconds
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, scratch_bytes
from thunder_mem.loop_sizes.chunk_narrowing import narrow_sums
from thunder_mem.loop_sizes.tile_price import extra_seconds, tile_seconds
from thunder_mem.memory.device_models import device_model

H100 = device_model("H100-80GB")
TOKENS, WIDTH, WIDE = 4096, 256, 1024


def mlp(x, up, down):
    return x + F.linear(F.relu(F.linear(x, up)), down)


def step(x, up, down):
    return checkpoint(mlp, x.sin(), up, down, use_reentrant=False).sum(dtype=torch.float32)


def inputs(tokens=TOKENS, width=WIDTH, wide=WIDE, dtype=torch.bfloat16):
    shapes = (tokens, width), (wide, width), (width, wide)
    return tuple(torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes)


def stretch(rows, accumulate=None, executors=(), dtype=torch.bfloat16):
    """The plan of the only stretch, in tiles of these rows."""
    tile = Tiles(rows=rows, accumulate=accumulate)
    with simulate("H100-80GB"):
        jitted = thunder.jit(step, executors=list(executors), transforms=[MemEfficient(strict=True, tile=tile)])
        jitted(*inputs(dtype=dtype))
        (plan,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    return plan


def test_more_rows_never_cost_more_and_the_products_bound_the_time():
    seconds = []
    for rows in (256, 512, 1024, 2048):
        plan = stretch(rows)
        seconds.append([device_seconds(plan, H100, backward=backward) for backward in (False, True)])
    assert all(a >= b for more, fewer in pairwise(seconds) for a, b in zip(more, fewer, strict=True))
    product_s = 2 * TOKENS * WIDTH * WIDE / H100.matmul_flops("bfloat16")
    for forward_s, backward_s in seconds:
        assert forward_s > 2 * product_s
        assert backward_s > 5 * product_s  # of six: the second product's result is not needed, so it is not repeated


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_small_chunks_of_a_head_read_and_write_their_sum_more_often(accumulate):
    """A product hides a float32 sum's traffic, 8 bytes a number, if it takes longer; nothing hides a finer sum's."""
    vocabulary, width = 65536, 4096
    with simulate("H100-80GB"):
        h, w = (
            torch.empty(n, width, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (8192, vocabulary)
        )
        targets = torch.zeros(8192, dtype=torch.long, device="cuda")
        chunk = ChunkLossHead(rows=512, accumulate=accumulate)
        jitted = thunder.jit(lambda h, w: F.cross_entropy(h @ w.t(), targets), transforms=[MemEfficient(chunk=chunk)])
        jitted(h, w)
        (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    numbers, rate = vocabulary * width, H100.matmul_flops("bfloat16")
    small, large = (device_seconds(replace(loop.plan, chunk_rows=n), H100, backward=True) for n in (512, 2048))
    if accumulate == "float32":  # 2,048 rows hide it
        product_s = 2 * 512 * numbers / rate
        moved_s = (8 * numbers + 512 * 2 * (vocabulary + width)) / H100.bandwidth_bytes_per_s
        assert small - large == pytest.approx(16 * (moved_s - product_s))
    else:
        assert small - large == pytest.approx((16 - 4) * 30 * numbers / H100.bandwidth_bytes_per_s)


def test_the_hosts_calls_come_on_top():
    plan = stretch(512)
    for backward in (False, True):
        calls = host_calls(plan, backward=backward)
        alone_s = device_seconds(plan, H100, backward=backward)
        assert calls >= 2 * plan.chunks
        assert loop_seconds(plan, H100, backward=backward) == pytest.approx(alone_s + calls * H100.launch_s)


def test_the_table_of_the_hosts_calls_has_stretches_too():
    plan = stretch(512)
    row = row_of("a stretch", plan)
    assert (row.rows, row.chunks, row.depth, row.width) == (TOKENS, TOKENS // 512, None, None)
    assert row.calls == host_calls(plan, backward=True) and row.wide_bytes == 512 * plan.wide_row_bytes
    assert row.host_share == row.calls * H100.launch_s / device_seconds(plan, H100, backward=True)


def test_sums_of_gradients_cost_their_bytes():
    """A sum in the input's dtype keeps one more byte a number, which many kernels take apart and join."""
    wide, finer = (stretch(512, accumulate) for accumulate in ("float32", "input"))
    assert wide.forward_tile_s == finer.forward_tile_s
    assert finer.backward_tile_s > wide.backward_tile_s
    single = stretch(512, dtype=torch.float32)
    weights_bytes = 2 * WIDTH * WIDE * 4
    assert single.backward_tile_s > 2 * weights_bytes / H100.bandwidth_bytes_per_s


def test_sums_are_rounded_once_at_the_end():
    """A float32 sum is read, 4 bytes a number, and a gradient of 2 bytes is written; the input's rows have no sum."""
    wide, single = stretch(512, "float32"), stretch(512, dtype=torch.float32)
    rounding_s = 2 * WIDTH * WIDE * (4 + 2) / H100.bandwidth_bytes_per_s
    assert rounding_seconds(wide, H100) == pytest.approx(rounding_s)
    tiles_s = TOKENS / 512 * wide.backward_tile_s
    assert device_seconds(wide, H100, backward=True) == pytest.approx(tiles_s + rounding_s)
    assert rounding_seconds(single, H100) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("amx", "accumulate", "number_bytes", "sum_s"),
    [(True, "float32", 0, 2e-4), (False, "float32", 0, 0), (True, "input", 64, 0), (False, "input", 64, 0)],
)
def test_what_sums_of_16_bit_products_take_on_a_cpu(monkeypatch, amx, accumulate, number_bytes, sum_s):
    """With AMX a tile's float32 sum has a fixed cost; elsewhere the product's own kernel adds to it, and it is free."""
    monkeypatch.setattr("thunder_mem.chunk_loop.sum_price.adds_to_float32", lambda device, dtype: amx)
    shapes = (2048, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    x, up, down = (torch.randn(*s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    tile = Tiles(rows=1024, accumulate=accumulate)
    jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=tile)])
    jitted(x, up, down)
    (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    cpu = device_model("cpu")
    _, sums_s = extra_seconds(loop.plan, loop.backward[1024], cpu)
    assert sums_s == pytest.approx(2 * WIDTH * WIDE * number_bytes / cpu.bandwidth_bytes_per_s + 2 * sum_s)


def test_the_product_of_a_single_chunk_is_no_sum(monkeypatch):
    monkeypatch.setattr("thunder_mem.chunk_loop.sum_price.adds_to_float32", lambda device, dtype: True)
    h, w = (torch.randn(*s, dtype=torch.bfloat16, requires_grad=True) for s in ((512, 256), (4096, 256)))
    targets, cpu = torch.zeros(512, dtype=torch.long), device_model("cpu")
    seconds = []
    for chunks in (1, 2):
        chunk = ChunkLossHead(chunks=chunks)
        jitted = thunder.jit(lambda h, w: F.cross_entropy(h @ w.t(), targets), executors=[], transforms=[chunk])
        jitted(h, w)
        (plan,) = chunk.record.loops
        seconds.append(product_sum_seconds(plan, plan.gemms[0].w, plan.chunk_rows, cpu))
    assert seconds[0] == 0 < seconds[1]


def test_narrowed_sums_cost_what_asked_ones_cost():
    with simulate("H100-80GB"):
        jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=Tiles(rows=512))])
        jitted(*inputs())
        narrow = narrow_sums(thunder.last_traces(jitted)[-1])
        (found,) = {loop_of(b).plan for b in narrow.bound_symbols if is_chunk_loop(b)}
    asked = stretch(512, "input")
    assert found.grad_dtypes == asked.grad_dtypes
    assert found.backward_tile_s == asked.backward_tile_s
    assert found.backward_block_calls == asked.backward_block_calls


def test_a_copy_of_rows_is_read_from_a_cache_that_holds_them():
    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(mlp, transforms=[MemEfficient(strict=True, tile=Tiles(rows=1024))])
        jitted(*inputs())
        (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    row_bytes = 1024 * WIDTH * 2
    times = [
        tile_seconds(loop.plan, loop.forward[1024], replace(H100, cache_bytes=cache))
        for cache in (2 * row_bytes, 2 * row_bytes - 1)
    ]
    assert times[1] - times[0] == pytest.approx(row_bytes / H100.bandwidth_bytes_per_s)


@pytest.mark.parametrize(("tokens", "width", "tiled"), [(32768, 4096, True), (8192, 512, False)])
def test_by_default_large_products_run_in_tiles_and_small_ones_whole(tokens, width, tiled):
    """A product of 2,048 rows with a small weight takes less time than its host's calls."""
    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(step, transforms=[MemEfficient(strict=True)])
        jitted(*inputs(tokens, width, 4 * width))
    assert any(d.what == "tiles" for d in last_plan(jitted).decisions) == tiled


def test_a_tile_on_a_cpu_has_a_time_too():
    x, up, down = (torch.randn(*s, requires_grad=True) for s in ((64, 8), (32, 8), (8, 32)))
    jitted = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=Tiles(rows=16))])
    jitted(x, up, down).backward()
    (plan,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    cpu = device_model("cpu")
    assert math.isclose(loop_seconds(plan, cpu, backward=False), 4 * plan.forward_tile_s)
    assert plan.backward_tile_s > plan.forward_tile_s > 2 * cpu.launch_s


def gated(x, gate, up, down):
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def gated_step(x, *weights):
    return checkpoint(gated, x.sin(), *weights, use_reentrant=False).sum(dtype=torch.float32)


@pytest.mark.slow
def test_a_gated_tile_writes_all_wide_gradients_over_wide_values():
    """Two products' results and a gradient are wide; two gradients and the last product's operand take their places."""
    with simulate("H100-80GB"):
        x, up, down = inputs()
        jitted = thunder.jit(gated_step, transforms=[MemEfficient(strict=True, tile=Tiles(rows=1024))])
        jitted(x, torch.empty_like(up, requires_grad=True), up, down)
        (plan,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    assert plan.backward_block_bytes <= 1024 * (3 * WIDE + 5 * WIDTH) * 2


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_a_prediction_holds_in_a_tile_what_the_plan_says(accumulate):
    """Narrowed sums are joined, added to and split beside the tile's gradients, which are not gone yet."""
    tile = Tiles(rows=1024, accumulate=accumulate)
    with simulate("H100-80GB"):
        x, up, down = inputs(width=1024, wide=4096)
        jitted = thunder.jit(gated_step, transforms=[MemEfficient(strict=True, tile=tile)])
        found = predict(jitted, x, torch.empty_like(up, requires_grad=True), up, down, keep_outputs=True)
    loops = [e for e in found.timeline if is_chunk_loop(e.bsym)]
    assert [e.scratch_bytes for e in loops] == [scratch_bytes(e.bsym) for e in loops]
    assert last_plan(jitted).candidate.peak_bytes == found.peak_bytes
