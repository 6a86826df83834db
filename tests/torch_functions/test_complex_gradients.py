"""Gradients of complex numbers are PyTorch's, with the conjugates that Thunder lacks."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.checking.gradients import with_gradients
from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, measure_peak
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.prediction.predict import predict


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


Z, W, X = drawn(4, 3, dtype=torch.complex128), drawn(3, 3, seed=1, dtype=torch.complex128), drawn(4, 6, seed=2)

ANALYTIC = {
    "products": lambda z, w: z * z.flip(0) * (1 + 2j) + z * X[:, :3] + z[0] * 3,
    "quotients": lambda z, w: z / z.flip(1) + 1 / z + z.reciprocal() + 2j / z,
    "powers": lambda z, w: z**2 + z.square() + z**-1.5 + z.sqrt() + z.rsqrt() + z ** z.flip(0),
    "exponentials": lambda z, w: z.exp() * (z * 1j).exp() + torch.exp2(z / 9) + z.expm1(),
    "logarithms": lambda z, w: z.log() * z.log2() + z.log10() * z.log1p(),
    "circles": lambda z, w: z.sin() * z.cos() + z.tan() + z.asin() + z.acos() + z.atan(),
    "hyperbolas": lambda z, w: z.sinh() * z.cosh() + z.tanh() + z.asinh() + z.acosh() + z.atanh() + z.sigmoid(),
    "matrices": lambda z, w: z @ w + torch.mm(z, w) + F.linear(z, w) + torch.einsum("ij,jk->ik", z, w),
    "a bias": lambda z, w: torch.addmm(z, z, w, alpha=2 - 1j, beta=3j) + torch.addcmul(z, z, z.flip(0)),
    "vectors": lambda z, w: torch.dot(z[0], w[1]) + torch.vdot(z[1], w[2]) + torch.outer(z[:, 0], w[0]) * w[0, 0],
    "a matrix and a vector": lambda z, w: torch.mv(z, w[0]),
    "batches": lambda z, w: torch.bmm(z[None], w[None])[0] + torch.baddbmm(z[None], z[None], w[None])[0],
    "rows": lambda z, w: z.prod(0) + z.cumsum(0) + z.mean(1, keepdim=True) + z[1:3].sum(0),
    "writes": lambda z, w: (z * 1).mul_(z.flip(0)).add_(z, alpha=1j),
    "a choice": lambda z, w: torch.where(X[:, :3] > 0, z * z, torch.cat([z[2:], z[:2]]) * z),
}  # fmt: skip
TO_REAL = {
    "parts": lambda z, w: z.real * z.imag + (z * w[0]).imag + torch.view_as_real(z * z).sum(-1),
    "lengths": lambda z, w: (
        z.abs() * z.angle() + torch.linalg.vector_norm(z, dim=1, keepdim=True) + (z * z.conj()).real
    ),
    "directions": lambda z, w: (z.sgn() * w[0]).real,
}
FROM_REAL = {
    "a cast": lambda x: torch.view_as_real(x.to(torch.complex128) * x.exp() * (1 + 1j)).sum(-1),
    "a turn": lambda x: torch.exp(1j * x).real * x,
    "parts": lambda x: (torch.complex(x, x.cos()) * torch.polar(x.square() + 1, x)).imag,
    "a convolution by Fourier": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.flip(0).sin())),
    "a product in between": lambda x: torch.fft.fft2(x).mul(torch.fft.fft2(x.exp())).abs(),
    "a rotary embedding": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(4, 3, 2)) * torch.polar(torch.ones_like(X[:, :3]), X[:, 3:])
    ),
    "a permuted one": lambda x: torch.view_as_real(
        (torch.view_as_complex(x.reshape(4, 3, 2)) * Z).conj().transpose(0, 1).resolve_conj()
    ).permute(2, 0, 1),
    "a checkpoint": lambda x: checkpoint(lambda x: (torch.fft.rfft(x) * Z[:, :1]).exp().abs(), x, use_reentrant=False),
}


def assert_eagers(fn, executors, *inputs):
    compiled = thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        found = with_gradients(compiled, *inputs)
    torch.testing.assert_close(found, with_gradients(fn, *inputs), rtol=1e-10, atol=1e-10)


def as_real(fn):
    return lambda z, w: torch.view_as_real(fn(z, w)) if fn(z, w).is_complex() else fn(z, w)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", ANALYTIC)
def test_analytic_functions(name, executors):
    fn = ANALYTIC[name]
    assert_eagers(lambda z, w: torch.view_as_real(fn(z, w) + 0 * w.sum()), executors, Z, W)


@pytest.mark.parametrize("name", TO_REAL)
def test_real_results(name):
    fn = TO_REAL[name]
    assert_eagers(lambda z, w: fn(z, w) + 0 * w.real.sum(), [], Z, W)


@pytest.mark.parametrize("name", FROM_REAL)
@pytest.mark.filterwarnings("error:Casting complex values to real")
def test_real_arguments(name):
    assert_eagers(FROM_REAL[name], [], X)


def test_gradients_are_resolved():
    """Eager's can be passed to numpy as they are."""
    z = Z.clone().requires_grad_()
    compiled = thunder.jit(lambda z: (z * W[0]).exp().real.sum(), executors=[], transforms=[MemEfficient(strict=True)])
    compiled(z).backward()
    assert z.grad.numpy().shape == (4, 3)


def test_rotary_embeddings_peak_below_eager_as_predicted():
    turns = torch.polar(torch.ones(256, 32), torch.arange(256.0)[:, None] * drawn(32).float())
    x, *weights = drawn(4, 256, 256).float(), drawn(256, 256).float(), drawn(256, 256, seed=1).float()
    weights = [w.div(16).requires_grad_() for w in weights]

    def turned(x, turns):
        z = torch.view_as_complex(x.reshape(4, 256, 4, 32, 2))
        return torch.view_as_real(z * turns[None, :, None]).flatten(3).transpose(1, 2)

    def model(x, wq, wk, turns):
        q, k = turned(x @ wq, turns), turned(x @ wk, turns)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).square().mean()

    compiled = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    peaks = []
    for fn in (model, compiled):
        torch.autograd.grad(fn(x, *weights, turns), weights)
        peaks.append(measure_peak(lambda fn=fn: torch.autograd.grad(fn(x, *weights, turns), weights)))
    assert peaks[1] < peaks[0]
    assert peaks[1] - predict(compiled, x, *weights, turns).measured_bytes in range(17)
