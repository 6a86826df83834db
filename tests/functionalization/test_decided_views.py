"""Writes to what `contiguous`, `reshape`, `flatten` and `to` return are writes to a copy or to a view, as in eager."""

import warnings

import pytest
import thunder
import torch
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import MemEfficient


def written(make):
    """A program that writes to a value made of the argument, and reads the argument afterwards."""

    def of_the_argument(x):
        z = make(x)
        z.mul_(2)
        return z.sin().sum() + x.sin()

    return of_the_argument


def written_inside(make):
    """The same of a value that the program computes."""

    def of_a_value(x):
        y = x.sin()
        z = make(y)
        z.mul_(2)
        return z.sin().sum() * y

    return of_a_value


MAKERS = {
    "contiguous": lambda x: x.contiguous(),
    "a transposed one": lambda x: x.t().contiguous(),
    "a transposed one twice": lambda x: x.t().contiguous().t().contiguous(),
    "columns": lambda x: x[:, :2].contiguous(),
    "rows": lambda x: x[:2].contiguous(),
    "expanded": lambda x: x[:1].expand(3, 3).contiguous(),
    "expanded and flattened": lambda x: x[:1].expand(3, 3).reshape(-1),
    "reshape": lambda x: x.reshape(-1),
    "reshape of a transposed one": lambda x: x.t().reshape(-1),
    "reshape of columns": lambda x: x[:, :2].reshape(-1),
    "reshape_as": lambda x: x.reshape_as(x),
    "flatten": lambda x: x.flatten(),
    "flatten of a transposed one": lambda x: x.t().flatten(),
    "to": lambda x: x.to(torch.float64),
    "to, as a copy": lambda x: x.to(torch.float64, copy=True),
    "to another dtype": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "double": lambda x: x.double(),
    "clone": lambda x: x.t().clone(),
    "channels last": lambda x: x.reshape(1, 3, 3, 1).contiguous(memory_format=torch.channels_last),
}
# Writes through a view of an argument stay a limit, with a warning, whatever the view is made by.
VIEWS_OF_ARGUMENTS = {
    "as it is": {"rows", "reshape", "flatten"},
    "transposed": {"a transposed one", "reshape of a transposed one", "flatten of a transposed one"},
    "with gaps": set(),
}


def row_of_a_copy(x):
    z = x.t().contiguous()
    z[0].mul_(2)
    return z * x


def row_is_set(x):
    y = x.sin()
    z = y.t().contiguous()
    z[0] = x[1]
    return z * y


def returned(x):
    z = x.t().contiguous()
    z.mul_(x.sin())
    return z


def base_is_written(x):
    y = x.sin()
    z, flat = y.t().contiguous(), y.t().reshape(-1)
    y.mul_(2)
    return z * y + flat.sum()


def base_is_written_under_two_names(x):
    z = x.contiguous()
    x.mul_(2)
    z.add_(1)
    return z * x


def in_a_checkpoint(x):
    def part(x):
        z = x.t().contiguous()
        z.mul_(2)
        return z + x.sin()

    return checkpoint(part, x, use_reentrant=False)


OTHERS = [row_of_a_copy, row_is_set, returned, base_is_written, base_is_written_under_two_names, in_a_checkpoint]
STRIDES = {
    "as it is": lambda x: x * 1,
    "transposed": lambda x: (x * 1).t(),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, :3],
}


def planned(fn, **options):
    return thunder.jit(fn, transforms=[MemEfficient(strict=True, verify=True)], **({"executors": []} | options))


def results(fn, strided):
    """The output, what the argument holds afterwards, and the gradient of what it was computed from."""
    leaf = torch.arange(9, dtype=torch.float64).reshape(3, 3).cos().requires_grad_()
    x = strided(leaf)
    out = fn(x)
    loss = (out * torch.arange(9, dtype=torch.float64).reshape(3, 3).sin()).sum() + (x * x).sum()
    return [out, x, *torch.autograd.grad(loss, leaf)]


def assert_as_eager(fn, jitted, strided):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Thunder's autograd")
        for got, want in zip(results(jitted, strided), results(fn, strided), strict=True):
            torch.testing.assert_close(got, want)


def _cases():
    for strides in STRIDES:
        for name, make in MAKERS.items():
            if name not in VIEWS_OF_ARGUMENTS[strides] and (name, strides) != ("channels last", "transposed"):
                yield pytest.param(written(make), STRIDES[strides], id=f"argument-{name}-{strides}")
            yield pytest.param(written_inside(make), STRIDES[strides], id=f"value-{name}-{strides}")
        if strides != "transposed":
            yield from (pytest.param(fn, STRIDES[strides], id=f"{fn.__name__}-{strides}") for fn in OTHERS)


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("fn", "strided"), list(_cases()))
def test_a_write_is_to_a_copy_or_to_a_view_as_in_eager(fn, strided):
    assert_as_eager(fn, planned(fn), strided)


@pytest.mark.parametrize("fn", [written(MAKERS["a transposed one"]), written_inside(MAKERS["reshape"]), row_is_set])
def test_regions_do_not_decide(fn):
    """A fused region may lay its results out in another way than eager does."""
    with uncompiled_regions():
        assert_as_eager(fn, planned(fn, executors=None), STRIDES["with gaps"])


def test_other_strides_are_another_program():
    fn = written_inside(MAKERS["reshape of a transposed one"])
    jitted = planned(fn)
    for strided in (*STRIDES.values(), *STRIDES.values()):
        assert_as_eager(fn, jitted, strided)
    assert thunder.cache_misses(jitted) == len(STRIDES)


def test_strides_decide_nothing_where_nothing_is_written():
    jitted = planned(lambda x: x.t().reshape(-1).sin() * 2)
    for strided in STRIDES.values():
        jitted(strided(torch.ones(3, 3, requires_grad=True)))
    assert thunder.cache_misses(jitted) == 1


def test_a_parameter_is_copied():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            weight = self.weight.t().contiguous()
            weight.mul_(2)
            return (x @ weight).sin() @ self.weight

    eager = Scaled(3, 3, dtype=torch.float64)
    x = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    want = torch.autograd.grad(eager(x).sum(), eager.weight)
    jitted = planned(eager)
    torch.testing.assert_close(torch.autograd.grad(jitted(x).sum(), jitted.get_parameter("weight")), want)


def test_thunder_alone_loses_them():
    """Where this fails, Thunder has mended it, and `functionalization/decided_views.py` can go."""
    fn = written(MAKERS["a transposed one"])
    got, want = results(thunder.jit(fn, executors=[]), STRIDES["as it is"]), results(fn, STRIDES["as it is"])
    assert not torch.allclose(got[-1], want[-1])
