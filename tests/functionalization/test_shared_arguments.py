"""Arguments that share a storage are what they are in eager, in programs that write in place."""

import warnings

import pytest
import thunder
import torch
from thunder.dynamo import thunderfx

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import MemEfficient


def halves():
    x = torch.arange(8.0).reshape(2, 4)
    return x[0], x[1], torch.ones(4)


def columns():
    x = torch.arange(8.0).reshape(4, 2)
    return x[:, 0], x[:, 1], torch.ones(4)


def one_twice():
    x = torch.arange(4.0)
    return x, x, torch.ones(4)


def one_beside_a_half():
    x = torch.arange(8.0).reshape(2, 4)
    return x[0], x[0], x[1]


def overlapping():
    x = torch.arange(6.0)
    return x[:4], x[2:], torch.ones(4)


PROGRAMS = {
    "another is written": lambda a, b, c: (c.add_(1), a - 2 * b + c)[1],
    "the first is written": lambda a, b, c: (a.add_(c), a - 2 * b)[1],
    "both are written": lambda a, b, c: (a.add_(c), b.mul_(3), a - 2 * b)[2],
    "as a cache": lambda a, b, c: (a.copy_(c), b.copy_(c * 2), a + 10 * b)[2],
    "an element": lambda a, b, c: (a[0].add_(7), a - 2 * b + c)[1],
}
ARGUMENTS = [halves, columns, one_twice, one_beside_a_half]


def planned(fn):
    return thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True, verify=True)])


def assert_as_eager(fn, compiled, args, wanted_args):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(shares memory|Thunder's autograd)")
        torch.testing.assert_close(compiled(*args), fn(*wanted_args))
    for got, want in zip(args, wanted_args, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: a.__name__)
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_each_argument_is_its_own(fn, arguments):
    assert_as_eager(fn, planned(fn), arguments(), arguments())


def test_arguments_are_not_counted_wrongly():
    """Beside numbers, and tensors that are not read."""

    def fn(unused, n, a, b, c, d):
        c.add_(n)
        return a + b * d + c

    def args():
        x = torch.arange(4.0)
        return torch.ones(5), 3, x, x, torch.zeros(4), torch.full((4,), 7.0)

    assert_as_eager(fn, planned(fn), args(), args())


def test_other_places_are_another_program():
    fn = PROGRAMS["the first is written"]
    jitted = planned(fn)
    for arguments in (halves, one_twice, columns, halves, one_twice):
        assert_as_eager(fn, jitted, arguments(), arguments())
    assert thunder.cache_misses(jitted) == 3


def test_halves_that_move_together_are_no_other_program():
    fn = PROGRAMS["as a cache"]
    jitted = planned(fn)
    for start in range(3):
        x, y = (torch.arange(20.0).reshape(5, 4) for _ in range(2))
        assert_as_eager(fn, jitted, (x[start], x[4], torch.ones(4)), (y[start], y[4], torch.ones(4)))
    assert thunder.cache_misses(jitted) == 1


def test_an_overlap_is_warned_of_with_its_line():
    def fn(a, b, c):
        a.add_(c)
        return a * b

    line = fn.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"write at .*test_shared_arguments.py:{line} .*shows another part of it"):
        planned(fn)(*overlapping())


def reads_a_detached_one(y, d, g):
    g.add_(d)
    return (y * g).sin() + d


@pytest.mark.parametrize("first", [0, 1], ids=["the value first", "the detached one first"])
def test_a_value_beside_its_detached_one_keeps_its_gradient(first):
    def fn(a, b, g):
        return reads_a_detached_one(*((a, b) if first == 0 else (b, a)), g)

    def gradient(call):
        w = torch.arange(4.0, dtype=torch.float64).requires_grad_()
        y = w * 2
        pair = (y, y.detach()) if first == 0 else (y.detach(), y)
        return torch.autograd.grad(call(*pair, torch.ones(4, dtype=torch.float64)).sum(), w)

    torch.testing.assert_close(gradient(planned(fn)), gradient(fn))


def test_a_write_to_the_detached_one_is_warned_of():
    def fn(y, d):
        d.mul_(2)
        return y * 3

    y = torch.ones(4, requires_grad=True) * 1
    with pytest.warns(UserWarning, match="only one of them has a gradient"):
        planned(fn)(y, y.detach())


def running_mean(w, x, g):
    y = x * w
    g.mul_(0.9).add_(y.detach())
    return y + g, y


def last_value(w, x, g):
    y = x * w
    g.copy_(y.detach() * 2)
    return y + 1, y


@pytest.mark.parametrize("fn", [running_mean, last_value])
def test_a_buffer_of_detached_values_loses_no_gradient_by_thunderfx(fn):
    """Inductor compiles `detach`, so Thunder's second part gets the value under two names."""

    def results(call):
        w, g = torch.arange(3.0, requires_grad=True), torch.ones(3)
        outs = call(w, torch.full((3,), 2.0), g)
        return [*outs, g, *torch.autograd.grad(sum((o * o).sum() for o in outs), w)]

    torch._dynamo.reset()
    with uncompiled_regions():
        compiled = thunderfx(fn, executors=[], transforms=[MemEfficient(strict=True)])
        for _ in range(2):
            for got, want in zip(results(compiled), results(fn), strict=True):
                torch.testing.assert_close(got, want)


def test_thunder_alone_takes_one_for_the_other():
    """Where this fails, Thunder has mended it, and `functionalization/shared_arguments.py` can go."""
    fn = PROGRAMS["another is written"]
    assert not torch.equal(thunder.jit(fn, executors=[])(*halves()), fn(*halves()))
