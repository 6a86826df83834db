"""Every order is legal, never above the source's where that is promised, and does not depend on names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checking.graphs import Builder, graphs, layered, recomputed_chains, renamed, reordered, scaled, training
from thunder_mem.memory.graph import GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.running_set import liveness, profile
from thunder_mem.schedule.lower_bounds import lower_bound
from thunder_mem.schedule.portfolio import exact
from thunder_mem.schedule.sift import settle, sift, toward_source
from thunder_mem.schedule.window import lower_peak
from thunder_mem.sorting import SORTS, register_sort, sort_graph

NEVER_ABOVE_THE_SOURCE = ("source", "sift", "window", "exact", "auto")


@given(graphs(30), st.sampled_from(sorted(SORTS)))
def test_every_sort_is_legal_and_priced_exactly(graph, name):
    result = sort_graph(graph, name)
    graph.check_order(result.order)
    assert result.peak_bytes == price_order(graph, result.order).peak_bytes
    assert result.source_peak_bytes == price_order(graph).peak_bytes
    if name in NEVER_ABOVE_THE_SOURCE:
        assert result.peak_bytes <= result.source_peak_bytes


@given(graphs(30), st.sampled_from(sorted(SORTS)))
def test_orders_scale_with_the_sizes_and_ignore_names(graph, name):
    order = sort_graph(graph, name).order
    assert sort_graph(scaled(graph, 3 << 30), name).order == order
    assert sort_graph(renamed(graph), name).order == order


@pytest.mark.parametrize("name", sorted(SORTS))
def test_a_registered_function_gives_the_order_of_its_name(name):
    graph = training(0, 4, recompute=True)
    assert tuple(SORTS[name](graph)) == sort_graph(graph, name).order


@given(graphs(30), st.booleans())
def test_a_pass_under_the_present_peak_never_raises_it(graph, reverse):
    live = liveness(graph)
    order = sort_graph(graph, "bfs").order
    peak = max(profile(live, order))
    settled, reached = settle(live, order, peak, reverse)
    graph.check_order(settled)
    assert reached == max(profile(live, settled)) <= peak


@given(graphs(30))
def test_toward_source_keeps_the_peak_and_is_idempotent(graph):
    live = liveness(graph)
    order, peak = sift(live, sort_graph(graph, "dfs").order)
    near = toward_source(live, order, peak)
    graph.check_order(near)
    assert max(profile(live, near)) <= peak
    assert toward_source(live, near, peak) == near
    assert toward_source(live, order, price_order(graph).peak_bytes) == list(range(len(graph)))


@given(graphs(30))
def test_auto_leaves_the_source_order_unless_it_wins_and_is_idempotent(graph):
    result = sort_graph(graph)
    if result.peak_bytes == result.source_peak_bytes:
        assert result.order == tuple(range(len(graph)))
    planned = reordered(graph, result.order)
    again = sort_graph(planned)
    assert again.peak_bytes <= result.peak_bytes
    if result.optimal:
        assert again.order == tuple(range(len(graph)))


@given(graphs(30), st.integers(1, 400))
def test_exact_cut_short_is_legal_and_claims_nothing_false(graph, max_moves):
    live = liveness(graph)
    found = exact(live, max_moves)
    graph.check_order(found.order)
    assert found.peak_bytes == price_order(graph, found.order).peak_bytes
    best = sort_graph(graph, "exact").peak_bytes
    assert found.peak_bytes == best if found.optimal else found.peak_bytes >= best


@given(st.integers(0, 10**6), st.integers(0, 300))
@pytest.mark.slow
def test_windows_lower_the_peak_of_large_graphs_within_their_work(seed, max_moves):
    graph = layered(seed, 150)
    live = liveness(graph)
    order, peak = sift(live, range(len(graph)))
    lowered = lower_peak(live, order, max_moves=100 * max_moves, window_moves=2_000)
    graph.check_order(lowered.order)
    assert lowered.peak_bytes == price_order(graph, lowered.order).peak_bytes <= peak
    # One window's work at most beyond the limit, of which the search counts every move.
    assert lowered.moves <= 100 * max_moves + 2_000


def test_paths_run_one_after_the_other():
    """Issue #1337: ten paths, all opened before the first is closed; one at a time needs 3 values."""
    b = Builder()
    x = b.storage(4, held=True)
    opened = [b.op((x,), 4, name="open") for _ in range(10)]
    closed = [b.op((t,), 1, name="close") for t in opened]
    graph = b.build(outputs=closed)
    result = sort_graph(graph)
    assert result.source_peak_bytes == 4 + 10 * 4 + 1
    assert result.peak_bytes == 4 + 4 + 10
    assert result.optimal


def test_sift_repairs_what_greedy_leaves_early():
    """A recomputing training step: the source recomputes everything first, sift one layer at a time."""
    graph = training(0, 8, recompute=True)
    peaks = {name: sort_graph(graph, name).peak_bytes for name in ("source", "lpmf", "bfs", "sift", "exact")}
    assert peaks["sift"] == peaks["exact"] < min(peaks["source"], peaks["lpmf"], peaks["bfs"])


def test_a_recomputed_chain_sinks_as_a_whole():
    for seed in range(3):
        graph = recomputed_chains(seed, 20)
        live = liveness(graph)
        by_op = sift(live, range(len(graph)), lookahead=0)[1]
        order, by_chain = sift(live, range(len(graph)))
        assert by_chain == price_order(graph, order).peak_bytes
        bound = lower_bound(graph, max_moves=0).bound_bytes
        assert by_chain < 1.15 * bound < by_op
        assert sort_graph(graph).peak_bytes < 1.03 * bound


def pair():
    return make_graph(
        [Op(0, "a", allocates=(0,)), Op(1, "b", reads=(0,)), Op(2, "c")], [Storage(0, 8), Storage(1, 2, held=True)]
    )


def test_a_developers_function_is_checked():
    assert sort_graph(pair(), lambda graph: [2, 0, 1]).order == (2, 0, 1)

    def mine(graph):
        return iter((0, 2, 1))

    assert sort_graph(pair(), mine).algorithm == "mine"
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        sort_graph(pair(), lambda graph: [1, 0, 2])
    with pytest.raises(TypeError, match="not a sequence of op indices"):
        sort_graph(pair(), lambda graph: None)
    with pytest.raises(TypeError, match="not 3"):
        sort_graph(pair(), 3)
    with pytest.raises(ValueError, match=r"unknown sort 'fastest'; known are source, lpmf, .*auto"):
        sort_graph(pair(), "fastest")


def test_the_registry():
    with pytest.raises(ValueError, match="'auto' is empty or taken"):
        register_sort("auto", list)
    with pytest.raises(TypeError, match="not 'text'"):
        register_sort("text", "text")
    with pytest.raises(TypeError, match="a string, not 1"):
        register_sort(1, list)
    name = "test_sorting.last_first"
    register_sort(name, lambda graph: [2, 0, 1])
    assert sort_graph(pair(), name).algorithm == name
    assert name in SORTS
    with pytest.raises(TypeError):
        SORTS["other"] = list
