"""Casts to a wider dtype and back: which disappear, and which must stay."""

import pytest
import thunder
import torch
from thunder.core import dtypes, prims

from thunder_mem.trace.round_trips import without_round_trips


def casts(fn, x):
    """The casts that stay, in the trace of `fn`; a cast that nobody reads counts too."""
    trace = without_round_trips(thunder.trace()(fn, x))
    return sum(b.sym.id is prims.PrimIDs.CONVERT_ELEMENT_TYPE for b in trace.bound_symbols)


def there_and_back(x, wide, narrow):
    return prims.convert_element_type(prims.convert_element_type(x, wide), narrow)


@pytest.mark.parametrize(
    ("narrow", "wide", "left"),
    [
        ("bfloat16", "float32", 1),
        ("float16", "float32", 1),
        ("float32", "float64", 1),
        ("float32", "bfloat16", 2),
        ("float16", "bfloat16", 2),
        ("bfloat16", "float16", 2),
        ("int32", "float32", 2),
    ],
)
def test_only_exact_round_trips_disappear(narrow, wide, left):
    x = torch.ones(3, dtype=getattr(torch, narrow))
    assert casts(lambda x: prims.neg(there_and_back(x, getattr(dtypes, wide), getattr(dtypes, narrow))), x) == left


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_number_of_16_bits_survives(name):
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(getattr(torch, name))
    back = numbers.float().to(numbers.dtype)
    assert torch.equal(back.nan_to_num(7.0), numbers.nan_to_num(7.0))


def test_a_result_of_the_forward_keeps_its_own_memory():
    def joint(x):
        y = prims.neg(x)
        z = there_and_back(y, dtypes.float32, dtypes.bfloat16)
        return {"fw_flat_out": (y, z), "flat_args": (x,), "output": ()}

    assert casts(joint, torch.ones(3, dtype=torch.bfloat16)) == 2


def test_a_copy_of_overwritten_memory_stays():
    def writing(x):
        old = there_and_back(x, dtypes.float32, dtypes.bfloat16)
        return prims.copy_(prims.neg(x), x, grad_enabled=False), prims.neg(old)

    assert casts(writing, torch.ones(3, dtype=torch.bfloat16)) == 2
