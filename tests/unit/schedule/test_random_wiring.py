"""Orders of randomly wired networks are optimal or nearly so, and never above those that annealing finds."""

import pytest

from tests.checking.random_wiring import ALIKE, MIXED, annealed_bytes, forward, mirrored, mirrored_by_edges
from thunder_mem.schedule.lower_bounds import certify, lower_bound
from thunder_mem.schedule.registry import sort_graph


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", (ALIKE, MIXED), ids=("alike", "mixed"))
@pytest.mark.parametrize("make", (forward, mirrored))
def test_orders_of_randomly_wired_networks_are_optimal_or_nearly(make, sizes):
    proven = 0
    for seed in range(4):
        graph = make(seed, sizes)
        result = sort_graph(graph)
        certificate = certify(result.peak_bytes, lower_bound(graph, result.order))
        assert result.peak_bytes < result.source_peak_bytes and certificate.gap < 0.01
        proven += certificate.proven
    assert proven >= 3


@pytest.mark.slow
@pytest.mark.parametrize("make", (forward, mirrored, mirrored_by_edges))
@pytest.mark.parametrize("seed", range(4, 10))
def test_no_order_is_above_that_of_annealing(make, seed):
    graph = make(seed, MIXED)
    assert sort_graph(graph).peak_bytes <= annealed_bytes(graph, 20_000)
