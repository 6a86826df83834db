"""Every order is legal, never above the source's where that is promised, and does not depend on names."""

import pytest
from graphs import graphs, renamed, scaled
from hypothesis import given
from hypothesis import strategies as st

from thunder_mem.graph import GraphError, Op, Storage, make_graph
from thunder_mem.liveness import liveness, profile
from thunder_mem.sort_sift import settle, sift, toward_source
from thunder_mem.sorting import SORTS, register_sort, sort_graph
from thunder_mem.timeline import simulate

NEVER_ABOVE_THE_SOURCE = ("source", "sift", "window", "exact", "auto")


@given(graphs(30), st.sampled_from(sorted(SORTS)))
def test_every_sort_is_legal_and_priced_exactly(graph, name):
    result = sort_graph(graph, name)
    graph.check_order(result.order)
    assert result.peak_bytes == simulate(graph, result.order).peak_bytes
    assert result.source_peak_bytes == simulate(graph).peak_bytes
    if name in NEVER_ABOVE_THE_SOURCE:
        assert result.peak_bytes <= result.source_peak_bytes


@given(graphs(30), st.sampled_from(sorted(SORTS)))
def test_orders_scale_with_the_sizes_and_ignore_names(graph, name):
    order = sort_graph(graph, name).order
    assert sort_graph(scaled(graph, 3 << 30), name).order == order
    assert sort_graph(renamed(graph), name).order == order


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
    assert toward_source(live, order, simulate(graph).peak_bytes) == list(range(len(graph)))


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
