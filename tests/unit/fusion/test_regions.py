"""How regions grow, against brute force, a full simulation of every step, and Thunder's own neighbours."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from thunder.executors.data_dependent_partition import consecutive_fusion

from tests.checking.graphs import Builder, graphs, layered, oracle_optimum, shuffled
from tests.checking.traces import traced_programs, unfused
from tests.programs.fusible import fusible, fusible_graphs, values
from tests.programs.generate import Profile
from thunder_mem.fusers.fusion_queries import fusibility
from thunder_mem.fusion.contraction import (
    FusionCapabilities,
    consecutive_groups,
    contract_chains,
)
from thunder_mem.fusion.merging import _Merger, merge_for_speed
from thunder_mem.fusion.producer_duplication import MAX_CHAIN_SOURCES, MAX_CHAIN_VALUES, duplicate_cheap_producers
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.sorting import sort_graph
from thunder_mem.trace.reading import read_trace


def anything(graph: Graph, **facts: object) -> FusionCapabilities:
    """One executor that takes every op, save what `facts` say otherwise."""
    n = len(graph)
    operands = tuple(tuple(sorted({graph.allocator[s] for s in op.reads} - {None})) for op in graph.ops)
    return replace(FusionCapabilities((1,) * n, (0,) * n, 0, (False,) * n, operands), **facts)


def well_formed(graph: Graph, fuse: FusionCapabilities, groups) -> None:
    """Regions are apart, acyclic and of one half each (`contract` checks that), and someone may take them."""
    graph.contract(groups)
    assert all(fuse.joinable(group) for group in groups)
    assert all(list(group) == sorted(group) for group in groups)


# ---- which executors take what ----


@given(fusible_graphs(12), st.randoms(use_true_random=False))
def test_executors_of_a_group_by_definition(drawn, rng):
    graph, fuse = drawn
    ops = rng.sample(range(len(graph)), rng.randint(1, len(graph)))
    expected = {
        bit
        for bit in (1, 2)
        if all(fuse.takes[op] & bit for op in ops)
        and (not fuse.selective & bit or any(fuse.required[op] & bit for op in ops))
    }
    assert {bit for bit in (1, 2) if fuse.executors(ops) & bit} == expected
    growing = {bit for bit in (1, 2) if all(fuse.takes[op] & bit for op in ops)}
    assert {bit for bit in (1, 2) if fuse.joinable(ops) & bit} == growing
    copied = replace(fuse, copies=frozenset(ops[:1]))
    assert {bit for bit in (1, 2) if copied.joinable(ops) & bit} == expected


@given(fusible_graphs(20))
def test_consumers_mirror_operands(drawn):
    graph, fuse = drawn
    for op in range(len(graph)):
        assert list(fuse.consumers[op]) == [c for c in range(len(graph)) if op in fuse.operands[c]]


# ---- neighbours, as Thunder fuses them ----


@given(fusible_graphs(30))
def test_neighbours_are_maximal_runs(drawn):
    graph, fuse = drawn
    groups = consecutive_groups(graph, fuse)
    well_formed(graph, fuse, groups)
    assert all(group == tuple(range(group[0], group[-1] + 1)) for group in groups)
    assert {op for group in groups for op in group} == {op for op in range(len(graph)) if fuse.takes[op]}
    for group in groups:
        after = group[-1] + 1
        if after < len(graph) and graph.ops[after].backward == graph.ops[group[0]].backward:
            assert not fuse.joinable((*group, after))


def in_place(x, w):
    y = (x @ w).sin()
    z = y.cos() * 2
    y.add_(1)
    return z + y.exp(), w.tanh()


@pytest.mark.slow
def test_neighbours_of_real_traces_are_thunders_own():
    """In a trace that nothing writes to; where something does, what touches it is fused by nobody."""
    fused = 0
    profile = Profile(layouts=(), aliases=False, families=("elementwise", "reduce", "matmul", "view", "join"))
    for traced in traced_programs(15, profile, seed=30_000):
        source = read_trace(traced.trace)
        fuse = fusibility(source, [mem_pointwise_ex])
        ours = {tuple(map(id, (source.bsyms[i] for i in g))) for g in consecutive_groups(source.graph, fuse)}

        def takes(node):
            return all(mem_pointwise_ex.can_fuse(b) for b in node.group_bsyms)

        groups = consecutive_fusion(traced.trace, lambda a, b: takes(a) and takes(b))
        theirs = {tuple(map(id, g)) for g in groups if all(map(mem_pointwise_ex.can_fuse, g))}
        # Thunder also fuses across the line between the forward and the backward, and splits it afterwards.
        half = {id(b): op.backward for op, b in zip(source.graph.ops, source.bsyms, strict=True)}
        across = {g for g in theirs if len({half[b] for b in g}) > 1}
        assert theirs - across <= ours, traced.text
        assert all(any(set(g) <= set(a) for a in across) for g in ours - theirs), traced.text
        fused += len(theirs)
    assert fused > 20


def test_what_is_overwritten_is_fused_by_nobody():
    source = read_trace(unfused(in_place, *(torch.ones(4, 4) for _ in range(2))))
    fuse = fusibility(source, [mem_pointwise_ex])
    (write,) = (i for i, e in enumerate(source.effects) if e.writes)
    written = set(source.graph.ops[write].writes)
    touching = [op.index for op in source.graph.ops if written & set(op.touches)]
    assert len(touching) > 3 and not any(fuse.takes[i] or fuse.cheap[i] for i in touching)
    assert any(fuse.takes)


# ---- contraction ----


@settings(max_examples=300)
@given(fusible_graphs(30))
def test_contraction_only_merges(drawn):
    graph, fuse = drawn
    groups = contract_chains(graph, (), fuse)
    well_formed(graph, fuse, groups)
    start = consecutive_groups(graph, fuse)
    grown = contract_chains(graph, start, fuse)
    well_formed(graph, fuse, grown)
    home = {op: k for k, group in enumerate(grown) for op in group}
    assert all(len({home[op] for op in group}) == 1 for group in start)


def exact_optimum(graph: Graph) -> int:
    result = sort_graph(graph, "exact")
    assume(result.optimal)
    return result.peak_bytes


@settings(max_examples=400)
@given(graphs(7), st.integers(0, 10**6))
@pytest.mark.slow
def test_contraction_never_raises_the_best_peak_of_tiny_graphs(graph, seed):
    """All legal orders tried, before and after."""
    graph, fuse = fusible(graph, seed, often=0.95)
    assume(len(graph) <= 7)
    groups = contract_chains(graph, (), fuse)
    assume(groups and any(len(g) > 1 for g in groups))
    assert oracle_optimum(graph.contract(groups)) <= oracle_optimum(graph)


@pytest.mark.slow
@settings(max_examples=300)
@example(layered(24081, 9, 2), 1)  # a producer with a second result, which nobody reads
@given(graphs(14), st.integers(0, 10**6))
def test_contraction_never_raises_the_best_peak(graph, seed):
    graph, fuse = fusible(graph, seed, often=0.95)
    assert exact_optimum(graph.contract(contract_chains(graph, (), fuse))) <= exact_optimum(graph)


def test_a_producer_whose_input_only_it_may_free_is_left_apart():
    """`p` shrinks x, which `q`, in source order the later reader, can read first: contracted, x would stay."""
    b = Builder()
    x = b.storage(64)
    small = b.op((x,), 4, name="p")
    other = b.op((x,), 32, name="q")
    big = b.op((other,), 64, name="r")
    out = b.op((small, big), 4, name="c")
    graph = b.build(outputs=(out,))
    fuse = anything(graph, takes=(1, 0, 0, 1))
    assert contract_chains(graph, (), fuse) == ((0,), (3,))
    assert oracle_optimum(graph) < oracle_optimum(graph.contract([(0, 3)]))


def test_a_producer_whose_input_stays_anyway_is_contracted():
    """The same, but the consumer comes before the other reader in every order."""
    b = Builder()
    x = b.storage(64)
    small = b.op((x,), 4, name="p")
    out = b.op((small,), 4, name="c")
    last = b.op((x, out), 4, name="q")
    graph = b.build(outputs=(last,))
    assert contract_chains(graph, (), anything(graph, takes=(1, 1, 0))) == ((0, 1),)


def test_an_edge_without_data_keeps_a_producer_apart():
    """`q` must run after `p`; contracted, it would also have to wait for `c`."""
    b = Builder()
    x = b.storage(4, held=True)
    made = b.op((x,), 8, name="p")
    b.op((x,), 4, name="q")
    b.op((made,), 4, name="c")
    b.edges.append((0, 1))
    graph = b.build()
    assert contract_chains(graph, (), anything(graph, takes=(1, 0, 1))) == ((0,), (2,))


# ---- merging for speed ----


def members(regions: Graph, ops) -> list[int]:
    return sorted(m for op in ops for m in regions.ops[op].payload)


def started(drawn, rng) -> tuple[Graph, FusionCapabilities, Graph, list[int]]:
    """Contracted chains in a random legal order, forward first."""
    graph, fuse = drawn
    regions = graph.contract(contract_chains(graph, (), fuse))
    order = []
    for backward in (False, True):
        order += [op.payload for op in shuffled(regions.half(backward), rng).ops]
    return graph, fuse, regions, order


@settings(max_examples=200)
@given(fusible_graphs(30), st.randoms(use_true_random=False), st.integers(0, 3))
@pytest.mark.slow
def test_the_bookkeeping_of_merges_equals_a_full_simulation(drawn, rng, slack):
    """After every step: the bytes at each slot, the order, and the limit."""
    graph, fuse, regions, order = started(drawn, rng)
    before = price_order(regions, order)
    limit = before.peak_bytes * (4 + slack) // 4
    merger = _Merger(price_order(regions, order), fuse, None)
    for here in range(len(order)):
        merger.merge_from(here, lambda backward: limit)
        slots = [slot for slot, ops in enumerate(merger.slots) if ops]
        groups = [tuple(members(regions, merger.slots[slot])) for slot in slots]
        merged = graph.contract(groups)
        position = {op.payload: op.index for op in merged.ops}
        timeline = price_order(merged, [position[group] for group in groups])
        assert [merger.live_bytes[slot] for slot in slots] == list(timeline.live_bytes)
        assert timeline.peak_bytes <= limit
    assert merger.groups() == tuple(groups)


@pytest.mark.slow
@settings(max_examples=200)
@given(fusible_graphs(30), st.randoms(use_true_random=False))
def test_merging_keeps_each_half_within_its_allowance(drawn, rng):
    graph, fuse, regions, order = started(drawn, rng)
    peaks = [0, 0]
    for op, live in zip(order, price_order(regions, order).live_bytes, strict=True):
        peaks[regions.ops[op].backward] = max(peaks[regions.ops[op].backward], live)
    groups = merge_for_speed(price_order(regions, order), fuse, lambda backward: peaks[backward])
    well_formed(graph, fuse, [g for g in groups if len(g) > 1])
    merged = graph.contract(groups)
    position = {op.payload: op.index for op in merged.ops}
    run = [position[group] for group in groups]
    merged.check_order(run)
    assert len(groups) <= len(order)
    for op, live in zip(run, price_order(merged, run).live_bytes, strict=True):
        assert live <= peaks[merged.ops[op].backward]


@given(fusible_graphs(30), st.randoms(use_true_random=False))
def test_without_room_nothing_that_would_grow_is_merged_and_with_room_the_rest_is(drawn, rng):
    _, fuse, regions, order = started(drawn, rng)
    kept = merge_for_speed(price_order(regions, order), fuse, lambda backward: -1)
    assert kept == tuple(tuple(sorted(regions.ops[op].payload)) for op in order)
    merged = merge_for_speed(price_order(regions, order), fuse, lambda backward: 1 << 60)
    assert len(merged) <= len(kept)
    for group, after in pairwise(merged):  # neighbours that share data have merged
        touched = {s for op in (*group,) for s in _outside(regions, group, op)}
        shared = touched & {s for op in after for s in _outside(regions, after, op)}
        if regions_backward(regions, group) == regions_backward(regions, after) and fuse.joinable((*group, *after)):
            assert not shared


def _outside(regions: Graph, group, member: int) -> set[int]:
    return {s for op in regions.ops if member in op.payload for s in op.touches if regions.storages[s].nbytes > 8}


def regions_backward(regions: Graph, group) -> bool:
    return next(op.backward for op in regions.ops if group[0] in op.payload)


def test_a_merge_looks_on_from_where_it_came():
    """`a` and `b` share x, `b` and `c` share y: what `b` brings into the region draws `c` in as well."""
    b = Builder()
    x = b.storage(64, held=True)
    y = b.storage(64, held=True)
    outs = [b.op((x,), 16), b.op((x, y), 16), b.op((y,), 16)]
    graph = b.build(outputs=outs)
    assert merge_for_speed(price_order(graph.contract([])), anything(graph), lambda backward: 1 << 20) == ((0, 1, 2),)


def test_forward_and_backward_never_merge():
    b = Builder()
    x = b.storage(64, held=True)
    outs = [b.op((x,), 16), b.op((x,), 16, backward=True)]
    graph = b.build(outputs=outs)
    fuse = anything(graph)
    assert merge_for_speed(price_order(graph.contract([])), fuse, lambda backward: 1 << 20) == ((0,), (1,))
    assert consecutive_groups(graph, fuse) == ((0,), (1,))
    assert contract_chains(graph, (), fuse) == ((0,), (1,))


# ---- amplifiers ----


@settings(max_examples=300)
@given(fusible_graphs(30))
def test_absorbing_changes_no_value(drawn):
    """As expressions: every op that stands computes what it did, and so does every copy."""
    graph, fuse = drawn
    absorbed = duplicate_cheap_producers(graph, fuse)
    old = values(graph, fuse)
    assert values(absorbed.graph, absorbed.fuse, absorbed.origin) == [old[o] for o in absorbed.origin]


@settings(max_examples=300)
@given(fusible_graphs(30))
def test_what_absorbing_makes_is_well_formed(drawn):
    graph, fuse = drawn
    absorbed = duplicate_cheap_producers(graph, fuse)
    new, facts = absorbed.graph, absorbed.fuse
    well_formed(new, facts, absorbed.groups)
    standing = [o for i, o in enumerate(absorbed.origin) if i not in facts.copies]
    assert standing == sorted(set(standing))
    gone = set(range(len(graph))) - set(standing)
    assert all(fuse.cheap[op] and graph.outputs.isdisjoint(graph.ops[op].allocates) for op in gone)
    home = {op: group for group in absorbed.groups for op in group}
    for copy in facts.copies:
        assert fuse.cheap[absorbed.origin[copy]]
        (root,) = set(home[copy]) - facts.copies
        assert set(facts.consumers[copy]) <= set(home[copy])
        assert new.ops[copy].backward == new.ops[root].backward
        assert home[copy] == tuple(range(root - len(home[copy]) + 1, root + 1))  # just before it
    names = sorted(new.storages[s].name for s in new.outputs)
    assert names == sorted(graph.storages[s].name for s in graph.outputs)
    assert sorted(s.name for s, a in zip(new.storages, new.allocator, strict=True) if a is None) == sorted(
        s.name for s, a in zip(graph.storages, graph.allocator, strict=True) if a is None
    )


@given(fusible_graphs(30))
def test_nothing_cheap_nothing_copied(drawn):
    graph, fuse = drawn
    absorbed = duplicate_cheap_producers(graph, replace(fuse, cheap=(False,) * len(graph)))
    assert not absorbed.fuse.copies
    assert absorbed.graph == graph or absorbed.graph.predecessors == graph.predecessors


def chain(*sizes: int, sources: int = 1, last_reader_of_source: bool = False):
    """A value out of `sources` inputs through ops of these sizes; the last is unfusible and so reads what stands."""
    b = Builder()
    inputs = [b.op((b.storage(8, held=True),), 32, name="input") for _ in range(sources)]
    value = b.op(inputs, sizes[0], name="widen")
    for size in sizes[1:]:
        value = b.op((value,), size, name="narrow")
    out = b.op((value,), 8, name="matmul")
    outputs = [out]
    if last_reader_of_source:
        outputs.append(b.op(inputs, 8, name="matmul"))
    graph = b.build(outputs=outputs)
    cheap = tuple(op.name == "widen" for op in graph.ops)
    takes = tuple(int(op.name in ("widen", "narrow")) for op in graph.ops)
    return graph, anything(graph, takes=takes, cheap=cheap)


def copied(graph: Graph, fuse: FusionCapabilities) -> set[str]:
    absorbed = duplicate_cheap_producers(graph, fuse)
    return {absorbed.graph.ops[op].name for op in absorbed.fuse.copies}


@pytest.mark.parametrize(
    ("wide", "options", "absorbs"),
    [
        (64, {}, True),  # amplifies: 32 bytes kept a little longer, 64 not made
        (16, {}, False),  # shrinks
        (32, {}, False),  # as large: making it frees its source
        (16, {"last_reader_of_source": True}, True),  # the source stays anyway
        (1000, {"sources": MAX_CHAIN_SOURCES}, True),
        (1000, {"sources": MAX_CHAIN_SOURCES + 1}, False),  # reads too much
    ],
)
def test_what_amplifies_is_absorbed(wide, options, absorbs):
    assert copied(*chain(wide, 8, **options)) == ({"widen"} if absorbs else set())


def test_a_reader_at_every_link_of_a_long_chain_rebuilds_a_bounded_part_of_it():
    b = Builder()
    value = b.storage(8, held=True)
    sums = []
    for _ in range(20 * MAX_CHAIN_VALUES):
        value = b.op((value,), 8, name="sin")
        sums.append(b.op((value,), 1, name="sum"))
    graph = b.build(outputs=[*sums, b.op((value,), 8, name="matmul")])
    cheap = tuple(op.name == "sin" for op in graph.ops)
    fuse = anything(graph, takes=tuple(int(op.name != "matmul") for op in graph.ops), cheap=cheap)
    assert len(duplicate_cheap_producers(graph, fuse).graph) <= MAX_CHAIN_VALUES * len(graph)


def test_a_value_that_an_unfusible_op_wants_is_also_computed_for_it():
    graph, fuse = chain(64)
    absorbed = duplicate_cheap_producers(graph, fuse)
    assert not absorbed.fuse.copies and absorbed.graph == graph
