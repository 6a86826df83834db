"""Bounds never exceed the optimum, and prove it where they should."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checking.graphs import graphs, layered, oracle_bytes, oracle_optimum, renamed, scaled, shuffled, training
from thunder_mem.memory.graph import Graph, GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.min_cut import CutNetwork
from thunder_mem.memory.running_set import liveness, profile
from thunder_mem.schedule.exact import solve, whole_graph
from thunder_mem.schedule.lower_bounds import Bound, certify, forced_bytes, lower_bound
from thunder_mem.sorting import sort_graph


@given(graphs(7))
def test_exact_equals_brute_force(graph):
    optimum = oracle_optimum(graph)
    found = sort_graph(graph, "exact")
    assert found.peak_bytes == optimum
    assert found.optimal
    # The search alone, without a seed that may already be optimal.
    live = liveness(graph)
    outcome = solve(live, whole_graph(live), 0, optimum + 1, 10**6)
    assert outcome.proven_bytes == optimum == max(oracle_bytes(graph, outcome.order))
    assert solve(live, whole_graph(live), 0, optimum, 10**6).order is None


@pytest.mark.slow
@given(graphs(30))
def test_bound_exact_auto_source_in_this_order(graph):
    auto, best = sort_graph(graph), sort_graph(graph, "exact")
    assert best.optimal
    assert best.peak_bytes <= auto.peak_bytes <= auto.source_peak_bytes
    if auto.optimal:
        assert auto.peak_bytes == best.peak_bytes
    for max_cuts, max_moves in ((0, 0), (3, 0), (1000, 0), (1000, 200), (1000, 10**6)):
        bound = lower_bound(graph, auto.order, max_cuts, max_moves)
        assert bound.bound_bytes <= best.peak_bytes
    assert certify(best.peak_bytes, lower_bound(graph, best.order, 1000, 10**6)).proven
    assert (bound.complete, bound.bound_bytes) == (True, best.peak_bytes)


def test_exact_claims_what_its_own_search_proves():
    graph = layered(5, 120)
    auto, best = sort_graph(graph), sort_graph(graph, "exact")
    assert best.peak_bytes == auto.peak_bytes
    assert (auto.optimal, best.optimal) == (False, True)


@given(graphs(24))
def test_a_search_cut_short_still_bounds(graph):
    live = liveness(graph)
    best = sort_graph(graph, "exact").peak_bytes
    for max_moves in (1, 5, 20, 80):
        outcome = solve(live, whole_graph(live), 0, best + 1, max_moves)
        assert outcome.proven_bytes <= best
        assert outcome.complete == (outcome.order is not None)


@settings(max_examples=50)
@given(graphs(20), st.integers(0, 1000), st.integers(0, 2))
def test_cuts_hold_in_every_order_and_are_attained(graph, seed, power):
    # Odd sizes up to 2**32 do not fit in the flow solver's 32 bits: two digits.
    rng = random.Random(seed)
    factor = 2 ** (13 * power)
    graph = replace(
        graph, storages=tuple(replace(s, nbytes=s.nbytes * factor + rng.randrange(factor)) for s in graph.storages)
    )
    live = liveness(graph)
    network = CutNetwork(live)
    forced = forced_bytes(live)
    source = profile(live, range(len(graph)))
    for op in range(len(graph)):
        least, ran = network.least_before(op)
        order = [
            *(o for o in range(len(graph)) if ran[o]),
            op,
            *(o for o in range(len(graph)) if not ran[o] and o != op),
        ]
        graph.check_order(order)
        cut = network.bound(op)
        assert cut == least + live.allocated_bytes[op] + live.scratch_bytes[op]
        assert cut == profile(live, order)[order.index(op)]
        assert forced[op] <= cut <= source[op]


def test_beyond_two_digits_the_bound_is_rounded_down():
    sizes = [2**62 + 1, 2**61 + 3, 1]
    storages = [Storage(i, size) for i, size in enumerate(sizes)]
    ops = [Op(0, reads=(), allocates=(0,)), Op(1, reads=(0,), allocates=(1,)), Op(2, reads=(1,), allocates=(2,))]
    graph = make_graph(ops, storages)
    bound = CutNetwork(liveness(graph)).bound(1)
    exact = sizes[0] + sizes[1]
    assert exact - 2**20 < bound <= exact


@given(st.integers(0, 10**6), st.integers(2, 30), st.booleans())
def test_training_shapes_are_proven_optimal(seed, layers, recompute):
    graph = training(seed, layers, recompute)
    result = sort_graph(graph)
    assert certify(result.peak_bytes, lower_bound(graph, result.order)).proven


def tree(seed: int, count: int) -> Graph:
    """Each value is read once, by a later op, which frees it; so no order is obvious."""
    rng = random.Random(seed)
    readers: list[list[int]] = [[] for _ in range(count)]
    for op in range(count - 1):
        readers[rng.randrange(op + 1, min(count, op + 30))].append(op)
    storages = [Storage(i, rng.choice((1, 3, 10, 40, 100)), f"v{i}", "cpu") for i in range(count)]
    ops = [Op(i, "op", tuple(readers[i]), (), (i,), scratch_bytes=rng.choice((0, 0, 50))) for i in range(count)]
    edges = [(before, i) for i, reads in enumerate(readers) for before in reads]
    return make_graph(ops, storages, edges, {count - 1})


def least_peak_of_tree(graph: Graph) -> int:
    """Liu's recursion, as he wrote it: each subtree is a list of hills and of the valleys that follow them."""
    made: dict[int, list[tuple[int, int]]] = {}
    for op in range(len(graph)):  # the source order is legal
        steps = []  # of all subtrees: how far each goes up and how far it stays up, the deepest descent first
        for child in graph.predecessors[op]:
            level = 0
            for hill, valley in made.pop(child):
                steps.append((hill - level, valley - level))
                level = valley
        now, walk = 0, []
        for up, stays in sorted(steps, key=lambda step: step[1] - step[0]):
            walk.append((now + up, now + stays))
            now += stays
        own = graph.storages[graph.ops[op].allocates[0]].nbytes
        walk.append((now + own + graph.ops[op].scratch_bytes, own))
        made[op] = []
        while walk:
            top = max(range(len(walk)), key=lambda i: (walk[i][0], i))
            bottom = min(range(top, len(walk)), key=lambda i: (walk[i][1], -i))
            made[op].append((walk[top][0], walk[bottom][1]))
            walk = walk[bottom + 1 :]
    (root,) = made.values()
    return root[0][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", (8, 120, 300, 800, 2000, pytest.param(8000, marks=pytest.mark.slow)))
def test_trees_of_any_size_are_proven_optimal(count):
    """By the algorithm of Liu (1987); greedy orders are above it, the more the longer the tree."""
    for seed in range(3 if count < 2000 else 1):
        graph = shuffled(tree(seed, count), random.Random(seed))
        result = sort_graph(graph)
        assert result.optimal and result.peak_bytes == max(oracle_bytes(graph, result.order))
        assert result.peak_bytes == least_peak_of_tree(graph)
        if count == 8:
            assert result.peak_bytes == oracle_optimum(graph)


def test_random_layered_graphs_are_mostly_proven_by_the_default_effort():
    proven = 0
    for seed in range(20):
        graph = layered(seed, 30 + seed % 19)
        result = sort_graph(graph)
        proven += certify(result.peak_bytes, lower_bound(graph, result.order)).proven
    assert proven >= 15


@pytest.mark.slow
@given(graphs(24))
def test_bounds_scale_and_ignore_names_and_the_source_order(graph):
    # Enough work to end the search: what is proven then does not depend on where it began.
    bound = lower_bound(graph, max_moves=10**6).bound_bytes
    assert lower_bound(scaled(graph, 3 << 30), max_moves=10**6).bound_bytes == (3 << 30) * bound
    assert lower_bound(renamed(graph), max_moves=10**6).bound_bytes == bound
    best = sort_graph(graph, "exact").order
    assert (
        lower_bound(shuffled(graph, random.Random(0)), max_moves=10**6).bound_bytes
        == price_order(graph, best).peak_bytes
    )


def test_refusals_and_edges():
    with pytest.raises(ValueError, match="5 bytes cannot lie below its bound of 6"):
        certify(5, Bound(6, "cut", True))
    graph = make_graph([Op(0, "a", allocates=(0,)), Op(1, "b", reads=(0,))], [Storage(0, 8)])
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        lower_bound(graph, [1, 0])
    with pytest.raises(ValueError, match="not -1 and 0"):
        lower_bound(graph, max_cuts=-1, max_moves=0)
    empty = make_graph([], [])
    assert certify(0, lower_bound(empty)) == certify(0, Bound(0, "footprint", True))
    assert certify(0, lower_bound(empty)).gap == 0.0
