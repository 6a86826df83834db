"""The minimum cut: nothing is recomputed that no needed value is computed from, and no cut is cheaper."""

from itertools import combinations
from math import inf
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checking.graphs import training
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition.min_cut_partition import Exchange, min_cut_partition, saved_storages


def drawn(seed, layers):
    """A random graph whose operations cost nothing, something, or cannot run again."""
    graph, rng = training(seed, layers), Random(seed)
    nobody = (0,) * len(graph)
    fuse = FusionCapabilities(nobody, nobody, 0, (False,) * len(graph), ((),) * len(graph))
    return graph, fuse, Exchange([rng.choice((0.0, 1.0, 3.0, 20.0, inf)) for _ in graph.ops], 1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 12))
def test_all_that_is_recomputed_leads_to_needed_values(seed, layers):
    graph, fuse, exchange = drawn(seed, layers)
    rebuilt = min_cut_partition(graph, fuse, exchange=exchange)
    reached, stack = set(), [s for s in rebuilt if any(graph.ops[op].backward for op in graph.users[s])]
    while stack:
        if (s := stack.pop()) not in reached:
            reached.add(s)
            stack += [r for r in graph.ops[graph.allocator[s]].reads if r in rebuilt]
    assert reached == rebuilt


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_no_cut_is_cheaper(seed):
    graph, fuse, exchange = drawn(seed, 2)
    forward = [s for s, op in enumerate(graph.allocator) if op is not None and not graph.ops[op].backward]
    again = [s for s in forward if exchange.repeat_s[graph.allocator[s]] < inf]

    def price(rebuilt):
        ops = {graph.allocator[s] for s in rebuilt}
        kept = saved_storages(graph, rebuilt)
        free = (s in graph.outputs or graph.storages[s].held for s in kept)
        worth = sum(0 if is_free else graph.storages[s].nbytes for s, is_free in zip(kept, free, strict=True))
        return worth + sum(exchange.repeat_s[op] for op in ops)

    every = (frozenset(chosen) for n in range(len(again) + 1) for chosen in combinations(again, n))
    assert price(min_cut_partition(graph, fuse, exchange=exchange)) <= min(map(price, every)) + 1e-6
