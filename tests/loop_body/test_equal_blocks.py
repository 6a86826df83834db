"""Blocks that differ in anything that they compute are compiled each for itself; equal ones once."""

import pytest
import torch

from tests.checking.traces import replaced, unfused
from thunder_mem.loop_body.equal_blocks import EqualBlocks


def builds(*traces, uses=None):
    """How many of these blocks are built."""
    blocks, built = EqualBlocks(), []
    for trace, use in zip(traces, uses or [0] * len(traces), strict=True):
        blocks.built(trace, use, lambda: built.append(0))
    return len(built)


def traced(fn, dtype=torch.float32, columns=4, **options):
    x, y = (torch.ones(4, columns, dtype=dtype) for _ in range(2))
    return unfused(fn, x.requires_grad_(options.get("grad", False)), y)


OTHERS = {
    "an operation": lambda x, y: (x - y).cos() * 2,
    "a constant": lambda x, y: (x - y).sin() * 3,
    "a constant's type": lambda x, y: (x - y).sin() * 2.0,
    "operands": lambda x, y: (y - x).sin() * 2,
    "what is read": lambda x, y: ((x - y).sin(), x * 2)[1],
    "one more operation": lambda x, y: ((x - y).sin() * 2).exp(),
}


def block(x, y):
    return (x - y).sin() * 2


def test_equal_blocks_are_built_once():
    assert builds(traced(block), traced(block), traced(block)) == 1


@pytest.mark.parametrize("other", OTHERS)
def test_another_block_is_built(other):
    assert builds(traced(block), traced(OTHERS[other])) == 2


@pytest.mark.parametrize("given", [{"dtype": torch.float64}, {"columns": 5}, {"grad": True}], ids=str)
def test_so_is_one_for_other_tensors(given):
    assert builds(traced(block), traced(block, **given)) == 2


@pytest.mark.parametrize("pair", [
    (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    (lambda x, y: x.to(torch.float16), lambda x, y: x.to(torch.bfloat16)),
    (lambda x, y: torch.where(x > 0.0, x, y), lambda x, y: torch.where(x > -0.0, x, y)),
], ids=["dim", "dtype", "zero's sign"])  # fmt: skip
def test_arguments_that_are_no_tensors_count(pair):
    assert builds(*map(traced, pair)) == 2


def test_slices_are_compared():
    """As in litgpt's rotary embedding."""

    def half(stop):
        return unfused(lambda x: x[..., :stop] * 2, torch.ones(4, 4))

    assert builds(half(2), half(2), half(3)) == 2


def test_so_does_what_the_block_is_used_for():
    assert builds(traced(block), traced(block), uses=["forward", "backward"]) == 2


def test_what_cannot_be_compared_is_always_built():
    def of_an_object(trace):
        *before, last, result = trace.bound_symbols
        return replaced(trace, [*before, last.from_bsym(args=(*last.args, object())), result])

    assert builds(of_an_object(traced(block)), of_an_object(traced(block))) == 2
