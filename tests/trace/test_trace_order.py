"""What runs before what: hazards, random numbers, barriers and communication, against PyTorch running the traces."""

from itertools import pairwise
from random import Random

import pytest
import thunder
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.custom_op_ex import custom_op_ex
from torch.nn import functional as F

from tests.checking.collectives import in_place, tensor, two_groups
from tests.checking.orders import random_order
from tests.checking.traces import Traced, body, claimed, ordered, replaced, run, traced_programs, unfused
from tests.programs.generate import Profile
from tests.programs.written_programs import WRITTEN, written
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.semantics import effects as effects_room
from thunder_mem.semantics.effects import COMMUNICATION
from thunder_mem.trace.reading import read_trace
from thunder_mem.trace.reordering import sort_bound_symbols

# Every layout of arguments, some of them aliases; values that the backward needs are overwritten; more
# writes and random numbers than usual.
# Without regions: Thunder's own checkpoints leave names undefined once its executors have claimed the trace.
EFFECTS = Profile(families=("elementwise", "view", "in-place", "random", "reduce"), regions=(), overwrites_needed=True)


@pytest.fixture(scope="module")
def anyhow() -> list[Traced]:
    """Programs that overwrite, alias and draw wherever they can."""
    return [*map(written, WRITTEN), *traced_programs(30, EFFECTS, seed=10_000)]


def values(trace, source, order, inputs):
    ran = run(replaced(trace, [*source.prefix, *(source.bsyms[i] for i in order), source.result]), inputs)
    return [*ran.returned, *(ran.tensors[p.name] for p in trace.args if isinstance(p, TensorProxy))]


@pytest.mark.slow
def test_any_legal_order_computes_the_same(anyhow):
    moved = 0
    for k, traced in enumerate(anyhow):
        source = read_trace(traced.trace)
        expected = values(traced.trace, source, range(len(source.graph)), traced.inputs)
        for seed in range(3):
            order = random_order(source.graph, Random(3 * k + seed))
            moved += order != sorted(order)
            actual = values(traced.trace, source, order, traced.inputs)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, t=traced: t.text)
    assert moved > len(anyhow)


@pytest.mark.slow
def test_the_quick_answer_about_effects_is_the_whole_one(anyhow, monkeypatch):
    bsyms = [b for traced in anyhow for trace in (traced.trace, claimed(traced.trace)) for b in body(trace)]
    quick = [effects_room.effects_of(b) for b in bsyms]
    plain = sum(map(effects_room._only_computes, bsyms))
    monkeypatch.setattr(effects_room, "_only_computes", lambda bsym: False)
    assert quick == [effects_room.effects_of(b) for b in bsyms]
    assert len(bsyms) // 4 < plain < len(bsyms)


@pytest.mark.slow
def test_hazards_are_ordered_and_writes_are_known(anyhow):
    """Who shares memory, and who overwrote it, is asked of the tensors as PyTorch ran the trace."""
    writes = 0
    for traced in anyhow:
        trace = claimed(traced.trace)
        source = read_trace(trace)
        ran = run(trace, traced.inputs)
        wrote = {id(b): storages for b, storages in zip(body(trace), ran.wrote, strict=True)}
        before = ordered(source.graph)
        touched = []
        for op, b in zip(source.graph.ops, source.bsyms, strict=True):
            names = [p.name for p in (*b.flat_proxy_args, *b.flat_proxy_outs) if p.name in ran.tensors]
            touched.append({ran.storage(n) for n in names})
            known = {ran.storage(n) for n in names if source.storage_of[n] in op.writes}
            assert wrote[id(b)] <= known, f"{op.name} of {traced.text}"
            writes += bool(wrote[id(b)])
            for earlier in range(op.index):
                first = source.bsyms[earlier]
                hazard = wrote[id(b)] & touched[earlier] or wrote[id(first)] & touched[op.index]
                assert not hazard or earlier in before[op.index], f"{first.sym.name}, {op.name} of {traced.text}"
    assert writes > 10


MAY_BE_VIEWS = {
    "reshape": lambda x: x.t().reshape(-1),
    "contiguous": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.t().flatten(),
    "dropout of nothing": lambda x: F.dropout(x.t(), 0.0),
}


@pytest.mark.parametrize("name", MAY_BE_VIEWS)
def test_what_is_a_view_for_some_strides_is_ordered_like_one(name):
    """`x.t().reshape(-1)` is a copy of a dense x, and a view of one that is itself transposed."""

    def fn(x):
        before = MAY_BE_VIEWS[name](x).sin()
        x.add_(1)
        return before.cos()

    source = read_trace(unfused(fn, torch.ones(3, 4)))
    (sin,) = (i for i, b in enumerate(source.bsyms) if b.sym.name == "sin")
    (write,) = (i for i, e in enumerate(source.effects) if e.writes)
    assert sin in ordered(source.graph)[write]
    assert set(source.graph.ops[sin].reads) <= source.overwritten


@pytest.mark.slow
def test_random_numbers_are_drawn_in_source_order(anyhow):
    drawn = 0
    for traced in anyhow:
        trace = claimed(traced.trace)
        source = read_trace(trace)
        drew = {id(b): d for b, d in zip(body(trace), run(trace, traced.inputs).drew, strict=True)}
        before = ordered(source.graph)
        random = [i for i, b in enumerate(source.bsyms) if drew[id(b)]]
        for i, effects in enumerate(source.effects):
            assert (i in random) == ("rng:cpu" in effects.channels), f"{source.bsyms[i].sym.name} of {traced.text}"
        assert all(a in before[b] for a, b in pairwise(random)), traced.text
        drawn += len(random) > 1
    assert drawn > 1


def test_random_numbers_of_two_devices_are_two_chains():
    trace = TraceCtx(None)
    with tracectx(trace):
        cpu, cuda = devices.cpu, devices.Device("cuda:1")
        drawn = [
            prims.uniform((4,), 0.0, 1.0, device=d, dtype=dtypes.float32) for d in (cpu, cuda, cpu, cuda, cuda, cpu)
        ]
        prims.python_return(drawn)
    source = read_trace(trace)
    assert source.graph.predecessors == ((), (), (0,), (1,), (3,), (2,))
    assert [s.device for s in source.graph.storages] == ["cpu", "cuda:1", "cpu", "cuda:1", "cuda:1", "cpu"]


def barrier_by_hand(prim):
    """`prim` in the middle of a trace, with work before and after it that nothing else orders."""
    trace = TraceCtx(None)
    with tracectx(trace):
        x = tensor("x", 4)
        trace.args = (x,)
        a = prims.sin(x)
        b = prim(x)
        prims.python_return((a, b, prims.cos(x)))
    return trace


@torch.library.custom_op("thunder_mem_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@noted.register_fake
def _(x):
    return torch.empty_like(x)


BARRIERS = {
    "print": lambda x: prims.python_print("half way"),
    "item": lambda x: prims.item(prims.sum(x, (0,))),
    "custom op": lambda x: thunder.torch._register_custom_op(noted)(x),
}


@pytest.mark.parametrize("claim", [False, True], ids=["open", "claimed"])
@pytest.mark.parametrize("name", BARRIERS)
def test_nothing_moves_across_a_barrier(name, claim):
    trace = barrier_by_hand(BARRIERS[name])
    source = read_trace(claimed(trace, [custom_op_ex]) if claim else trace)
    (at,) = (i for i, effects in enumerate(source.effects) if effects.barrier)
    before = ordered(source.graph)
    assert not source.effects[at].pure
    assert before[at] == set(range(at)) and at
    assert at == len(source.graph) - 2 and at in before[at + 1]


def test_an_item_of_a_users_function_is_a_barrier():
    source = read_trace(unfused(lambda x: x.sin() * x.sum().item() + x.cos(), torch.ones(4)))
    (at,) = (i for i, b in enumerate(source.bsyms) if b.sym.name == "item")
    before = ordered(source.graph)
    assert source.effects[at].barrier and before[at] == set(range(at))
    assert all(at in before[i] for i in range(at + 1, len(source.graph)))


def test_barriers_keep_their_order():
    def two(x):
        prims.python_print("a")
        prims.python_print("b")

    graph = read_trace(barrier_by_hand(two)).graph
    assert graph.predecessors == ((), (0,), (1,), (2,))


def test_a_write_is_no_barrier():
    def fn(x):
        y, z = x * 2, x * 3
        y.add_(1)
        return y, z.sin()

    source = read_trace(unfused(fn, torch.ones(3)))
    (at,) = (i for i, e in enumerate(source.effects) if e.writes)
    assert not source.effects[at].barrier
    (sin,) = (i for i, b in enumerate(source.bsyms) if b.sym.name == "sin")
    assert sin > at and at not in ordered(source.graph)[sin]


# ---- communication, on trace level ----


@pytest.mark.parametrize("claim", [False, True], ids=["open", "claimed"])
def test_collectives_of_all_groups_start_in_one_order_and_waits_follow_their_own(groups, claim):
    trace = two_groups(groups)
    source = read_trace(claimed(trace) if claim else trace)
    before = ordered(source.graph)
    assert 1 in before[2] and {1, 2} <= before[4]  # starts, whatever their group
    assert 2 in before[5] and 1 in before[6] and 4 in before[8]
    assert not {5, 6} & before[8] and 5 not in before[6]  # no wait waits for another
    assert not {1, 2, 4, 5, 6, 8} & (before[3] | before[7])  # what else there is moves freely
    assert [source.effects[i].channels for i in (1, 2, 4)] == [(COMMUNICATION,)] * 3
    assert not any(source.effects[i].pure for i in (5, 6, 8))


@pytest.mark.parametrize("claim", [False, True], ids=["open", "claimed"])
def test_a_reduction_in_place_overwrites_what_it_reduces(groups, claim):
    trace = in_place(groups[0])
    source = read_trace(claimed(trace) if claim else trace)
    (start,) = (i for i, e in enumerate(source.effects) if COMMUNICATION in e.channels)
    (read,) = (i for i, b in enumerate(source.bsyms) if b.sym.name == "cos")
    wait = next(
        b for b, e in zip(source.bsyms, source.effects, strict=True) if e.channels and COMMUNICATION not in e.channels
    )
    reduced = source.bsyms[start].args[0].name
    assert source.effects[start].writes == (reduced,)
    assert read in ordered(source.graph)[start]
    assert source.storage_of[wait.output.name] == source.storage_of[reduced]


def test_what_a_collective_reads_stays_until_its_wait(groups):
    source = read_trace(two_groups(groups))
    of = source.storage_of
    busy, first, a = (source.bsyms[i].output.name for i in (0, 1, 6))
    assert isinstance(source.bsyms[1].output, FutureTensorProxy)
    assert of[first] == of[a] != of[busy]
    assert source.graph.storages[of[a]].nbytes == 2 * 4 * 4 * 4
    assert price_order(source.graph).live_range(of[busy]) == (0, 6)


def test_the_backward_begins_with_the_gradients_of_the_outputs():
    """Also where Thunder computes what needs none of them first."""
    trace = unfused(torch.sin, torch.ones(3, requires_grad=True))
    graph = read_trace(trace).graph
    (given,) = (op.index for op in graph.ops if op.name == "get_grad")
    assert all(given in before for before in ordered(graph)[given + 1 :])
    *start, result = trace.bound_symbols
    start.sort(key=lambda b: b.sym.name == "get_grad")
    late = replaced(trace, [*start[:-2], start[-1], start[-2], result])
    assert [b.sym.name for b in body(sort_bound_symbols(late, "source"))][-3:] == ["get_grad", "cos", "mul"]
