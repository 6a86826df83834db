"""Starts move up and waits move down behind computation, under a limit, and nothing else changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checking.collectives import sharded_layers
from tests.checking.graphs import Builder
from tests.checking.orders import random_order
from thunder_mem.distributed.link_model import Collective, exposed_s
from thunder_mem.distributed.overlap_scheduling import overlapped
from thunder_mem.memory.live_ranges import price_order

PROGRAMS = st.tuples(st.integers(0, 10_000), st.integers(1, 8), st.booleans())


def _peaks(graph, order):
    peaks = [0, 0]
    for op, live in zip(order, price_order(graph, order).live_bytes, strict=True):
        peaks[graph.ops[op].backward] = max(peaks[graph.ops[op].backward], live)
    return tuple(peaks)


@given(PROGRAMS, st.randoms(use_true_random=False), st.floats(0, 2))
def test_the_limit_holds_and_computation_keeps_its_order(program, rng, share):
    graph, collectives, seconds = sharded_layers(*program)
    order = random_order(graph, rng)
    before = _peaks(graph, order)
    limits = tuple(int(share * p) for p in before)
    new = overlapped(graph, order, seconds, collectives, limits)
    graph.check_order(new)
    moving = {c.start for c in collectives} | {c.wait for c in collectives}
    assert [op for op in new if op not in moving] == [op for op in order if op not in moving]
    assert all(now <= max(was, most) for now, was, most in zip(_peaks(graph, new), before, limits, strict=True))
    assert exposed_s(new, seconds, collectives) <= exposed_s(order, seconds, collectives)


@given(PROGRAMS)
def test_with_room_for_all_a_backward_or_forward_hides_what_can_be_hidden(program):
    """No order hides more than one that starts every gather at once and waits for all reductions at the end."""
    graph, collectives, seconds = sharded_layers(program[0], program[1])
    order = list(range(len(graph)))
    first = [c.start for c in collectives]
    eager = first + [op for op in order if op not in first]
    graph.check_order(eager)
    new = overlapped(graph, order, seconds, collectives, (10**9, 10**9))
    assert exposed_s(new, seconds, collectives) <= exposed_s(eager, seconds, collectives) + 1e-9


def _two_layers():
    """Gather, compute 3 s, gather 2 s, compute; weights of 8 bytes, values of 1."""
    b = Builder()
    shards = [b.storage(2, held=True) for _ in range(2)]
    value = b.storage(1, held=True)
    weights = []
    for i, shard in enumerate(shards):
        weights.append(b.op((shard,), 8))  # 0, 4
        b.op((weights[-1], shard))  # 1, 5
        for took in (1, 2):
            value = b.op((value, weights[-1]), 1)
            b.edges.append((len(b.ops) - 2 - (took == 2), len(b.ops) - 1))
        if i:
            b.edges.append((0, 4))
    graph = b.build([value])
    collectives = [Collective(0, 1, 1.0, True), Collective(4, 5, 2.0, True)]
    return graph, collectives, [0, 0, 1, 2, 0, 0, 1, 1]


def test_a_gather_starts_no_earlier_than_it_has_to():
    graph, collectives, seconds = _two_layers()
    assert overlapped(graph, range(8), seconds, collectives, (100, 100)) == [0, 1, 2, 4, 3, 5, 6, 7]


def test_a_gather_waits_for_memory():
    graph, collectives, seconds = _two_layers()
    least = price_order(graph).peak_bytes
    assert overlapped(graph, range(8), seconds, collectives, (least, least)) == list(range(8))


def test_a_gather_that_came_too_early_comes_later():
    graph, collectives, seconds = _two_layers()
    early = [0, 4, 1, 2, 3, 5, 6, 7]
    new = overlapped(graph, early, seconds, collectives, (100, 100))
    assert new == [0, 1, 2, 4, 3, 5, 6, 7]
    assert price_order(graph, new).live_bytes[2] < price_order(graph, early).live_bytes[3]


def _gradients():
    """Two gradients of 8 bytes, reduced to 2, with 1 s of computation behind each."""
    b = Builder()
    value = b.storage(1)
    outputs = []
    for i in range(2):
        gradient = b.op((value,), 8, backward=True)  # 0, 4
        outputs.append(b.op((gradient,), 2, backward=True))  # 1, 5
        b.op((outputs[-1], gradient), backward=True)  # 2, 6
        b.edges.append((4 * i + 1, 4 * i + 2))
        value = b.op((value,), 1, backward=True)  # 3, 7
    b.edges.append((1, 5))
    return b.build([*outputs, value]), [Collective(1, 2, 1.0, False), Collective(5, 6, 1.0, False)]


def test_a_reduction_is_waited_for_when_it_has_ended_if_memory_allows():
    graph, collectives = _gradients()
    seconds = [0, 0, 0, 1, 0, 0, 0, 1]
    least = price_order(graph).peak_bytes
    late = overlapped(graph, range(8), seconds, collectives, (0, least + 8))
    assert late == [0, 1, 3, 2, 4, 5, 7, 6] and exposed_s(late, seconds, collectives) == 0
    tight = overlapped(graph, range(8), seconds, collectives, (0, least))
    assert price_order(graph, tight).peak_bytes == least
    assert exposed_s(tight, seconds, collectives) <= exposed_s(range(8), seconds, collectives)


def test_a_reduction_starts_as_soon_as_its_gradient_is_there():
    graph, collectives = _gradients()
    late = [0, 3, 4, 7, 1, 2, 5, 6]
    new = overlapped(graph, late, [0, 0, 0, 1, 0, 0, 0, 1], collectives, (0, 100))
    assert new.index(1) == 1 and new.index(5) < new.index(7)


@pytest.mark.parametrize("at_end", [False, True])
def test_what_is_not_hidden_is_the_time_that_computation_stands_still(at_end):
    gather = Collective(0, 3 if at_end else 1, 3.0, True)
    assert exposed_s(range(4), [0, 1, 1, 0], [gather]) == (1.0 if at_end else 3.0)


def test_collectives_share_the_link():
    both = [Collective(0, 3, 2.0, True), Collective(1, 4, 2.0, True)]
    assert exposed_s(range(5), [0, 0, 1, 0, 0], both) == 3.0


def test_random_programs_are_not_trivial():
    moved = 0
    for seed in range(30):
        graph, collectives, seconds = sharded_layers(seed, 6, True)
        order = random_order(graph, random.Random(seed))
        moved += overlapped(graph, order, seconds, collectives, (10**6, 10**6)) != order
    assert moved > 20
