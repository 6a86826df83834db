"""Numbers of chunked losses: sums over chunks, roundings, and the memory that they take."""

from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, head, inputs, packed_bytes, relative
from thunder_mem import ChunkLossHead, MemEfficient, predict, simulate
from thunder_mem.chunk_loop.gradient_sums import Accumulator, finish, part_bounds, rounding_calls
from thunder_mem.chunk_loop.matmul import gemm, gemm_scratch_bytes, multiplies
from thunder_mem.chunk_loop.plan import ALIGNED_ROWS, Spec
from thunder_mem.chunk_loop.price import host_calls
from thunder_mem.chunk_loop.run import _new_sums
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.sharding.propagation import Sharding


def dw_error(chunks, accumulate="float32"):
    x, w, t = inputs(512, 16, 512, torch.bfloat16, scale=0.05)
    fn, _ = chunked(head, chunks=chunks, accumulate=accumulate)
    (dw,) = torch.autograd.grad(fn(x, w, t), [w])
    want = exact(head, x, w, t)[1][1]
    rounding = relative(want.to(torch.bfloat16), want)
    return relative(dw, want), rounding


COUNTS = [(2, 128), pytest.param((2, 4, 8, 16, 32, 64, 128), marks=pytest.mark.slow)]


HAS_UNITS = multiplies("cpu", torch.bfloat16)
UNITS = [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_UNITS, reason="this CPU has no bfloat16 units"))]


@pytest.mark.parametrize("counts", COUNTS, ids=["ends", "all"])
@pytest.mark.parametrize("units", UNITS, ids=["without units", "with units"])
@pytest.mark.slow
def test_error_of_dw_is_flat_in_the_chunk_count(units, counts, monkeypatch):
    """Products are added in float32, unrounded."""
    monkeypatch.setattr("thunder_mem.chunk_loop.matmul.multiplies", lambda device, dtype: units)
    one, rounding = dw_error(1)
    errors = [dw_error(chunks)[0] for chunks in counts]
    assert max(errors) < 1.03 * one, (one, errors)
    assert one < 1.5 * rounding
    assert max(dw_error(chunks, "input")[0] for chunks in counts) < 1.03 * one  # by a byte more, while chunks run


@pytest.mark.parametrize("chunks", [2, 3, 4, 8, 32])
def test_sums_of_bfloat16_products_err_as_little_as_one_product(chunks):
    n, d, v = 256, 32, 512
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(n, d, generator=generator).bfloat16(), torch.randn(v, d, generator=generator).bfloat16()
        targets = F.one_hot(torch.randint(v, (n,), generator=generator), v)
        dlogits = (((x @ w.t() / 8).float().softmax(-1) - targets) / n).bfloat16()
        want = dlogits.double().t() @ x.double()
        total = torch.zeros(v, d)
        for rows, xs in zip(dlogits.chunk(chunks), x.chunk(chunks), strict=True):
            gemm(total, rows.t(), xs, add=True, scratch_bytes=1 << 16)
        assert relative(total.bfloat16(), want) < 1.03 * relative(torch.mm(dlogits.t(), x), want), seed


def test_bfloat16_loss_is_summed_in_float32():
    x, w, t = inputs(2048, 16, 64, torch.bfloat16)
    fn, transform = chunked(head, chunks=128)
    loss = fn(x, w, t).item()
    assert transform.record.loops[0].chunks == 128
    assert abs(loss - exact(head, x, w, t)[0].item()) < 2**-8 * loss  # one rounding to bfloat16


def test_float16_with_a_grad_scaler_keeps_small_gradients():
    """Gradients without the loss scale underflow in float16, so they wait for it."""
    x, w, t = inputs(4096, 16, 64, torch.float16, scale=0.05)
    fn, transform = chunked(head, chunks=4)
    scale = 2.0**14
    dx, dw = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(scale, dtype=torch.float16))
    assert transform.record.loops[0].mode == "recompute-in-backward"
    assert "float16" in transform.record.loops[0].why
    _, (ex, ew) = exact(head, x, w, t)
    assert relative(dx.double() / scale, ex) < 1e-3
    assert relative(dw.double() / scale, ew) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype,accumulate", [(torch.float32, "input"), (torch.bfloat16, "input"), (torch.bfloat16, "float32")]
)
def test_peak_is_the_lower_bound_and_a_chunk(dtype, accumulate):
    n, d, v, chunks = 512, 16, 8192, 4
    x, w, t = inputs(n, d, v, dtype)
    fn, transform = chunked(head, chunks=chunks, accumulate=accumulate)

    def step():
        return torch.autograd.grad(fn(x, w, t), (x, w))

    step()
    s = dtype.itemsize
    wider = {(2, "float32"): 2, (2, "input"): 1}.get((s, accumulate), 0)
    bound = s * (n + v) * d + wider * v * d
    chunk = n // chunks * v * s
    assert transform.record.loops[0].logits_bytes == chunk
    assert measure_peak(step) <= bound + 1.15 * chunk + packed_bytes(n // chunks, d, v, dtype)
    assert measure_peak(step) < n * v * s


@pytest.mark.slow
@pytest.mark.parametrize("d,v", [(2304 // 8, 256000 // 8), (4096 // 8, 128256 // 8)], ids=["gemma2-2b", "llama3-8b"])
@pytest.mark.parametrize("accumulate", ["input", "float32"])
def test_peak_at_published_heads_an_eighth_as_large(d, v, accumulate):
    n, chunks = 8192 // 8, 8
    x, w, t = inputs(n, d, v, torch.bfloat16, scale=0.02)
    fn, _ = chunked(head, chunks=chunks, accumulate=accumulate)

    def step():
        return torch.autograd.grad(fn(x, w, t), (x, w))

    step()
    bound_bytes = 2 * (n + v) * d + (2 if accumulate == "float32" else 1) * v * d
    packed = packed_bytes(n // chunks, d, v, torch.bfloat16)
    assert measure_peak(step) <= bound_bytes + 1.1 * (n // chunks) * v * 2 + packed


@pytest.mark.parametrize(("rows", "depth", "scratch_kib"), [(512, 64, 768), (512, 256, 682), (192, 64, 256)])
def test_a_product_for_a_finer_sum_holds_no_more_than_is_planned(rows, depth, scratch_kib):
    spec = Spec("w", (8192, depth), torch.bfloat16, "cpu", Sharding((None, None)))
    dlogits, x = torch.randn(rows, 8192).bfloat16(), torch.randn(rows, depth).bfloat16()
    total = Accumulator(spec, torch.bfloat16, finer=True)
    total.add_product(dlogits.t(), x, scratch_kib << 10)
    peak_bytes = measure_peak(total.add_product, dlogits.t(), x, scratch_kib << 10)
    assert peak_bytes <= gemm_scratch_bytes("cpu", torch.bfloat16, {torch.float32}, rows, scratch_kib << 10)


def test_a_gpu_rounds_in_wide_stretches_of_aligned_rows():
    """Stretches of 64 KiB took 50 times the time of the products on an H200; cuBLAS is slow at odd addresses."""
    with simulate("H100-80GB"):
        x, w = (torch.zeros(n, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (4096, 32008))
        transform = ChunkLossHead(rows=1024, accumulate="input")
        predict(thunder.jit(head, transforms=[transform]), x, w, torch.zeros(4096, dtype=torch.long, device="cuda"))
    (plan,) = transform.record.loops
    (weight,) = (i for i in plan.grads if plan.finer(i))
    rows = plan.inputs[weight].finer_rows(plan.tiles_bytes(plan.backward_block_bytes))
    assert rows % ALIGNED_ROWS == 0 and rows > 1000
    assert rounding_calls(plan) < 50 and host_calls(plan, backward=True) < 2000
    for width in (50257, 128256, 256000):
        wide = Spec("w", (512, width), torch.bfloat16, "cuda:0", Sharding((None, None)))
        assert wide.finer_rows(32 << 20) % ALIGNED_ROWS == 0
    (_, half), (start, end) = part_bounds(plan.inputs[weight], torch.float32)
    assert half == start and start % ALIGNED_ROWS == 0 and end == 32008
    with simulate("H100-80GB"):
        assert _new_sums(plan)[weight].alone_bytes >= 32 << 20


@pytest.mark.parametrize("rows", [513, 520, 1001])
def test_a_longer_first_part_is_rounded_in_its_own_memory_too(rows):
    spec = Spec("w", (rows, 80), torch.bfloat16, "cuda:0", Sharding((None, None)))
    plan = SimpleNamespace(grads=(0,), grad_dtypes=(torch.float32,), inputs=(spec,))
    whole, scale = torch.randn(spec.shape), torch.tensor(0.3)
    bounds = part_bounds(spec, torch.float32)
    assert len(bounds) == 2 and bounds[0][1] % ALIGNED_ROWS == 0 and bounds[0][1] * 2 > rows
    (found,) = finish(plan, scale, [whole[lo:hi].clone() for lo, hi in bounds])
    assert torch.equal(found, (whole * scale).bfloat16())


def test_wide_stretches_round_like_narrow_ones():
    spec = Spec("w", (1000, 64), torch.bfloat16, "cpu", Sharding((None, None)))
    results = []
    for options in ({}, {"alone_bytes": 1 << 22}):
        total, grads = Accumulator(spec, torch.bfloat16, finer=True, **options), torch.Generator().manual_seed(0)
        for _ in range(3):
            total.add(torch.randn(spec.shape, generator=grads))
        with AllocationWatch() as watch:
            results += total.result()
    assert torch.equal(*results) and watch.launches < 10


def test_a_float32_sum_is_scaled_and_rounded_in_its_own_memory():
    """On a CPU, where the scaled sum would be a temporary; the result is as if it had been one."""
    spec = Spec("w", (4096, 64), torch.bfloat16, "cpu", Sharding((None, None)))
    plan = SimpleNamespace(grads=(0,), grad_dtypes=(torch.float32,), inputs=(spec,))
    whole, scale = torch.randn(spec.shape), torch.tensor(0.3)
    parts = [whole[lo:hi].clone() for lo, hi in part_bounds(spec, torch.float32)]
    results = []
    assert measure_peak(lambda: results.extend(finish(plan, scale, parts))) <= 1 << 13
    assert torch.equal(results[0], (whole * scale).bfloat16())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("multiplies", [True, False], ids=["with units", "without"])
def test_the_forward_of_a_head_that_recomputes_plans_for_its_own_blocks(multiplies, monkeypatch):
    """Its products take no tiles as large as the backward's blocks."""
    monkeypatch.setattr("thunder_mem.chunk_loop.matmul._bfloat16_units", lambda: multiplies)
    x, w = torch.randn(1024, 32).bfloat16().requires_grad_(), torch.randn(8192, 32).bfloat16().requires_grad_()
    t = torch.randint(0, 8192, (1024,))
    transform = ChunkLossHead()
    compiled = thunder.jit(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="none"), executors=[], transforms=[transform]
    )
    compiled(x, w, t)
    (plan,) = transform.record.loops
    assert plan.mode == "recompute-in-backward" and plan.sized != "asked"
    assert plan.forward_scratch_bytes < plan.backward_scratch_bytes
    returned_bytes = sum(spec.nbytes for spec in plan.outputs)
    assert measure_peak(compiled, x, w, t) <= plan.forward_scratch_bytes + returned_bytes + 4096


@pytest.mark.slow
def test_predictions_tell_loops_apart_that_look_alike():
    x, w = torch.randn(512, 64).bfloat16().requires_grad_(), torch.randn(1024, 64).bfloat16().requires_grad_()
    t = torch.randint(0, 1024, (512,))
    for accumulate in ("float32", "input"):
        transform = ChunkLossHead(chunks=4, accumulate=accumulate)
        compiled = thunder.jit(head, executors=[], transforms=[transform])

        def step(compiled=compiled):
            return torch.autograd.grad(compiled(x, w, t), (x, w))

        step()
        assert predict(compiled, x, w, t).measured_bytes == pytest.approx(measure_peak(step), abs=8192)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_writes_its_gradients_over_its_logits(dtype):
    """So it holds hardly more, and a chunk is one block."""
    x, w, t = inputs(1024, 64, 2048, dtype, scale=0.05)
    jitted = thunder.jit(head, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])
    found = torch.autograd.grad(jitted(x, w, t), (x, w))
    (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    assert loop.plan.block_rows == loop.plan.chunk_rows < 1024
    assert all(body.over == (0,) for body in loop.backward.values())
    assert loop.plan.backward_block_bytes < 0.01 * loop.plan.logits_bytes
    eager = torch.autograd.grad(head(x, w, t), (x, w))
    for own, theirs, want in zip(found, eager, exact(head, x, w, t)[1], strict=True):
        assert relative(own, want) <= 2 * relative(theirs, want) + torch.finfo(dtype).eps
