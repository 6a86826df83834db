"""Bound symbols and tensors under other names, compared with Thunder's own way."""

import pytest
import torch
from thunder.core import prims
from thunder.core.devices import Device
from thunder.core.dtypes import bfloat16, float32
from thunder.core.proxies import NumberProxy, TensorProxy, variableify
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.traces import body
from tests.programs.written_programs import WRITTEN, written
from thunder_mem.trace.renaming import named, renamed


def tensor(name, dtype=float32):
    return TensorProxy(name, shape=(2, 3), device=Device("cpu"), dtype=dtype, requires_grad=True)


@pytest.fixture
def trace():
    trace = TraceCtx(None)
    with tracectx(trace):
        yield trace


def test_a_tensor_by_another_name_is_the_same_otherwise(trace):
    old = tensor("t", bfloat16)
    old.tags.add("tag")
    new, theirs = named(old, "u"), old.replace_name("v")
    assert (new.name, old.name) == ("u", "t") and type(new) is TensorProxy
    unnamed = [{k: v for k, v in vars(p).items() if k != "_name"} for p in (new, theirs)]
    assert unnamed[0] == unnamed[1]
    new.tags.add("mine")
    assert old.tags == {"tag"}


def test_a_name_that_is_taken_gets_a_number(trace):
    old = tensor("t")
    assert [named(old, "u").name for _ in range(3)] == ["u", "u_0", "u_1"]
    assert all(map(trace.has_name, ("u", "u_0", "u_1")))


def test_numbers_have_names_too(trace):
    number = NumberProxy("n", value=3, python_type=int)
    assert named(number, "m").name == "m"


@pytest.mark.slow
def test_programs_are_renamed_as_thunder_does():
    changed = 0
    for traced in map(written, WRITTEN):
        for bsym in body(traced.trace):
            for p in (*bsym.flat_proxy_args[:1], *bsym.flat_proxy_outs[-1:]):
                if not isinstance(p, TensorProxy):
                    continue
                with tracectx(TraceCtx(None)):
                    other = tensor(f"other{changed}")
                for outputs in (True, False):
                    ours = renamed(bsym, {p.name: other}, outputs=outputs)
                    theirs = bsym.from_bsym_swap_proxies({variableify(p): other}, skip_output=not outputs)
                    assert str(ours) == str(theirs)
                    for which in ("flat_proxy_args", "flat_proxy_outs"):
                        assert [q.name for q in getattr(ours, which)] == [q.name for q in getattr(theirs, which)]
                    assert ours.tags == theirs.tags and len(ours.subsymbols) == len(theirs.subsymbols)
                changed += 1
    assert changed > 100


def test_a_symbol_without_the_name_is_returned_as_it_is(trace):
    a, b = tensor("a"), tensor("b")
    bsym = prims.sin.bind(a, output=b)
    assert renamed(bsym, {"c": tensor("c")}) is bsym
    assert renamed(bsym, {"b": tensor("d")}, outputs=False) is bsym


def test_names_inside_nested_arguments(trace):
    a, b, c, out = (tensor(n) for n in "abco")
    bsym = prims.cat.bind([a, (b, a)], {"k": a, "s": slice(0, 2), "d": torch.float32}, output=out)
    new = renamed(bsym, {"a": c})
    (x, (y, z)), options = new.args
    assert [p.name for p in (x, y, z, options["k"])] == ["c", "b", "c", "c"]
    assert options["s"] == slice(0, 2) and options["d"] is torch.float32
    assert [p.name for p in new.flat_proxy_args] == ["c", "b", "c", "c"]
