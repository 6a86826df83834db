"""Programs are compiled anew for arguments that Thunder's prologue does not check."""

from __future__ import annotations

import enum
import gc
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch

from thunder_mem import MemEfficient, predict
from thunder_mem.frontend.unchecked_arguments import _kind


class _Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class _Options:
    mask: Any = None


@dataclass
class _Raising:
    a: object = None
    b: object = field(default=None, init=False)


def _not_ready(_: _Raising) -> object:
    raise ValueError("not ready")


_Raising.b = property(_not_ready, lambda self, value: None)


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _counting() -> Callable:
    def again(x: torch.Tensor, times: int) -> torch.Tensor:
        return x if times == 0 else again(x + 1, times - 1)

    return again


_ONES = torch.ones(4) * 3

# Name: a function of a tensor and another argument, and two values of it.
CASES = {
    "none, then a mask": (lambda x, m: x * 2 if m is None else x * m, None, _ONES),
    "none, then a number": (lambda x, m: x * 2 if m is None else x * 3, None, 1.0),
    "dtype": (lambda x, d: x.to(d), torch.float64, torch.float16),
    "layout": (lambda x, k: x * 2 if k is torch.strided else x * 3, torch.strided, torch.sparse_coo),
    "enum": (lambda x, k: x * 2 if k is _Kind.ONE else x * 3, _Kind.ONE, _Kind.TWO),
    "ellipsis": (lambda x, i: x[i] * 3, ..., slice(0, 1)),
    "bytes": (lambda x, b: x * len(b), b"a", b"bc"),
    "range": (lambda x, r: x * len(r), range(2), range(3)),
    "set": (lambda x, s: x * len(s), {1}, {1, 2}),
    "empty list": (lambda x, s: x * (2 + len(s)), [], [1, 2]),
    "none in a tuple": (lambda x, t: x if t[0] is None else x * t[0], (None, 1), (_ONES, 1)),
    "missing key": (lambda x, d: x * d["m"] if "m" in d else x, {}, {"m": _ONES}),
    "none in a dict": (lambda x, d: x if d["m"] is None else x * d["m"], {"m": None}, {"m": _ONES}),
    "none in a dataclass": (lambda x, o: x if o.mask is None else x * o.mask, _Options(), _Options(_ONES)),
    "none in a deque": (lambda x, d: x if d[0] is None else x * d[0], deque([None]), deque([_ONES])),
    "none in a user's dict": (lambda x, d: x if d["m"] is None else x * d["m"], UserDict(m=None), UserDict(m=_ONES)),
    "none in a namespace": (
        lambda x, n: x if n.m is None else x * n.m,
        SimpleNamespace(m=None),
        SimpleNamespace(m=_ONES),
    ),
    "method of a class": (lambda x, f: f(x), torch.Tensor.exp, torch.Tensor.sin),
    "built-in function": (lambda x, f: f(x), torch.relu, torch.tanh),
    "function": (lambda x, f: f(x), lambda v: v + 1, lambda v: v + 2),
    "default": (lambda x, f: f(x), lambda v, by=2: v * by, lambda v, by=3: v * by),
    "partial": (lambda x, f: f(x), partial(torch.add, torch.ones(4)), partial(torch.mul, torch.ones(4))),
    "class": (lambda x, k: x * 2 if k is int else x * 3, int, float),
}


def _compiled(function: Callable) -> Callable:
    return thunder.jit(function, transforms=[MemEfficient()])


@pytest.mark.parametrize("name", CASES)
def test_another_value_gets_its_own_program(name: str) -> None:
    function, first, second = CASES[name]
    step, x = _compiled(function), torch.full((4,), 0.5)
    for value in (first, second, first, second):
        got, expected = step(x, value), function(x, value)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert thunder.cache_misses(step) <= 3  # a first value that Thunder does check is compiled twice at most


@pytest.mark.parametrize("call", ["positional", "by name"])
def test_a_module_sees_its_mask(call: str) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            y = self.linear(x)
            return (y if mask is None else y * mask).sum()

    model = Masked()
    step, x = _compiled(model), torch.ones(2, 4)
    for mask in (None, _ONES, None):
        got = step(x, mask) if call == "positional" else step(x, mask=mask)
        torch.testing.assert_close(got, model(x, mask))


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        (lambda x, f: f(x), lambda: lambda v: v * 2),
        (lambda x, f: f(x, 2), _counting),
        (lambda x, f: f(x), lambda: _Scaled(2.0).apply),
        (lambda x, o: x * o.mask, lambda: _Options(torch.ones(4))),
        (lambda x, unused: x * 2, lambda: torch.randn(3)),
    ],
    ids=["lambda", "recursive", "method", "dataclass", "unused"],
)
def test_an_equal_value_made_anew_is_not_compiled_again(function: Callable, makes: Callable) -> None:
    step, x = _compiled(function), torch.ones(4)
    for _ in range(3):
        value = makes()
        assert torch.equal(step(x, value), function(x, value))
    assert thunder.cache_misses(step) == 1


def test_names_in_another_order_are_the_same_program() -> None:
    step, x = _compiled(lambda x, *, m, n: x * 2 if m is n else x), torch.ones(4)
    step(x, m=None, n=None)
    step(x, n=None, m=None)
    assert thunder.cache_misses(step) == 1


@pytest.mark.parametrize("holding", [lambda t: t.sum, lambda t: frozenset([t]), lambda t: [t], lambda t: lambda: t])
def test_no_tensor_is_kept_alive(holding: Callable) -> None:
    step, x, held = _compiled(lambda x, unused: x * 2), torch.ones(4), torch.ones(3)
    gone = weakref.ref(held)
    step(x, holding(held))
    del held
    gc.collect()
    assert gone() is None


def test_many_programs_for_what_nobody_reads_come_with_a_warning() -> None:
    step, x = _compiled(lambda x, batch: x * batch["scale"]), torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for n in range(7):
            step(x, {"scale": x, "words": ["a"] * n})
    with pytest.warns(UserWarning, match="compiled for 8 kinds of arguments .* lengths of containers"):
        step(x, {"scale": x, "words": ["a"] * 7})


def test_programs_for_other_shapes_come_without_a_warning() -> None:
    step = _compiled(lambda x, mask: x * 2 if mask is None else x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for n in range(1, 9):
            step(torch.ones(n), None if n < 8 else torch.float32)
    assert thunder.cache_misses(step) == 8


def test_symbolic_values_are_checked_beside_numbers_too() -> None:
    step = thunder.jit(
        lambda x, m: x * 2 if m is None else x * m, executors=[], transforms=[MemEfficient()], cache="symbolic values"
    )
    for value, times in ((None, 2), (3.0, 3), (None, 2)):
        assert torch.equal(step(torch.ones(4), value), torch.ones(4) * times)


@pytest.mark.parametrize("makes", [list, tuple])
def test_a_long_or_deep_container_takes_no_time_to_compare(makes: Callable) -> None:
    shared: Any = [None]
    for _ in range(40):
        shared = [shared, shared]
    for value in (shared, makes([1.0] * 10_000)):
        assert str(_kind(value)).count("class") < 3_000


def test_a_field_that_raises_is_left_alone() -> None:
    step = _compiled(lambda x, o: x * 2)
    assert torch.equal(step(torch.ones(4), _Raising()), torch.ones(4) * 2)


def test_a_prediction_and_a_parameter_are_not_compiled_apart() -> None:
    step, x = _compiled(lambda x, mask: x * 2 if mask is None else x * mask), torch.ones(4)
    predict(step, x, None)
    step(x, None)
    step(torch.nn.Parameter(x, requires_grad=False), None)
    assert thunder.cache_misses(step) <= 1


def test_a_program_of_tensors_and_numbers_has_no_further_check() -> None:
    step = _compiled(lambda x, y, n, *, s: x * y * n if s == "a" else x)
    step(torch.ones(4), torch.ones(4), 2, s="a")
    assert "check_other_arguments" not in str(thunder.last_prologue_traces(step)[-1])
