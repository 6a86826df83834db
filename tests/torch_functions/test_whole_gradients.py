"""Functions that stay whole: Thunder's gradients, of which only the read ones are made."""

from contextlib import nullcontext

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import BudgetError, MemEfficient, last_plan, measure_peak, predict, simulate

A = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
B = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
GRID = torch.rand(1, 5, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2 - 1

FUNCTIONS = {
    "two arguments": lambda x, y: torch.tensordot(x, y, dims=1),
    "an unread one": lambda x, y: torch.tensordot(x, B, dims=1) * y[0],
    "several results": lambda x, y: sum(torch.std_mean(x @ y, -1)),
    "a result without gradient": lambda x, y: torch.kthvalue(x @ y, 2, -1)[0],
    "a result that is not used": lambda x, y: torch.std_mean(x @ y, 1)[1],
    "a keyword": lambda x, y: F.grid_sample(x[None, None], GRID, align_corners=False).sum() * y,
    "a list of arguments": lambda x, y: torch.cartesian_prod(x[0], y[1]),
    "its own argument": lambda x, y: F.alpha_dropout(x, 0.5, training=False) @ y,
    "twice the same": lambda x, y: torch.hypot(x, x) @ torch.logaddexp(y, y),
    "values that no derivative needs": lambda x, y: (torch.fft.fft2(x).real + torch.fft.fftshift(x)) @ y.cos(),
    "of several arguments": lambda x, y: (
        torch.block_diag(x @ y, y) @ torch.fft.irfft(torch.fft.rfft(y.sum()[None].tile(16)))
    ),
    "of one of two results": lambda x, y: (
        torch.diag_embed(x * 2)[0] @ y + F.unfold((x @ y)[None, None], (2, 3))[0, :, :8].sum()
    ),
    "of a mode": lambda x, y: F.interpolate((x @ y)[None], 3, mode="area")[0] @ y[:3, :3],
    "integers": lambda x, y: x * torch.bucketize(x.detach(), B[0].sort()[0]) @ y,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_eagers(name):
    fn = FUNCTIONS[name]
    found = []
    for call in (fn, thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])):
        x, y = A.clone().requires_grad_(), B.clone().requires_grad_()
        out = call(x, y)
        found.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), [x, y])))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


def test_unread_gradients_are_not_made():
    jitted = thunder.jit(FUNCTIONS["an unread one"], executors=[], transforms=[MemEfficient(strict=True)])
    jitted(A.clone().requires_grad_(), B.clone().requires_grad_())
    (gradient,) = (b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if "vjp" in b.sym.name)
    assert gradient.sym.name == "lean_tensordot_vjp" and gradient.args[-2:] == ((True, False), ())


def test_values_that_no_derivative_needs_are_not_kept():
    jitted = thunder.jit(lambda x: torch.fft.fft2(x * 2).real.sin(), executors=[], transforms=[MemEfficient()])
    jitted(A.clone().requires_grad_())
    (gradient,) = (b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if "vjp" in b.sym.name)
    assert len(gradient.flat_proxy_args) == 1  # the tangent
    assert gradient.args[-1] == ((0, (6, 8), "float64"),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.rot90(x, 1, (0, 1)),
        lambda x: torch.logaddexp(x, x),
        lambda x: torch.fft.fftshift(x),
        lambda x: F.unfold(x[None, None], 3, padding=1),
        lambda x: F.interpolate(x[None], scale_factor=3, mode="linear", align_corners=True),
    ],
)
def test_peaks_are_eagers(function):
    def loss(x):
        return function(x * 2).square().sum()

    x = torch.randn(128, 128, requires_grad=True)
    jitted = thunder.jit(loss, executors=[], transforms=[MemEfficient(strict=True)])
    found = predict(jitted, x, keep_outputs=True).measured_bytes
    assert 0 <= measure_peak(lambda: jitted(x).backward()) - found <= 8  # the loss
    x.grad = None
    assert found <= measure_peak(lambda: loss(x).backward()) + 64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_budget_counts_what_a_gradient_holds_inside(device):
    """`cdist` of 128 rows holds a matrix of all distances more while it is differentiated."""

    def fn(x, w):
        z = x @ w.t()
        return torch.cdist(z, z).mean()

    with simulate("H100-80GB") if device == "cuda" else nullcontext(), torch.device(device):
        x, w = torch.randn(128, 32), torch.randn(16, 32, requires_grad=True)
        jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient()])
        predicted = predict(jitted, x, w).peak_bytes
        assert abs(last_plan(jitted).candidate.peak_bytes - predicted) <= 1024
        with pytest.raises(BudgetError):
            predict(thunder.jit(fn, executors=[], transforms=[MemEfficient(budget=110_000)]), x, w)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gradient_leaves_no_complex_numbers(device):
    """PyTorch's gradient of a real FFT is every other number of a complex tensor, which a plan would not count."""
    with simulate("H100-80GB") if device == "cuda" else nullcontext(), torch.device(device):
        x = torch.randn(64, 256, requires_grad=True)
        jitted = thunder.jit(lambda x: torch.fft.rfft(x.sin()).abs().square().mean(), transforms=[MemEfficient()])
        predicted = predict(jitted, x)
        assert abs(last_plan(jitted).candidate.peak_bytes - predicted.peak_bytes) <= 1024
        during = [e.name for e in predicted.timeline].index("lean_rfft_vjp")
        before, after = (e.live_bytes for e in predicted.timeline[during - 1 : during + 1])
        assert after <= before + x.nbytes
