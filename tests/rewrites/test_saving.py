"""What the backward rebuilds: the least to keep by brute force, and gradients bit for bit on real traces."""

from dataclasses import replace
from itertools import chain, combinations
from math import inf
from random import Random
from types import SimpleNamespace

import pytest
import thunder
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thunder.core import prims
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.utils import AutocastStack
from thunder.transforms.autodiff import split_into_forward_and_backward
from torch.nn import functional as F

from tests.checking.graphs import Builder, graphs, scaled
from tests.checking.traces import run, traced_programs, unfused
from tests.fuzzing.configs import uncompiled_regions
from tests.programs.fusible import fusible
from tests.programs.generate import Profile
from thunder_mem import MemEfficient
from thunder_mem.decisions.loss_outside import rank_with_loss_outside
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.fusers.fusion_queries import fusibility
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph
from thunder_mem.partition.constraints import Constraints
from thunder_mem.partition.min_cut_partition import Exchange, min_cut_partition, saved_storages
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.rewrites.recompute import recompute_in_backward
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.reading import BACKWARD, read_trace

# ---- the least to keep, by trying every set ----


def with_backward(graph: Graph, seed: int) -> Graph:
    """The graph with its later part as the backward; a training graph keeps its own."""
    if any(op.backward for op in graph.ops):
        return graph
    start = Random(seed).randint(len(graph) // 2, len(graph))
    return replace(graph, ops=tuple(replace(op, backward=op.index >= start) for op in graph.ops))


def forward_storages(graph: Graph) -> list[int]:
    return [s for s, maker in enumerate(graph.allocator) if maker is not None and not graph.ops[maker].backward]


def kept_by(graph: Graph, rebuilt: frozenset[int]) -> set[int]:
    """The forward's storages that the backward touches, or that it needs to make `rebuilt`, and does not make."""
    touched = {s for op in graph.ops if op.backward for s in op.touches}
    touched |= {s for r in rebuilt for s in graph.ops[graph.allocator[r]].reads}
    return touched & set(forward_storages(graph)) - rebuilt


def price(graph: Graph, rebuilt: frozenset[int], repeat_s, byte_s: float = 1.0) -> float:
    kept = [s for s in kept_by(graph, rebuilt) if s not in graph.outputs and not graph.storages[s].held]
    work = sum(repeat_s[op] for op in {graph.allocator[s] for s in rebuilt})
    return byte_s * sum(graph.storages[s].nbytes for s in kept) + work


def every_set(graph: Graph, repeat_s) -> list[frozenset[int]]:
    may = [s for s in forward_storages(graph) if repeat_s[graph.allocator[s]] < inf]
    assume(len(may) <= 9)
    return [frozenset(c) for c in chain.from_iterable(combinations(may, k) for k in range(len(may) + 1))]


def drawn_graph(graph: Graph, seed: int) -> tuple[Graph, FusionCapabilities]:
    graph, fuse = fusible(with_backward(graph, seed), seed, often=0.95)
    assume({op.backward for op in graph.ops} == {False, True})
    return graph, fuse


@settings(max_examples=300)
@given(graphs(16), st.integers(0, 10**6))
@pytest.mark.slow
def test_the_least_is_kept_and_of_equals_the_least_rebuilt(graph, seed):
    graph, fuse = drawn_graph(graph, seed)
    repeat_s = [0.0 if cheap else inf for cheap in fuse.cheap]
    rebuilt = min_cut_partition(graph, fuse)
    sets = every_set(graph, repeat_s)
    least = min(price(graph, s, repeat_s) for s in sets)
    assert price(graph, rebuilt, repeat_s) == least
    assert all(rebuilt <= s for s in sets if price(graph, s, repeat_s) == least)
    assert saved_storages(graph, rebuilt) == kept_by(graph, rebuilt)


@pytest.mark.slow
@settings(max_examples=200)
@given(graphs(16), st.integers(0, 10**6), st.sampled_from((0.25, 1.0, 4.0)))
def test_under_prices_the_least_is_paid(graph, seed, byte_s):
    graph, fuse = drawn_graph(graph, seed)
    rng = Random(seed)
    repeat_s = [rng.choice((0.0, 1.0, 2.0, 5.0, inf)) for _ in graph.ops]
    rebuilt = min_cut_partition(graph, fuse, exchange=Exchange(repeat_s, byte_s))
    least = min(price(graph, s, repeat_s, byte_s) for s in every_set(graph, repeat_s))
    assert price(graph, rebuilt, repeat_s, byte_s) == pytest.approx(least, rel=1e-6)


@settings(max_examples=200)
@given(graphs(16), st.integers(0, 10**6))
def test_what_is_chosen_binds_the_rest_is_the_least(graph, seed):
    graph, fuse = drawn_graph(graph, seed)
    rng = Random(seed)
    needed = sorted(kept_by(graph, frozenset()) - graph.outputs)
    demanded = frozenset(s for s in needed if rng.random() < 0.3)
    keep = frozenset(s for s in forward_storages(graph) if s not in demanded and rng.random() < 0.3)
    offered = frozenset(s for s in forward_storages(graph) if rng.random() < 0.3)
    repeat_s = [0.0 if cheap else inf for cheap in fuse.cheap]
    for s in offered | demanded:
        repeat_s[graph.allocator[s]] = 0.0
    rebuilt = min_cut_partition(
        graph, fuse, Constraints(must_save=keep, must_recompute=demanded, may_recompute=offered)
    )
    sets = [s for s in every_set(graph, repeat_s) if not s & keep and not kept_by(graph, s) & demanded]
    assume(sets)
    assert rebuilt.isdisjoint(keep) and kept_by(graph, rebuilt).isdisjoint(demanded)
    assert price(graph, rebuilt, repeat_s) == min(price(graph, s, repeat_s) for s in sets)


@settings(max_examples=200)
@given(graphs(40), st.integers(0, 10**6))
def test_what_is_alive_anyway_or_overwritten_is_not_rebuilt(graph, seed):
    graph, fuse = drawn_graph(graph, seed)
    rebuilt = min_cut_partition(graph, fuse)
    overwritten = {s for op in graph.ops for s in op.writes}
    for s in rebuilt:
        maker = graph.ops[graph.allocator[s]]
        assert fuse.cheap[maker.index] and not maker.backward
        assert s not in graph.outputs and not graph.storages[s].held
        assert overwritten.isdisjoint(maker.touches)


@given(graphs(30), st.integers(0, 10**6))
def test_the_choice_scales_with_the_sizes(graph, seed):
    graph, fuse = drawn_graph(graph, seed)
    assert min_cut_partition(scaled(graph, 1 << 32), fuse) == min_cut_partition(graph, fuse)


def test_nothing_to_rebuild_without_a_backward():
    b = Builder()
    out = b.op((b.storage(8, held=True),), 64)
    graph = b.build(outputs=(out,))
    assert min_cut_partition(graph, FusionCapabilities((1,), (0,), 0, (True,), ((),))) == frozenset()


def test_two_views_of_one_storage_cost_it_once():
    """The backward reads an upcast of half of x and one of the other half: keeping x is as good as keeping either."""
    b = Builder()
    x = b.op((b.storage(8, held=True),), 100, name="matmul")
    wide = [b.op((x,), 100, name="upcast") for _ in range(2)]
    out = b.op(wide, 8, name="matmul")
    grads = [b.op((w, out), 8, backward=True) for w in wide]
    graph = b.build(outputs=(out, *grads))
    cheap = tuple(op.name == "upcast" for op in graph.ops)
    fuse = FusionCapabilities(tuple(map(int, cheap)), (0,) * 6, 0, cheap, ((), (0,), (0,), (1, 2), (1, 3), (2, 3)))
    assert min_cut_partition(graph, fuse) == set(wide)
    assert saved_storages(graph, frozenset(wide)) == {x, out}


# ---- on real traces ----


def mlp(x, w):
    h = F.gelu(x @ w)
    return F.layer_norm(h @ w.t(), (16,)).sigmoid() * x


def norms(x, w):
    def norm(y):
        y = y.float()
        return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    return F.silu(norm(x) @ w) * norm(w)


def views(x, w):
    a, b = (x @ w).chunk(2, -1)
    c = torch.cat([-b, a], -1).t().exp()
    return (c * c).sum(0), (a.sin() * b.cos()).sum(), c[::2]


def overwriting(x, w):
    y = (x @ w).sin()
    z = y.exp()
    y.mul_(2.0)
    return (y * z).cos().sum(), z.sin()


def drawing(x, w):
    y = F.dropout(x @ w, 0.5)
    return (y.exp() * torch.rand_like(x)).sin()


WRITTEN = {"mlp": mlp, "norms": norms, "views": views, "overwriting": overwriting, "drawing": drawing}


@pytest.fixture(scope="module")
def traces():
    found = []
    for fn in WRITTEN.values():
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(2)
            x, w = (torch.randn(16, 16, generator=generator).to(dtype).requires_grad_() for _ in range(2))
            found.append((unfused(fn, x, w), {"x": x, "w": w}, fn.__name__))
    profile = Profile(layouts=(), aliases=False, regions=())
    drawn = traced_programs(25, profile, seed=70_000)
    found += [(traced.trace, traced.inputs, traced.text) for traced in drawn]
    return [(trace, inputs, text, run(trace, inputs)) for trace, inputs, text in found if has_backward(trace)]


def has_backward(trace) -> bool:
    return any(b.sym == prims.get_grad for b in trace.bound_symbols)


def choices_of(source, seed: int) -> list[frozenset[int]]:
    """What the cut would rebuild, and some of all that may be rebuilt."""
    graph = source.graph

    def once(s: int) -> bool:
        return any(recompute_obstacle(source, op) for op in graph.users[s] if not graph.ops[op].backward)

    alive = graph.outputs | source.overwritten
    may = [s for s in forward_storages(graph) if s not in alive and not once(s)]
    rng = Random(seed)
    some = frozenset(s for s in may if rng.random() < 0.5)
    return [min_cut_partition(graph, fusibility(source, [mem_pointwise_ex])), some]


@pytest.mark.slow
def test_gradients_are_the_same_bit_for_bit(traces):
    changed = 0
    for k, (trace, inputs, text, ran) in enumerate(traces):
        source = read_trace(trace)
        for storages in choices_of(source, k):
            again = run(recompute_in_backward(source, trace, storages), inputs)
            torch.testing.assert_close(
                again.returned, ran.returned, rtol=0, atol=0, equal_nan=True, msg=lambda m, t=text: f"{t}\n{m}"
            )
            changed += bool(storages)
    assert changed > len(traces)


def saved_names(trace) -> set[str]:
    """What the forward hands to the backward, by Thunder's own split."""
    compiling = SimpleNamespace(executors_list=(), autocast_stack=AutocastStack(), is_grad_enabled=True)
    with compile_data_and_stats(compiling, None):
        forward, _ = split_into_forward_and_backward(trace)
    _, (tensors, _) = forward.bound_symbols[-1].args
    return {p.name for p in tensors}


@pytest.mark.slow
def test_thunder_saves_what_was_foreseen(traces):
    for k, (trace, _, text, _) in enumerate(traces):
        source = read_trace(trace)
        for storages in choices_of(source, k):
            new = recompute_in_backward(source, trace, storages)
            saved = {source.storage_of[name] for name in saved_names(new)}
            made = set(forward_storages(source.graph))
            needed = reached_back(source.graph, storages)
            # An output is named by its gradient too.
            assert saved & made - source.graph.outputs == saved_storages(source.graph, needed) - source.graph.outputs, (
                text
            )


def reached_back(graph: Graph, storages: frozenset[int]) -> frozenset[int]:
    """Those of `storages` that the backward really needs, through however many others of them."""
    found: set[int] = set()
    stack = [s for s in storages if any(graph.ops[op].backward for op in graph.users[s])]
    while stack:
        s = stack.pop()
        found.add(s)
        stack += [r for r in graph.ops[graph.allocator[s]].reads if r in storages and r not in found]
    return frozenset(found)


def names(proxies) -> set[str]:
    return {p.name for p in proxies}


@pytest.mark.slow
def test_what_is_repeated_is_new_belongs_to_the_backward_and_comes_once(traces):
    for k, (trace, _, text, _) in enumerate(traces):
        source = read_trace(trace)
        for storages in choices_of(source, k):
            new = recompute_in_backward(source, trace, storages)
            old = {n for b in trace.bound_symbols for n in names(b.flat_proxy_outs)}
            defined = [n for b in new.bound_symbols for n in names(b.flat_proxy_outs) - names(b.flat_proxy_args)]
            assert len(defined) == len(set(defined)), text
            fresh = [b for b in new.bound_symbols if names(b.flat_proxy_outs) - old]
            assert all(BACKWARD in b.tags for b in fresh)
            again = read_trace(new)
            read = read_trace(new, earlier=source)
            assert read.graph == again.graph, text
            answers = source, fusibility(source, [mem_pointwise_ex])
            assert fusibility(read, [mem_pointwise_ex], answers) == fusibility(again, [mem_pointwise_ex]), text
            assert all(again.graph.ops[again.producer_of[n]].backward for n in set(defined) - old)
            assert len(new.bound_symbols) == len(trace.bound_symbols) + len(fresh)
            makers = {source.graph.allocator[s] for s in reached_back(source.graph, storages)}
            computing = [b for b in fresh if again.graph.ops[again.producer_of[b.flat_proxy_outs[0].name]].allocates]
            assert len(computing) == len(makers), text
    assert traces


def test_of_a_program_that_overwrites_and_draws_the_rest_is_rebuilt():
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    source = read_trace(unfused(overwriting, x, w))
    rebuilt = min_cut_partition(source.graph, fusibility(source, [mem_pointwise_ex]))
    assert rebuilt.isdisjoint(source.overwritten)
    for s in rebuilt:
        assert source.overwritten.isdisjoint(source.graph.ops[source.graph.allocator[s]].reads)
    source = read_trace(unfused(drawing, x, w))
    rebuilt = min_cut_partition(source.graph, fusibility(source, [mem_pointwise_ex]))
    drawn = {s for op, e in zip(source.graph.ops, source.effects, strict=True) if e.channels for s in op.allocates}
    assert rebuilt and drawn and rebuilt.isdisjoint(drawn)


def test_nothing_to_rebuild_leaves_the_trace_as_it_is():
    x = torch.randn(4, 4, requires_grad=True)
    trace = unfused(lambda x: x.sin().exp(), x)
    source = read_trace(trace)
    assert list(recompute_in_backward(source, trace, ()).bound_symbols) == [
        *source.prefix,
        *source.bsyms,
        source.result,
    ]


@pytest.mark.parametrize(
    ("fn", "name", "reason"),
    [
        (lambda x: x + torch.rand_like(x), "uniform", "random"),
        (lambda x: torch.topk(x, 2)[0], "topk", "may differ"),
        (lambda x: (x * 2).add_(1), "copy_", "overwrites"),
        (lambda x: x.sin() + (x * x.sum().item()), "item", "more than compute"),
    ],
)
def test_what_must_run_only_once_says_why(fn, name, reason):
    source = read_trace(unfused(fn, torch.randn(4, 4)))
    (at,) = (i for i, b in enumerate(source.bsyms) if b.sym.name == name)
    assert reason in recompute_obstacle(source, at)
    assert all(
        recompute_obstacle(source, i) is None for i, b in enumerate(source.bsyms) if b.sym.name in ("sin", "sum")
    )


@pytest.mark.parametrize("width", (16, 4096))
def test_what_waits_for_the_callers_loss_counts_as_much_as_the_halves(width):
    """Logits that are wide: three times their gradient is alive beside what is saved, more than in either half."""
    x, w, v = (torch.randn(s, requires_grad=True) for s in ((64, 64), (64, 64), (64, width)))
    trace = unfused(lambda x, w, v: torch.tanh(x @ w) @ v, x, w, v)
    planned = plan_joint_trace(trace, (mem_pointwise_ex,), PlanningOptions())
    arguments = sum(t.nbytes for t in (x, w, v))
    waiting = arguments + 64 * 64 * 4 + 64 * width * 4  # what tanh made, and the logits
    with_loss, peak = rank_with_loss_outside(reuse=False)(planned)
    assert peak == planned.peak_bytes
    assert with_loss == max(peak, waiting + 3 * 64 * width * 4)
    assert (with_loss > peak) == (width == 4096)


def test_views_of_what_is_rebuilt_are_read_as_views_of_the_copy():
    """`h.t()` of a product's backward is a view of a view: of the forward's `h` before, of the rebuilt one after."""
    x = torch.randn(1, requires_grad=True)
    trace = unfused(lambda x: torch.outer(x.exp(), x) @ x.exp(), x)
    source = read_trace(trace)
    new = recompute_in_backward(source, trace, min_cut_partition(source.graph, fusibility(source, [mem_pointwise_ex])))
    assert read_trace(new, earlier=source).graph == read_trace(new).graph


def test_half_of_a_composite_that_nobody_reads_is_left_out():
    """`torch.max` gives two results; its dead one would read its input in the backward, which nothing saves."""

    def program(x, y):
        with torch.no_grad():
            _, index = torch.max(x, -2, keepdim=True)
        return index, torch.cat([-y[..., 2:], y[..., :2]], -1)

    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    jitted = thunder.jit(program, executors=["torchcompile"], transforms=[MemEfficient(strict=True, verify=True)])
    with uncompiled_regions():
        index, out = jitted(x, y)
    assert torch.equal(index, x.argmax(-2, keepdim=True))
    (grad,) = torch.autograd.grad(out.sum(), y)
    assert torch.equal(grad, torch.tensor([[1.0, 1.0, -1.0, -1.0]] * 3))
