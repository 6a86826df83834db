"""Gradients that Thunder lacks, and those of functions of one name, such as `torch.norm` and `torch.linalg.norm`."""

import pytest
import thunder
import torch

from tests.checking.gradients import with_gradients
from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, measure_peak
from thunder_mem.executors import mem_pointwise_ex

X = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

ROWS = torch.tensor([0, 2, 2])
FUNCTIONS = {
    "a norm along two dims": lambda x: x.norm(2, dim=(0, 1)),
    "a norm of order 1": lambda x: torch.norm(x, 1),
    "the norm of a matrix": lambda x: torch.linalg.norm(x, 2, dim=(1, 2)),
    "both products": lambda x: torch.cross(x, x.cos()) + torch.linalg.cross(x[:, :3], x.cos()[:, :3], dim=1).sum(1)[0],
    "both decompositions": lambda x: (torch.svd(x)[2] * torch.linalg.svd(x)[2].mT * x).abs(),
    "an upper factor": lambda x: torch.cholesky(x @ x.mT, upper=True),
    "remainders": lambda x: x % 0.75 + x % x.cos() + (-x).remainder(x.exp()),
    "the least and the finite": lambda x: x * x.argmin(-1, keepdim=True) + torch.isfinite(x) * x.sin(),
    "a product with a bias": lambda x: (
        torch.addmm(x[0, 0], x[1], x[2], alpha=2) + torch.addmm(x[0], x[1], x[2], beta=3)
    ),
    "a product with numbers": lambda x: torch.addmm(x[0, :1, :1], x[1], x[2]) @ torch.addmm(x[1, 2, 3], x[1], x[2]),
    "a product with columns": lambda x: torch.addmm(x[0, :, 1:2], x[1], x[2]) @ torch.addmm(x[0, 1:2], x[1], x[2]),
    "sums of exponentials": lambda x: (
        x.logsumexp(1)[:, None] * x
        + (x * 1e4).logsumexp((0, -1))[:, None]
        + x.masked_fill(x > 1, -torch.inf).logsumexp(2, True)
    ),
    "values at indices": lambda x: (
        x.cos().index_put((ROWS,), x[:, 0, None].exp()) * x.index_put((ROWS, ROWS), x[0, 0], accumulate=True)
        + torch.zeros_like(x).index_put_((ROWS[1:],), x[1].sin(), accumulate=True)
    ),
    "a reduction by its number": lambda x: torch.kl_div(x, x.softmax(-1), 1),
}


COMPLEX = torch.complex(X, X.flip(0))

FUNCTIONS |= {
    "products of complex numbers": lambda x: torch.view_as_real(
        torch.mm(x[0].to(COMPLEX.dtype), COMPLEX[1]).mm(COMPLEX[2])
        + torch.addmm(x[1].to(COMPLEX.dtype), COMPLEX[1], x[2].to(COMPLEX.dtype), alpha=2)
        + torch.mv(COMPLEX[0], x[1, 0].to(COMPLEX.dtype))
        + torch.dot(x[0, 0].to(COMPLEX.dtype), COMPLEX[1, 1])
    ),
    "a sum without a bias that is no number": lambda x: torch.addmm(x[0] / 0, x[1], x[2], beta=0),
    "a number that nobody reads": lambda x: torch.std_mean(x)[0] * x + torch.slogdet(x[:, :3, :3])[1].sum(),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_values_and_gradients_are_pytorchs(name, executors):
    fn = FUNCTIONS[name]
    compiled = thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        found = with_gradients(compiled, X)
    torch.testing.assert_close(found, with_gradients(fn, X), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_chain_of_sums_of_exponentials_peaks_below_eager():
    """As in a conditional random field; Thunder saves the exponentials of every step."""
    scores, first = torch.randn(128, 128, requires_grad=True), torch.randn(10, 128)

    def model(scores, first):
        reached = first[0]
        for x in first[1:]:
            reached = torch.logsumexp(reached[:, None] + scores, 0) + x
        return torch.logsumexp(reached, 0)

    compiled = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    peaks = []
    for fn in (compiled, model):
        torch.autograd.grad(fn(scores, first), scores)
        peaks.append(measure_peak(lambda fn=fn: torch.autograd.grad(fn(scores, first), scores)))
    assert peaks[0] < peaks[1]


def without_autocast(x, w):
    with torch.autocast("cpu", enabled=False):
        return (torch.nn.functional.linear(x, w).float() @ w).square()


@pytest.mark.parametrize("fn", [without_autocast, lambda x, w: torch.addmm(x, x, w)], ids=["linear", "addmm"])
def test_products_that_autocast_left_alone(fn):
    """Thunder applies a rule as if autocast around the call were on, and refuses what it makes."""
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    compiled = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (torch.autograd.grad(f(*inputs).float().sum(), inputs) for f in (compiled, fn))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.3)
