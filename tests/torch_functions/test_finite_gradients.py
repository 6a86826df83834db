"""Gradients are eager's where exponentials overflow, factors are 0 and lengths are 0."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.checking.gradients import with_gradients
from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient
from thunder_mem.executors import mem_pointwise_ex

X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ZEROS = ((torch.arange(48) % 7 > 0) & (torch.arange(48) % 8 > 0)).double().reshape(6, 8)
MASK = torch.where(X > 0, -1e9, 0.0).double()

FUNCTIONS = {
    "sigmoid": lambda x: torch.sigmoid(x + MASK) + F.glu(torch.cat([x, 1e4 * x], 1), 1) + (-1e3 * x).sigmoid().square(),
    "silu": lambda x: F.silu(1e4 * x) + F.logsigmoid(1e4 * x) + F.softplus(1e4 * x),
    "elu": lambda x: F.elu(1e4 * x, 0.5) + F.elu(x) + F.elu(x * 0),
    "celu": lambda x: F.celu(1e4 * x, 0.5) + F.celu(x, 2.0) + F.celu(x * 0),
    "selu": lambda x: F.selu(1e4 * x) + F.selu(x) + F.selu(x * 0),
    "mish": lambda x: F.mish(1e4 * x) + F.mish(x) + F.mish(x * 0),
    "prod": lambda x: (y := x * ZEROS).prod(0) + y.sin().prod(1).sum() + y[0].prod() + y.exp().prod(0, keepdim=True),
    "pow": lambda x: (x.square() * ZEROS) ** (x.square() + 1) + x.exp() ** (x * 0) + (x * 0) ** 0.0 + 2.0**x,
    "normalize": lambda x: (
        F.normalize(x * ZEROS[:, :1]) + F.normalize(x * 1e-14, dim=0) + F.normalize(x, eps=0.5, dim=-1)
    ),
    "normalize by others": lambda x: F.normalize(x, p=1.0) + F.normalize(x, p=3.0, dim=0),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_eagers(name, executors):
    fn = FUNCTIONS[name]
    compiled = thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        found = with_gradients(compiled, X)
    expected = with_gradients(fn, X)
    assert expected[1].isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fn", [torch.sigmoid, F.elu, F.celu, F.selu, F.mish, F.normalize])
def test_sixteen_bits_err_as_little_as_eager(fn):
    exact, x = with_gradients(fn, X)[1], X.bfloat16()
    compiled = thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        errors = [
            (with_gradients(f, x)[1].double() - with_gradients(fn, x.double())[1]).abs().max() for f in (compiled, fn)
        ]
    assert errors[0] <= 1.5 * errors[1] + 1e-3 * exact.abs().max()
