"""measure_peak against sums that can be done in the head."""

import functools

import pytest
import thunder
import torch

from thunder_mem.prediction.simulate import simulate
from thunder_mem.runtime.measure import measure_curve, measure_peak

KIB = 1024


def add_chain(a, b, c, d):
    return ((a + b) + c) + d


CALLS = {
    "one allocation": (lambda: torch.empty(256), 1 * KIB),
    "the first dies before the third": (lambda: torch.ones(256).neg().neg(), 2 * KIB),
    "a view costs nothing": (lambda: torch.empty(256).view(16, 16).t()[2:5], 1 * KIB),
    "in place costs nothing": (lambda: torch.ones(256).neg_().sin_(), 1 * KIB),
    "what is returned stays": (lambda: [torch.empty(256) for _ in range(5)], 5 * KIB),
    "nothing": (lambda: 1, 0),
    "a number beside a tensor becomes a float64 and a float32": (lambda: torch.ones(256).add_(1.0), 1 * KIB + 8 + 4),
    "storage, not elements": (lambda: torch.empty(1).expand(4096), 4),
}


@pytest.mark.parametrize("fn, peak_bytes", CALLS.values(), ids=CALLS.keys())
def test_known_peaks(fn, peak_bytes):
    assert measure_peak(fn) == peak_bytes
    assert measure_peak(fn, device="cpu") == peak_bytes


def test_the_curve_ends_at_what_is_returned():
    curve = measure_curve(lambda x: x.neg().sin(), torch.ones(256))
    assert curve.deltas == (KIB, KIB, -KIB)
    assert curve.live_bytes == (KIB, 2 * KIB, KIB)
    assert (curve.peak_bytes, curve.end_bytes) == (2 * KIB, KIB)


def test_arguments_do_not_count_and_keywords_arrive():
    x = torch.ones(1024)
    assert measure_peak(torch.sum, x, kwargs={"dim": 0}) == 4
    assert measure_peak(torch.sum, torch.ones(2, 1024), kwargs={"dim": 1, "keepdim": True}) == 8


def test_backward_through_autograd_is_seen():
    weight = torch.ones(256, requires_grad=True)

    def step(x):
        (weight * x).sum().backward()

    # the product, the sum, its gradient 1.0 (4 B) and the weight's gradient, less the product when it dies
    assert measure_peak(step, torch.ones(256)) >= KIB + 4
    assert weight.grad is not None


def test_a_measurement_repeats_to_the_byte():
    tensors = [torch.ones(64, 64) for _ in range(4)]
    jitted = thunder.jit(add_chain, executors=[])
    jitted(*tensors)
    peaks = {measure_peak(jitted, *tensors) for _ in range(4)}
    assert peaks == {2 * 64 * 64 * 4}


def test_wrong_arguments():
    with pytest.raises(TypeError, match="Tensor is not callable"):
        measure_peak(torch.ones(1))
    with pytest.raises(ValueError, match="'cpu' and 'cuda', not on 'meta'"):
        measure_peak(torch.ones, 1, device="meta")


def test_tensors_that_are_not_there_cannot_be_measured():
    with simulate("T4"):
        x = torch.ones(4, device="cuda")
        linear = torch.nn.Linear(2, 2, device="cuda")
        for call in (lambda: x + 1, lambda: linear(x), lambda: 1):
            with pytest.raises(ValueError, match=r"use thunder_mem\.predict or predict_step"):
                measure_peak(call)
    for call in (lambda: x + 1, functools.partial(torch.sin, x), linear, linear.forward, functools.partial(linear)):
        with pytest.raises(ValueError, match="take no memory to measure"):
            measure_peak(call)
    with pytest.raises(ValueError, match="take no memory to measure"):
        measure_peak(torch.sin, x, device="cpu")
    assert measure_peak(lambda: torch.ones(256)) == KIB  # real again


def test_a_name_without_a_value_is_none_of_the_calls_tensors():
    def call():
        return torch.ones(256) if measured else late

    measured = True
    assert measure_peak(call) == KIB
    late = 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_found_or_the_call_is_refused():
    x = torch.ones(100, device="cuda")
    assert measure_peak(lambda: (x + 1) + 1) == 800  # it closes over a tensor there
    with pytest.raises(ValueError, match="say device='cuda' or device='cpu'"):
        measure_peak(lambda: torch.ones(100, device="cuda"))
    assert measure_peak(lambda: torch.ones(100, device="cuda"), device="cuda") == 400
    assert measure_peak(lambda: torch.ones(100, device="cuda"), device="cpu") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_cuda():
    with pytest.raises(ValueError, match="no CUDA device"):
        measure_peak(torch.ones, 1, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_requested_bytes():
    x = torch.ones(100, device="cuda")
    assert measure_peak(lambda t: (t + 1) + 1, x) == 800
