"""What a move would do, asked and done, equals a full simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checking.graphs import graphs
from thunder_mem.memory.graph import GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.what_if import WhatIf


@given(graphs(24), st.data())
def test_every_legal_move_equals_a_full_simulation(graph, data):
    what_if = WhatIf(graph)
    for _ in range(4):
        order = list(what_if.order)
        start = data.draw(st.integers(0, len(order) - 1))
        stop = data.draw(st.integers(start + 1, min(len(order), start + 5)))
        earliest, latest = what_if.reach(start, stop)
        assert earliest <= start <= latest
        for to in range(len(order) - (stop - start) + 1):
            rest = order[:start] + order[stop:]
            moved = [*rest[:to], *order[start:stop], *rest[to:]]
            if earliest <= to <= latest:
                assert what_if.peak_if_moved(start, stop, to) == price_order(graph, moved).peak_bytes
            else:
                with pytest.raises(GraphError):
                    price_order(graph, moved)
                with pytest.raises(GraphError, match="the move breaks the edge"):
                    what_if.peak_if_moved(start, stop, to)
        assert what_if.order == tuple(order)
        to = data.draw(st.integers(earliest, latest))
        what_if.move(start, stop, to)
        rest = order[:start] + order[stop:]
        timeline = price_order(graph, [*rest[:to], *order[start:stop], *rest[to:]])
        assert (what_if.order, what_if.live_bytes) == (timeline.order, timeline.live_bytes)
        assert what_if.peak_bytes == timeline.peak_bytes


def test_refusals_name_the_offender():
    ops = [Op(0, "a", allocates=(0,)), Op(1, "b", reads=(0,)), Op(2, "c")]
    what_if = WhatIf(make_graph(ops, [Storage(0, 8)]))
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        what_if.peak_if_moved(1, 2, to=0)
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        what_if.move(0, 1, to=2)
    with pytest.raises(ValueError, match="steps 2 to 2 are no stretch of an order of 3"):
        what_if.peak_if_moved(2, 2, to=0)
    with pytest.raises(ValueError, match="cannot begin at step 2 of 3"):
        what_if.move(0, 2, to=2)
    with pytest.raises(GraphError, match="a#0 -> b#1"):
        WhatIf(what_if.graph, [1, 0, 2])
    assert what_if.order == (0, 1, 2)


def test_a_graph_without_ops():
    assert WhatIf(make_graph([], [Storage(0, 8)])).peak_bytes == 8
