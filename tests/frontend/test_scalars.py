"""Scalars that a program computes and that meet larger tensors have eager's gradients; plain Thunder's are wrong."""

import pytest
import thunder
import torch

from thunder_mem import MemEfficient
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

OPERATIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": lambda a, b: torch.pow(a.abs() + 1, b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "atan2": torch.atan2,
    "fmod": torch.fmod,
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(b > 0.3, a, b),
    "where, by the scalar": lambda a, b: torch.where(a > 0.3, a, b * 2),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1),
    "clamp": lambda a, b: torch.clamp(b, a, a + 1),
}
WEIGHTS = torch.arange(6.0).reshape(2, 3)


def gradients(fn, *args, weights=WEIGHTS):
    given = [a.clone().requires_grad_() for a in args]
    (fn(*given) * weights.to(args[0].dtype)).sum().backward()
    return [torch.zeros_like(a) if a.grad is None else a.grad for a in given]


def planned(fn, executors=()):
    return thunder.jit(fn, executors=list(executors), transforms=[MemEfficient(strict=True)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("turned", [False, True], ids=["scalar first", "scalar second"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_eagers(name, turned):
    def fn(x, y):
        scalar, large = y * 2 + x.sum(), x * 1.5
        return OPERATIONS[name](large, scalar) if turned else OPERATIONS[name](scalar, large)

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        args = torch.randn(2, 3, generator=generator), torch.randn((), generator=generator)
        expected = gradients(fn, *(a.double() for a in args))
        for found, exact in zip(gradients(planned(fn), *args), expected, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_in_compiled_regions_and_in_half_precision():
    def fn(x):
        return torch.maximum(x.sum(), x) + x / x.norm()

    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).half()
    (found,) = gradients(planned(fn, [mem_pointwise_ex]), x)
    (exact,) = gradients(fn, x.double())
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def test_plain_thunder_sums_nothing():
    """When this fails, Thunder broadcasts what it took for a number, and `frontend/scalar_broadcast.py` may go."""

    def fn(w):
        return w * w.sum()

    w = torch.ones(2, 3)
    (exact,) = gradients(fn, w)
    assert not torch.allclose(gradients(thunder.jit(fn, executors=[]), w)[0], exact)
    torch.testing.assert_close(gradients(planned(fn), w)[0], exact)


def test_what_is_detached_and_computed_in_a_block_of_it_is_no_error():
    """Found by the fuzzer: the gradient of the first maximum is asked for, and had the shape of its partner."""

    def fn(x):
        rest = x.detach()
        return torch.maximum(torch.sum(rest), rest) * 1, x * 2

    x = torch.randn(2, 3).half().requires_grad_()
    first, second = planned(fn, [mem_pointwise_ex])(x)
    assert not first.requires_grad
    second.backward(torch.ones_like(second))
    assert x.grad.shape == x.shape


def test_an_argument_that_is_used_in_two_ways():
    """PyTorch sums what is handed to an argument: also the other way's part, once for each element."""

    def fn(x, y):
        return x * y + (y * 2).exp().reshape(1, 1)

    args = torch.ones(2, 3), torch.tensor(0.5)
    expected = gradients(fn, *args)
    for found, exact in zip(gradients(planned(fn), *args), expected, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("rows", [0, 3])
def test_an_arange_beside_it(rows):
    """Thunder's proxy of an empty one has no dims, unlike the tensor. Found by the fuzzer."""

    def fn(x):
        return (x + torch.arange(x.shape[-1])).sum() * WEIGHTS

    args = (torch.ones(rows),)
    torch.testing.assert_close(gradients(planned(fn), *args), gradients(fn, *args))


def test_symbolic_sizes():
    def fn(w, s):
        return (w * w.sum() * s).exp() + torch.relu(w)

    options = {"executors": [], "cache": "symbolic values"}
    jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)], **options)
    for rows in (2, 4):
        args = torch.full((rows, 3), 0.1), torch.tensor(0.5)
        expected = gradients(fn, *args, weights=torch.ones(rows, 3))
        for found, exact in zip(gradients(jitted, *args, weights=torch.ones(rows, 3)), expected, strict=True):
            torch.testing.assert_close(found, exact)
    assert thunder.cache_misses(jitted) == 1


def test_a_scalar_beside_tensors_of_another_device():
    """On CUDA that is what one writes; no kernel takes an expanded one."""
    w, s = torch.randn(2, 3, device="meta", requires_grad=True), torch.tensor(2.0)
    (planned(lambda w, s: w.exp() / s)(w, s)).sum().backward()
    assert w.grad.shape == w.shape


@pytest.mark.parametrize("grad", [False, True])
def test_only_what_needs_it_is_expanded(grad):
    def fn(x, y):
        return (x * 2) * x.sum(0, keepdim=True) + (y if grad else y.sum())

    x, y = torch.ones(2, 3, requires_grad=grad), torch.ones(3)
    jitted = planned(fn)
    jitted(x, y)
    assert not any("Scalars" in str(t.get_provenance()) for t in thunder.last_traces(jitted))
