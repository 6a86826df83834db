"""Numbers of chunked losses: sums over chunks, roundings, and the memory that they take."""

import math

import pytest
import torch
from chunk_tools import chunked, exact, head, inputs, relative

from thunder_mem.chunk_gemm import multiplies
from thunder_mem.measure import measure_peak


def dw_error(chunks, accumulate="float32"):
    x, w, t = inputs(512, 16, 512, torch.bfloat16, scale=0.05)
    fn, _ = chunked(head, chunks=chunks, accumulate=accumulate)
    (dw,) = torch.autograd.grad(fn(x, w, t), [w])
    want = exact(head, x, w, t)[1][1]
    rounding = relative(want.to(torch.bfloat16), want)
    return relative(dw, want), rounding


COUNTS = [(2, 128), pytest.param((2, 4, 8, 16, 32, 64, 128), marks=pytest.mark.slow)]


@pytest.mark.parametrize("counts", COUNTS, ids=["ends", "all"])
def test_error_of_dw_is_flat_in_the_chunk_count(counts, monkeypatch):
    """As on a GPU, or on a CPU without bfloat16 units: products are added in float32, unrounded."""
    monkeypatch.setattr("thunder_mem.chunk_gemm.multiplies", lambda device, dtype: False)
    one, rounding = dw_error(1)
    errors = [dw_error(chunks)[0] for chunks in counts]
    assert max(errors) < 1.03 * one, (one, errors)
    assert one < 1.5 * rounding
    assert max(dw_error(chunks, "input")[0] for chunks in counts) < 1.03 * one  # by a byte more, while chunks run


@pytest.mark.skipif(not multiplies("cpu", torch.bfloat16), reason="this CPU has no bfloat16 units")
@pytest.mark.parametrize("counts", COUNTS, ids=["ends", "all"])
def test_bfloat16_units_round_once_more_however_many_chunks(counts):
    """They give products in bfloat16 only, and rounding each chunk's is, over all of them, one rounding of dW."""
    one, rounding = dw_error(1)
    errors = [dw_error(chunks)[0] for chunks in counts]
    assert max(errors) < 1.03 * math.hypot(one, rounding), (one, rounding, errors)


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
    assert measure_peak(step) <= bound + 1.15 * chunk
    assert measure_peak(step) < n * v * s


@pytest.mark.slow
@pytest.mark.parametrize("d,v", [(2304, 256000 // 8), (4096, 128256 // 8)], ids=["gemma2-2b", "llama3-8b"])
@pytest.mark.parametrize("accumulate", ["input", "float32"])
def test_peak_at_published_heads_an_eighth_as_large(d, v, accumulate):
    n, chunks = 8192 // 8, 8
    x, w, t = inputs(n, d, v, torch.bfloat16, scale=0.02)
    fn, _ = chunked(head, chunks=chunks, accumulate=accumulate)

    def step():
        return torch.autograd.grad(fn(x, w, t), (x, w))

    step()
    bound_bytes = 2 * (n + v) * d + (2 if accumulate == "float32" else 1) * v * d
    assert measure_peak(step) <= bound_bytes + 1.1 * (n // chunks) * v * 2
