"""The timeline equals the definition, on every shape of graph."""

import random
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checking.graphs import graphs, live_sets, oracle_bytes, shuffled
from thunder_mem.memory.graph import GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.running_set import RunningSet, liveness, profile


@given(graphs(), st.integers(0, 1000))
def test_simulate_equals_the_definition(graph, seed):
    order = [op.index for op in graph.ops]
    timeline = price_order(graph)
    assert timeline.order == tuple(order)
    assert list(timeline.live_bytes) == oracle_bytes(graph, order)
    assert timeline.peak_bytes == max(timeline.live_bytes) == timeline.live_bytes[timeline.peak_step]
    assert timeline.peak_bytes not in timeline.live_bytes[: timeline.peak_step]
    alive = live_sets(graph, order)
    step = seed % len(graph)
    assert set(timeline.alive_at(step)) == alive[step]
    sizes = [graph.storages[s].nbytes for s in timeline.alive_at(step)]
    assert sizes == sorted(sizes, reverse=True)
    for s in range(len(graph.storages)):
        born, dies = timeline.live_range(s)
        assert [t for t, sets in enumerate(alive) if s in sets] == list(range(born, dies + 1))


@given(graphs(), st.integers(0, 1000))
def test_another_source_order_is_another_order_of_the_same_graph(graph, seed):
    other = shuffled(graph, random.Random(seed))
    by_storage = [(op.reads, op.writes, op.allocates, op.name) for op in graph.ops]
    order = []
    for op in other.ops:
        order.append(by_storage.index((op.reads, op.writes, op.allocates, op.name)))
        by_storage[order[-1]] = None
    assert price_order(other).live_bytes == price_order(graph, order).live_bytes


@given(graphs(), st.booleans(), st.integers(0, 1000))
def test_time_runs_both_ways_and_back(graph, reverse, seed):
    """The frontier needs the same bytes at each op in either direction, and `undo` restores it."""
    rng = random.Random(seed)
    live = liveness(graph)
    frontier = RunningSet(live, reverse)
    order = reversed(range(len(graph))) if reverse else range(len(graph))
    needs = {}
    for op in order:
        state = deepcopy({k: v for k, v in vars(frontier).items() if k != "_live"})
        ready = frontier.ready()
        assert op in ready
        other = rng.choice(ready)
        unlocked = frontier.unlocks(other)
        assert set(unlocked) <= set(frontier.run(other))
        frontier.undo(other)
        assert {k: v for k, v in vars(frontier).items() if k != "_live"} == state
        needs[op] = frontier.now_bytes + frontier.appears[op] + live.scratch_bytes[op]
        frontier.run(op)
    assert [needs[op] for op in range(len(graph))] == profile(live, range(len(graph)))
    assert frontier.now_bytes == (live.start_bytes if reverse else live.end_bytes)


@given(graphs(), st.integers(0, 1000))
def test_contracted_graphs_are_priced_the_same_way(graph, seed):
    rng = random.Random(seed)
    groups, group = [], []
    for op in graph.ops:
        if group and (rng.random() < 0.5 or graph.ops[group[-1]].backward != op.backward):
            groups.append(group)
            group = []
        group.append(op.index)
    regions = graph.contract([*groups, group])
    timeline = price_order(regions)
    assert list(timeline.live_bytes) == oracle_bytes(regions, timeline.order)


def test_who_stays_and_who_dies():
    held, unused, freed = Storage(0, 1, held=True), Storage(1, 2), Storage(2, 4)
    middle, out, dead = Storage(3, 8), Storage(4, 16), Storage(5, 32)
    ops = [
        Op(0, "a", reads=(0, 2), allocates=(3,), scratch_bytes=64),
        Op(1, "b", reads=(3,), allocates=(4, 5)),
        Op(2, "c", writes=(4,)),
    ]
    timeline = price_order(make_graph(ops, [held, unused, freed, middle, out, dead], outputs=[4]))
    assert timeline.live_bytes == (1 + 2 + 4 + 8 + 64, 1 + 2 + 8 + 16 + 32, 1 + 2 + 16)
    assert [timeline.live_range(s) for s in range(6)] == [(0, 2), (0, 2), (0, 0), (0, 1), (1, 2), (1, 1)]
    assert timeline.alive_at(1) == (5, 4, 3, 1, 0)


def test_a_graph_without_ops():
    timeline = price_order(make_graph([], [Storage(0, 8), Storage(1, 2, held=True)]))
    assert (timeline.live_bytes, timeline.peak_bytes, timeline.peak_step) == ((), 10, -1)
    assert timeline.live_range(0) == (0, -1)


def test_refusals_name_the_offender():
    graph = make_graph([Op(0, "a", allocates=(0,)), Op(1, "b", reads=(0,))], [Storage(0, 8)])
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        price_order(graph, [1, 0])
    with pytest.raises(GraphError, match="b#1 is missing"):
        price_order(graph, [0])
    with pytest.raises(IndexError, match="step 2 of an order of 2"):
        price_order(graph).alive_at(2)
