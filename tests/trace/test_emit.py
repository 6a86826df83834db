"""Traces that plans become: what they compute, how they are formed, and what small programs come to.

The golden traces under `golden/` show the whole plan of a few small programs, one bound symbol a line: `f`
or `b` for the half, values numbered as they appear, no timings. After a change that is meant to alter a
plan, write them anew and look at the difference:

    REFRESH_GOLDEN=1 python -m pytest tests/trace/test_emit.py && git diff tests/golden
"""

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.utils import AutocastStack
from thunder.transforms.autodiff import split_into_forward_and_backward
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.checking.orders import at_random
from tests.checking.traces import Run, run, traced_programs, unfused
from tests.fuzzing.command import uncompiled_regions
from tests.programs.generate import Profile
from thunder_mem import MemEfficient
from thunder_mem.decisions import stages
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.semantics import kernel_scratch
from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.emission import emit
from thunder_mem.trace.reading import BACKWARD, read_trace

GOLDEN = Path(__file__).parents[1] / "checking" / "golden"


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    """Regions run one operation at a time, with the kernels of the unfused trace."""
    with uncompiled_regions():
        yield


# ---- golden traces ----


def plain(x, w):
    y = x * 2 + 1
    return (y.sin() @ w).cos().sum(0), y[:2]


def paths(x, w):
    """Issue #1337 with three paths, all opened before the first is closed."""
    opened = [torch.relu(x * k) @ w for k in (1.0, 2.0, 3.0)]
    total = torch.relu(opened[0]) + x
    for path in opened[1:]:
        total = total + torch.relu(path)
    return total


def training(x, w, v):
    return F.gelu(x @ w, approximate="tanh") @ v


def in_place(x, w):
    """An argument is read, overwritten, and read again."""
    y = x.sin() * 2
    x.add_(w)
    return y.exp() * x.cos()


def checkpointed(x, w):
    def block(x):
        return torch.sigmoid(x @ w) * x

    return checkpoint(block, x, use_reentrant=False) @ w


def amplified(x, w):
    """An upcast that two regions read, on either side of a matmul."""
    wide = x.float()
    norm = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return (wide * (norm @ w).float()).to(x.dtype)


def tensors(number: int, grad: bool, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 16, generator=generator).to(dtype).requires_grad_(grad) for _ in range(number)]


PROGRAMS = {
    "plain": (plain, lambda: tensors(2, False)),
    "paths": (paths, lambda: tensors(2, False)),
    "training": (training, lambda: tensors(3, True)),
    "in_place": (in_place, lambda: tensors(2, False)),
    "checkpointed": (checkpointed, lambda: tensors(2, True)),
    "amplified": (amplified, lambda: tensors(2, True, torch.bfloat16)),
}


class _Emitted(Exception):
    """Carries the emitted trace out of the compilation."""


def emitted(fn, args) -> tuple[TraceCtx, TraceCtx]:
    """The trace that was planned, and what the plan made of it, under `MemEfficient()`."""

    def caught(source, trace, *rest):
        raise _Emitted(trace, emit(source, trace, *rest))

    jitted = thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])
    with mock.patch.object(stages, "emit", caught), pytest.raises(_Emitted) as found:
        jitted(*args)
    return found.value.args


def show(trace: TraceCtx) -> str:
    """A trace without provenance, source lines and Thunder's numbering."""
    known = {p.name: p.name for p in trace.args}
    numbers = count()

    def name(p: Proxy) -> str:
        return known.setdefault(p.name, f"%{next(numbers)}") if p.name not in known else known[p.name]

    def value(x) -> str:
        if isinstance(x, NumberProxy) and x.value is not None:
            return repr(x.value)
        if isinstance(x, Proxy):
            return name(x)
        if isinstance(x, dict):
            return "{" + ", ".join(f"{k}: {value(v)}" for k, v in x.items()) + "}"
        if isinstance(x, tuple | list):
            return f"({', '.join(map(value, x))})"
        return str(x)

    def line(b: BoundSymbol) -> str:
        outs = ", ".join(f"{name(p)}: {p.type_string()}" for p in b.flat_proxy_outs)
        named = (f"{k}={value(v)}" for k, v in b.kwargs.items())
        call = f"{b.sym.name}({', '.join([*map(value, b.args), *named])})"
        return f"{outs} = {call}" if outs else call

    lines = [f"{trace.fn.__name__ if trace.fn else 'computation'}({', '.join(p.name for p in trace.args)})"]
    halves = read_trace(trace)
    backward = {id(b): op.backward for op, b in zip(halves.graph.ops, halves.bsyms, strict=True)}
    for b in trace.bound_symbols:
        if b.sym.id is PrimIDs.RETURN:
            lines.append(f"return {value(b.args[0])}")
        elif id(b) in backward:
            lines.append(f"{'b' if backward[id(b)] else 'f'}  {line(b)}{':' if b.sym.is_fusion else ''}")
            lines += [f"      {line(inner)}" for inner in (b.subsymbols if b.sym.is_fusion else ())]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PROGRAMS)
def test_golden(name, monkeypatch):
    """As on a CPU that multiplies in bfloat16; on any other a product holds a float32 copy, and plans differ."""
    monkeypatch.setattr(kernel_scratch, "_multiplies_bfloat16", lambda: True)
    fn, make = PROGRAMS[name]
    text = show(emitted(fn, make())[1])
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("REFRESH_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), f"the plan of {name} has changed; see the module's docstring"


# ---- what emitted traces compute, and how they are formed ----


@pytest.fixture(scope="module")
def plans():
    """Emitted traces with the traces they were planned for, of programs by hand and at random."""
    found = []
    for name, (fn, make) in PROGRAMS.items():
        inputs = dict(zip(("x", "w", "v"), make(), strict=False))
        found.append((*emitted(fn, make()), inputs, name))
    profile = Profile(layouts=(), aliases=False, regions=(), overwrites_needed=True)
    for traced in traced_programs(25, profile, seed=90_000):
        planned = plan_joint_trace(traced.trace, [mem_pointwise_ex], PlanningOptions())
        new = emit(planned.source, planned.trace, planned.plan, {"mem_pointwise": mem_pointwise_ex}, "planned")
        found.append((planned.trace, new, traced.inputs, traced.text))
    return found


# Inside a region a composite runs as its decomposition, which rounds in other places.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def close(trace: TraceCtx, actual: Run, expected: Run, text: str) -> None:
    """Equal up to the coarsest float of the program, what is returned and the arguments afterwards."""
    tolerance = max(TOLERANCE.get(t.dtype, 0.0) for t in expected.tensors.values())
    pairs = [*zip(actual.returned, expected.returned, strict=True)]
    pairs += [(actual.tensors[p.name], expected.tensors[p.name]) for p in trace.args]
    for a, e in pairs:
        scale = e.abs().nan_to_num(0, 0, 0).max().item() if e.numel() and e.is_floating_point() else 1.0
        torch.testing.assert_close(
            a, e, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{text}\n{m}"
        )


@pytest.mark.slow
def test_emitted_traces_compute_the_same(plans):
    for trace, new, inputs, text in plans:
        close(trace, run(new, inputs), run(trace, inputs), text)


@pytest.mark.slow
def test_so_do_those_in_any_order_a_developer_gives():
    profile = Profile(layouts=(), aliases=False, regions=(), overwrites_needed=True)
    for traced in traced_programs(12, profile, seed=95_000):
        planned = plan_joint_trace(traced.trace, [mem_pointwise_ex], PlanningOptions(sort=at_random))
        new = emit(planned.source, planned.trace, planned.plan, {"mem_pointwise": mem_pointwise_ex}, "planned")
        # Against the trace in which the backward's old values are kept, as autograd's own may lose them.
        close(planned.trace, run(new, traced.inputs), run(planned.trace, traced.inputs), traced.text)


def names(proxies) -> set[str]:
    return {p.name for p in proxies}


@pytest.mark.slow
def test_names_are_defined_once_and_before_their_use(plans):
    for _, new, _, text in plans:
        known = names(new.args)
        for b in new.bound_symbols:
            if b.sym.id is PrimIDs.UNPACK_TRIVIAL:
                continue
            assert names(b.flat_proxy_args) <= known, text
            fresh = names(b.flat_proxy_outs) - names(b.flat_proxy_args)
            assert not fresh & known, text
            known |= fresh
            inner = names(b.flat_proxy_args)
            for sub in b.subsymbols if b.sym.is_fusion else ():
                assert names(p for p in sub.flat_proxy_args if isinstance(p, TensorProxy)) <= inner, text
                made = names(sub.flat_proxy_outs) - names(sub.flat_proxy_args)
                assert not made & inner, text
                inner |= made
        assert new.bound_symbols[-1].sym.id is PrimIDs.RETURN
        assert sum(b.sym.id is PrimIDs.RETURN for b in new.bound_symbols) == 1


@pytest.mark.slow
def test_regions_take_and_give_exactly_what_crosses_their_border(plans):
    fused = 0
    for _, new, _, text in plans:
        for b in new.bound_symbols:
            if not b.sym.is_fusion:
                continue
            made = {n for sub in b.subsymbols for n in names(sub.flat_proxy_outs) - names(sub.flat_proxy_args)}
            read = {n for sub in b.subsymbols for n in names(sub.flat_proxy_args)}
            elsewhere = {n for other in new.bound_symbols if other is not b for n in names(other.flat_proxy_args)}
            assert names(b.flat_proxy_args) == read - made, text
            assert names(b.flat_proxy_outs) == made & elsewhere, text
            assert not all(is_view(sub) for sub in b.subsymbols), text
            fused += 1
    assert fused > 40


@pytest.mark.slow
def test_regions_are_numbered_and_each_has_its_own_name(plans):
    for _, new, _, _ in plans:
        fused = [b.sym.name for b in new.bound_symbols if b.sym.is_fusion]
        assert fused == [f"MemPointwise{k}" for k in range(len(fused))]


@pytest.mark.slow
def test_no_region_mixes_halves_and_tags_say_which(plans):
    """By Thunder's own split of the emitted trace."""
    backward_regions = 0
    compiling = SimpleNamespace(executors_list=(), autocast_stack=AutocastStack(), is_grad_enabled=True)
    for trace, new, _, text in plans:
        source = read_trace(trace)
        in_backward = {
            n
            for op, b in zip(source.graph.ops, source.bsyms, strict=True)
            if op.backward
            for n in names(b.flat_proxy_outs) - names(b.flat_proxy_args)
        }
        if not any(b.sym == prims.get_grad for b in new.bound_symbols):
            continue
        with compile_data_and_stats(compiling, None):
            forward, backward = split_into_forward_and_backward(new)
        for half, is_backward in ((forward, False), (backward, True)):
            for b in half.bound_symbols if half is not None else ():
                known = {n for sub in b.subsymbols for n in names(sub.flat_proxy_outs)} & names_of(trace)
                if b.sym.is_fusion:
                    assert (BACKWARD in b.tags) == is_backward, text
                    assert {n in in_backward for n in known} <= {is_backward}, text
                    backward_regions += is_backward
                    copies = [sub for sub in b.subsymbols if not names(sub.flat_proxy_outs) & names_of(trace)]
                    assert not is_backward or all(BACKWARD in sub.tags for sub in copies), text
    assert backward_regions > 10


def names_of(trace: TraceCtx) -> set[str]:
    return {n for b in trace.bound_symbols for n in names(b.flat_proxy_outs)}


def test_a_copy_in_the_backward_is_tagged_and_named_anew():
    trace, new = emitted(amplified, tensors(2, True, torch.bfloat16))
    regions = [b for b in new.bound_symbols if b.sym.is_fusion]
    copies = [s for b in regions for s in b.subsymbols if any(n.startswith("re_") for n in names(s.flat_proxy_outs))]
    assert any(BACKWARD in s.tags for s in copies) and any(BACKWARD not in s.tags for s in copies)
    assert not any(n.startswith("re_") for n in names_of(trace))


def test_a_plan_without_executors_keeps_every_bound_symbol():
    trace = unfused(training, *tensors(3, True))
    planned = plan_joint_trace(trace, [], PlanningOptions())
    new = emit(planned.source, planned.trace, planned.plan, {}, "a note")
    assert sorted(map(id, new.bound_symbols)) == sorted(
        map(id, [*planned.source.prefix, *planned.source.bsyms, planned.source.result])
    )
    assert "a note" in str(new.get_provenance())
    assert new.bound_symbols is not trace.bound_symbols
