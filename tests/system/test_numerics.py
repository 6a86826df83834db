"""Against float64, what is planned errs at most twice as much as eager does, whatever was decided."""

import pytest
import thunder
import torch

from benchmarks.numerics import CASES, measure
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

# Without compiling, and one that compiles; the others take minutes.
QUICK = {("two MLP blocks", "float32"), ("loss head", "bfloat16")}


def cases():
    for case in CASES:
        for dtype in case.dtypes:
            quick = (case.name, str(dtype).removeprefix("torch.")) in QUICK
            yield pytest.param(
                case, dtype, id=f"{case.name}, {case.decision}, {dtype}", marks=[] if quick else pytest.mark.slow
            )


@pytest.mark.parametrize("case,dtype", list(cases()))
@pytest.mark.slow
def test_errors_are_at_most_twice_eagers(case, dtype):
    row = measure(case, dtype)
    assert row.rms_ratio <= 2, row
    assert row.max_ratio <= 2, row


@pytest.mark.slow
@pytest.mark.parametrize("rows", [96, 2048, 2039])
def test_long_float32_sums_in_a_region_are_as_exact_as_eagers(rows):
    """2039 is a prime, which cannot be cut; so many rows in a row are still few enough to be near."""

    def fn(dy, x, r):
        normed = x * r
        return (dy * normed).sum(0), dy.sum((0, 1)), normed

    generator = torch.Generator().manual_seed(rows)
    args = [torch.randn(shape, generator=generator) for shape in ((rows, 3, 40), (rows, 3, 40), (rows, 1, 1))]
    exact = fn(*(a.double() for a in args))
    jitted = thunder.jit(fn, executors=[mem_pointwise_ex])
    for ours, eager, want in zip(jitted(*args), fn(*args), exact, strict=True):
        errors = [(t.double() - want).norm() / want.norm() for t in (ours, eager)]
        assert errors[0] <= 2 * errors[1] or (rows == 2039 and errors[0] < 2e-6), errors
