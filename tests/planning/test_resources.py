"""What planning takes, however long the program, and that it leaves nothing broken or alive behind."""

import copy
import gc
import inspect
import io
import pickle
import sys
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import thunder
import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.interpreter import InterpreterError
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder_mem
from benchmarks.scale import SHAPES, count, joint_trace, planned
from tests.fuzzing.configs import uncompiled_regions
from tests.programs.cases import randn
from tests.programs.cases_memory import MEMORY
from tests.programs.cases_programs import PROGRAMS
from thunder_mem import BudgetError, MemEfficient, last_plan
from thunder_mem.functionalization.functionalize import without_writes
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.collector import collector_off

PACKAGE = str(Path(thunder_mem.__file__).parent)


@contextmanager
def tracing(enter):
    """Within, Python calls `enter` for each function that it enters; after it, who was called before."""
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_run(fn, *args) -> int:
    """How many lines of this package a call runs, those of loops each time: work, without a clock."""
    lines = 0

    def local(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return local

    def enter(frame, event, arg):
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    with tracing(enter):
        fn(*args)
    return lines


# ---- how work grows ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_work_is_linear_in_the_length_of_the_program(shape):
    short, long = joint_trace(shape, 120), joint_trace(shape, 480)
    ratio = count(long) / count(short)
    assert lines_run(planned, long) < 1.2 * ratio * lines_run(planned, short)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_no_recursion_follows_the_length_of_the_program(shape):
    trace = joint_trace(shape, 900)
    depth = 0
    frame = sys._getframe()
    while frame := frame.f_back:
        depth += 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 250)
    try:
        result = planned(trace)
    finally:
        sys.setrecursionlimit(limit)
    assert result is not trace


def test_a_write_behind_a_long_chain_of_views():
    trace = TraceCtx(None)
    with tracectx(trace):
        x = TensorProxy("x", shape=(4, 4), device=devices.cpu, dtype=dtypes.float32, requires_grad=True)
        view = base = ltorch.mul(x, 2.0)
        for _ in range(1200):
            view = prims.transpose(view, (1, 0))
        prims.python_return(ltorch.add(view, prims.copy_(ltorch.sin(base), base, grad_enabled=True)))
    trace.bound_symbols.insert(0, prims.unpack_trivial.bind(x, output=x, name=x.name))
    trace.args, trace.kwargs = (x,), {}
    names = [bsym.sym.name for bsym in without_writes(trace).bound_symbols]
    assert "copy_" not in names and names.count("transpose") == 2400  # before the write, and of what was written


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_20_000_operations(shape):
    trace = joint_trace(shape, 20_000)
    result = planned(trace)
    assert 0 < count(result) <= count(trace) * 1.1


# ---- what is interrupted ----


class Stop(BaseException):
    """As KeyboardInterrupt, which a test runner would take for its own."""


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 6))


def compiled(module: nn.Module):
    return thunder.jit(module, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])


def gradients(fn, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(fn(x).square().sum(), list(module.parameters())), fn(x).detach()]


def called(fn, *args, stop_at: int = -1) -> int:
    """How many functions of this package a call enters; raises `Stop` as it enters number `stop_at`.

    Generators do not count: one that is dropped half-way is entered to end it, where Python swallows what is raised.
    """
    calls = 0

    def enter(frame, event, arg):
        nonlocal calls
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            calls += 1
            if calls == stop_at:
                sys.settrace(None)
                raise Stop
        return None

    with tracing(enter):
        fn(*args)
    return calls


@pytest.mark.parametrize("sixteenths", [(7,), pytest.param(range(1, 16), marks=pytest.mark.slow)], ids=["one", "many"])
@pytest.mark.slow
def test_an_interrupt_leaves_nothing_broken(sixteenths):
    """Wherever it strikes, the next call compiles, and computes what one that was not interrupted does."""
    x = randn(5, 6, grad=False)
    with uncompiled_regions():
        module = small()
        called(compiled(module), x)  # what is found out once a process is not called again
        reference = compiled(module)
        total = called(reference, x)
        want, plan = gradients(reference, module, x), last_plan(reference)
        for part in sixteenths:
            jitted = compiled(module)
            with pytest.raises((Stop, InterpreterError)):  # the latter where Thunder's interpreter stood
                called(jitted, x, stop_at=total * part // 16)
            assert len(thunder.compile_stats(jitted).interpreter_cache) == 0
            assert all(map(torch.equal, gradients(jitted, module, x), want)), part
            assert last_plan(jitted).to_json() == plan.to_json()
            assert len(thunder.compile_stats(jitted).interpreter_cache) == 1
        assert gc.isenabled()


@pytest.mark.slow
def test_two_threads_compile_at_once():
    x = randn(5, 6, grad=False)
    with uncompiled_regions():
        module = small()
        want = gradients(compiled(module), module, x)
        results: list = [None] * 3
        start = threading.Barrier(len(results))

        def work(i: int) -> None:
            start.wait()
            try:
                results[i] = gradients(compiled(module), module, x)
            except BaseException as error:  # which would end the thread, and not the test
                results[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for result in results:
        assert not isinstance(result, BaseException), result
        assert all(map(torch.equal, result, want))
    assert gc.isenabled()


# ---- what can be copied, and what stays ----


@pytest.mark.slow
def test_a_compiled_module_copies_pickles_and_saves_as_before():
    """What `thunder.jit` returns cannot be copied, with or without transforms; the module in it can."""
    x = randn(5, 6, grad=False)
    with uncompiled_regions():
        module = small()
        jitted = compiled(module)
        want = gradients(jitted, module, x)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
        for other in others:
            assert all(map(torch.equal, gradients(compiled(other), other, x), want))
        state = io.BytesIO()
        torch.save(jitted.state_dict(), state)
        state.seek(0)
        assert torch.load(state, weights_only=True).keys() == module.state_dict().keys()


@pytest.mark.slow
def test_a_transform_and_a_plan_can_be_copied_and_pickled():
    transform = MemEfficient(recompute="Gelu+:recompute:-1", budget="1GiB", strict=True)
    module, x = small(), randn(5, 6, grad=False)
    plans = []
    for one in (transform, copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert repr(one) == repr(transform)
        jitted = thunder.jit(module, executors=[], transforms=[one])
        jitted(x)
        plans.append(last_plan(jitted))
    assert all(plan.to_json() == plans[0].to_json() for plan in plans)
    assert pickle.loads(pickle.dumps(plans[0])) == copy.deepcopy(plans[0]) == plans[0]


def test_nothing_keeps_tensors_alive():
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    x = randn(5, 6, grad=False)

    def once() -> list:
        module = small()
        jitted = compiled(module)
        loss = jitted(x).square().sum()
        loss.backward()
        return [weakref.ref(p) for p in module.parameters()]

    with uncompiled_regions():
        once()
        before = tensors()
        seen = once()
        assert tensors() == before
    assert all(ref() is None for ref in seen)


@pytest.mark.parametrize("options", ({}, {"budget": "1GiB"}, {"budget": 1}), ids=str)
def test_a_compiled_function_dies_with_its_last_name(options):
    """Without the collector, also where no plan fits: no cycle of ours keeps the program and its tensors."""
    gc.collect()
    with collector_off():
        jitted = thunder.jit(small(), executors=[], transforms=[MemEfficient(strict=True, **options)])
        with nullcontext() if options.get("budget") != 1 else pytest.raises(BudgetError):
            jitted(randn(5, 6, grad=False))
        seen = weakref.ref(jitted)
        del jitted
        assert seen() is None


def lives_on(fn, args: tuple, kwargs: dict, transforms: list) -> bool:
    """Whether a compiled function that has run, backwards too, needs the collector to die."""
    gc.collect()
    with collector_off(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitted = thunder.jit(fn, transforms=transforms)
        out = tree_leaves(jitted(*args, **kwargs))
        if losses := [t.sum() for t in out if isinstance(t, torch.Tensor) and t.requires_grad]:
            torch.autograd.backward(losses)
        seen = weakref.ref(jitted)
        del jitted
        return seen() is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(case.make, id=name, marks=[pytest.mark.slow] * (i % 12 > 0))
        for i, (name, case) in enumerate((MEMORY | PROGRAMS).items())
    ],
)
def test_whatever_was_compiled_dies_with_its_last_name(made):
    """Where Thunder's own function does, ours does too."""
    with uncompiled_regions():
        fn, args, kwargs = (*made(), {})[:3]
        if lives_on(fn, args, kwargs, [MemEfficient(strict=True)]):
            fn, args, kwargs = (*made(), {})[:3]
            assert lives_on(fn, args, kwargs, [])
