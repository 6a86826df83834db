"""`sort_bound_symbols`: the same trace in another order, on plain, joint, forward and backward traces."""

from random import Random

import pytest
import thunder
import torch
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used

from tests.checking.orders import random_order
from tests.checking.traces import run, traced_programs
from tests.programs.generate import Profile
from thunder_mem import sort_bound_symbols
from thunder_mem.memory.graph import Graph, GraphError
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.sorting import SORTS
from thunder_mem.trace.reading import read_trace


def paths(x):
    """Issue #1337: all paths are opened before the first is closed."""
    opened = [(x * k) @ x for k in range(6)]
    return sum(o.sum() for o in opened)


def peak(trace: TraceCtx) -> int:
    return price_order(read_trace(trace).graph).peak_bytes


def final_traces(fn, *args) -> list[TraceCtx]:
    """Forward and backward as Thunder runs them, with their `del`s."""
    jitted = thunder.jit(fn, executors=[])
    jitted(*args)
    return [thunder.last_traces(jitted)[-1], *thunder.last_backward_traces(jitted)[-1:]]


@pytest.fixture(scope="module")
def programs():
    return traced_programs(15, Profile(overwrites_needed=True), seed=120_000)


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["auto", "bfs", "random"])
def test_a_sorted_trace_computes_the_same(programs, sort):
    moved = 0
    for k, traced in enumerate(programs):

        def at_random(graph: Graph, seed: int = k) -> list[int]:
            return random_order(graph, Random(seed))

        new = sort_bound_symbols(traced.trace, at_random if sort == "random" else sort)
        moved += new is not traced.trace
        assert new.bound_symbols[-1] is traced.trace.bound_symbols[-1]
        assert sorted(map(id, new.bound_symbols)) == sorted(map(id, traced.trace.bound_symbols))
        actual = run(new, traced.inputs)
        torch.testing.assert_close(actual.returned, traced.run.returned, rtol=0, atol=0, equal_nan=True)
        if sort == "auto":
            assert peak(new) <= peak(traced.trace)
    assert moved > (0 if sort == "auto" else 5)


def test_paths_are_closed_one_by_one_and_released_there():
    (trace,) = final_traces(paths, torch.ones(32, 32))
    new = sort_bound_symbols(trace)
    assert peak(new) <= peak(trace) - 4 * 32 * 32 * 4
    made: list[str] = []
    alive: set[str] = set()
    for b in new.bound_symbols:
        if b.sym.name == "matmul":
            assert not alive  # the path before is closed
            made.append(b.output.name)
            alive.add(b.output.name)
        elif b.sym.id is PrimIDs.DEL:
            alive -= {p.name for p in b.flat_proxy_args}
    assert len(made) == 6 and not alive


@pytest.mark.parametrize("sort", ["auto", "dfs"])
def test_of_forward_and_backward_the_frame_stays(sort):
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    def fn(x, w):
        a, b = (x @ w).sin(), (x @ w.t()).cos()
        return (a @ b).sum(), a, b

    for trace in final_traces(fn, x, w):
        new = sort_bound_symbols(trace, sort)
        first = next(i for i, b in enumerate(trace.bound_symbols) if b in read_trace(trace).bsyms)
        assert str(new.bound_symbols[-1]) == str(trace.bound_symbols[-1])
        assert [b.sym.name for b in new.bound_symbols[:first]] == [b.sym.name for b in trace.bound_symbols[:first]]
        for symbol in ("clear_mutable_collection", "unpack_sequence"):
            counts = [sum(b.sym.name == symbol for b in t.bound_symbols) for t in (trace, new)]
            assert counts[0] == counts[1]
        new.python_callable()


@pytest.mark.slow
def test_a_trace_without_dels_gets_none_and_one_with_them_keeps_them_tight(programs):
    for traced in programs[:6]:
        plain = sort_bound_symbols(traced.trace, "bfs")
        assert not any(b.sym.id is PrimIDs.DEL for b in plain.bound_symbols)
        released = sort_bound_symbols(del_last_used(traced.trace), "bfs")
        alive: set[str] = set()
        for b in released.bound_symbols:
            if b.sym.id is PrimIDs.DEL:
                assert {p.name for p in b.flat_proxy_args} <= alive
                alive -= {p.name for p in b.flat_proxy_args}
            else:
                alive |= {p.name for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
        returned = {p.name for p in released.bound_symbols[-1].flat_proxy_args}
        assert returned <= alive


def test_the_source_order_returns_the_trace_itself(programs):
    for traced in programs:
        source = read_trace(traced.trace)
        read = dict.fromkeys(map(id, source.bsyms))
        if list(read) == [i for i in map(id, traced.trace.bound_symbols) if i in read]:
            assert sort_bound_symbols(traced.trace, "source") is traced.trace


def test_refusals():
    (trace,) = final_traces(paths, torch.ones(4, 4))
    with pytest.raises(GraphError, match="breaks the edge"):
        sort_bound_symbols(trace, lambda graph: range(len(graph) - 1, -1, -1))
    with pytest.raises(ValueError, match=f"unknown sort 'best'; known are {next(iter(SORTS))}"):
        sort_bound_symbols(trace, "best")
    with pytest.raises(TypeError, match="not 3"):
        sort_bound_symbols(trace, 3)
    with pytest.raises(TypeError, match=r"takes a Thunder trace, such as .*, not function"):
        sort_bound_symbols(paths)
    empty = TraceCtx(None)
    with pytest.raises(ValueError, match="does not end with a return"):
        sort_bound_symbols(empty)
