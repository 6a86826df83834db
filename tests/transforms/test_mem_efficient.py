"""`thunder.jit(fn, transforms=[MemEfficient()])` end to end: the cases, and the ways to call what it returns.

Regions run one operation at a time unless a test says otherwise: then every kernel is the one that Thunder
alone runs, and results compare bit for bit.
"""

import functools
import warnings

import pytest
import thunder

from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import Case, Seen, differences, observe
from tests.programs.cases_memory import MEMORY
from tests.programs.cases_programs import PROGRAMS
from thunder_mem import MemEfficient
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.kernels.registered import mem_gradients_ex, mem_kernels_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

WAYS = {
    "default": {},
    "no fusion": {"executors": []},
    "pointwise": {"executors": [mem_attention_ex, mem_pointwise_ex]},
}
CASES = MEMORY | PROGRAMS
# The same kernels as with these executors, in Thunder alone: `MemEfficient` adds them to a list.
ALONE = {
    "default": {"executors": [*thunder.get_default_executors(), mem_gradients_ex]},
    "no fusion": {"executors": [mem_attention_ex, mem_kernels_ex, mem_gradients_ex]},
    "pointwise": {"executors": [mem_attention_ex, mem_pointwise_ex, mem_gradients_ex]},
}
# Where regions decompose a composite, or `mem_attention` joins the default list, other kernels run than in
# Thunder alone, and results agree within rounding. So they do where a batch norm writes its statistics, or a norm is
# written out.
OTHER_KERNELS = {
    "default": ("loss inside", "checkpoints", "attention block", "reductions"),
    "no fusion": ("batch norm in training", "one batch norm twice"),
    "pointwise": ("loss inside", "checkpoints", "attention block", "reductions"),
}


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    with uncompiled_regions():
        yield


def with_mem(fn, **options):
    return thunder.jit(fn, transforms=[MemEfficient(strict=True)], **options)


@functools.cache
def eager(name: str) -> Seen:
    return observe(CASES[name].make(), double=CASES[name].double)


def check_case(name: str, way: str) -> None:
    case: Case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        got = observe(case.make(), functools.partial(with_mem, **WAYS[way]))
        alone = observe(case.make(), functools.partial(thunder.jit, **ALONE[way]))
    if case.held_to != "thunder":
        assert differences(eager(name), got, alike=False, bits=False) == []
    if case.held_to != "eager":
        assert differences(alone, got, alike=True, bits=name not in OTHER_KERNELS[way]) == []
    else:
        wrong = differences(eager(name), alone, alike=False, bits=False)
        assert wrong, "Thunder alone is right now: hold it to both"


# Where the way matters most: writes, views, random numbers, modes. The others take as long again for each way.
QUICK = (
    "write to an intermediate with gradient",
    "write through a view of an argument",
    "setitem",
    "one tensor twice and written",
    "outputs that alias each other",
    "batch norm in training",
    "dropout",
    "no grad inside",
    "autocast",
    "checkpoints",
    "loss inside",
)


def _quick(name: str, way: str) -> bool:
    return way == "default" or name in QUICK


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=() if _quick(name, way) else pytest.mark.slow) for name in CASES for way in WAYS],
)
def test_case(name: str, way: str):
    check_case(name, way)
