"""`Graph` alone: hazards, orders, contraction and halves, on hand-made and generated graphs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checking.graphs import graphs, live_sets, oracle_bytes, shuffled, training
from thunder_mem.memory.graph import Graph, GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order


def _storages(*sizes: int, held: tuple[int, ...] = ()) -> list[Storage]:
    return [Storage(i, size, f"s{i}", held=i in held) for i, size in enumerate(sizes)]


def _touch(*ops: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> list[Op]:
    return [Op(i, name, reads, writes, allocates) for i, (name, reads, writes, allocates) in enumerate(ops)]


# ---- make_graph: hazards ----


def test_a_read_follows_what_made_it():
    graph = make_graph(_touch(("make", (), (), (0,)), ("read", (0,), (), ())), _storages(8))
    assert graph.predecessors == ((), (0,))


def test_a_write_follows_every_earlier_reader_and_precedes_every_later_one():
    ops = _touch(
        ("make", (), (), (0,)),
        ("r1", (0,), (), ()),
        ("r2", (0,), (), ()),
        ("write", (), (0,), ()),
        ("r3", (0,), (), ()),
    )
    graph = make_graph(ops, _storages(8))
    assert graph.predecessors == ((), (0,), (0,), (0, 1, 2), (3,))


def test_writes_to_one_storage_stay_in_order():
    graph = make_graph(
        _touch(("w1", (), (0,), ()), ("w2", (), (0,), ()), ("w3", (), (0,), ())), _storages(8, held=(0,))
    )
    assert graph.predecessors == ((), (0,), (1,))


def test_an_op_that_reads_and_writes_a_storage_waits_for_readers_but_not_for_itself():
    graph = make_graph(_touch(("read", (0,), (), ()), ("add_", (0,), (0,), ())), _storages(8, held=(0,)))
    assert graph.predecessors == ((), (0,))


def test_readers_of_an_input_are_free():
    graph = make_graph(_touch(("a", (0,), (), ()), ("b", (0,), (), ())), _storages(8, held=(0,)))
    assert graph.predecessors == ((), ())


def test_an_edge_is_kept_once():
    ops = _touch(("make", (), (), (0, 1)), ("read", (0, 1), (), ()))
    assert make_graph(ops, _storages(8, 8), [(0, 1), (0, 1)]).predecessors == ((), (0,))


@pytest.mark.parametrize(
    ("ops", "storages", "edges", "message"),
    [
        ([Op(1, "a")], [], [], r"op 'a' says index 1 but stands at 0"),
        ([Op(0)], [Storage(3, 8, "x")], [], r"storage 'x' says index 3 but stands at 0"),
        ([Op(0), Op(1)], [], [(1, 0)], r"edge 1 -> 0 does not follow the source order of 2 ops"),
        ([Op(0), Op(1)], [], [(0, 2)], r"edge 0 -> 2"),
        ([Op(0), Op(1)], [], [(-1, 1)], r"edge -1 -> 1"),
        ([Op(0), Op(1)], [], [(1, 1)], r"edge 1 -> 1"),
        ([Op(0, "a", allocates=(0,)), Op(1, "b", allocates=(0,))], _storages(8), [], r"storage 0 is allocated twice"),
        (
            [Op(0, "a", reads=(0,)), Op(1, "b", allocates=(0,))],
            _storages(8),
            [],
            r"'a' \(#0\) touches storage 0 before",
        ),
        (
            [Op(0, "a", writes=(0,)), Op(1, "b", allocates=(0,))],
            _storages(8),
            [],
            r"'a' \(#0\) touches storage 0 before",
        ),
    ],
)
def test_a_malformed_graph_is_refused_by_name(ops, storages, edges, message):
    with pytest.raises(GraphError, match=message):
        make_graph(ops, storages, edges)


# ---- check_order ----

DIAMOND = make_graph(
    _touch(("a", (), (), (0,)), ("b", (0,), (), (1,)), ("c", (0,), (), (2,)), ("d", (1, 2), (), (3,))),
    _storages(8, 8, 8, 8),
    outputs=[3],
)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 3, 2], r"breaks the edge c#2 -> d#3"),
        ([1, 0, 2, 3], r"breaks the edge a#0 -> b#1"),
        ([0, 1, 2], r"3 steps for 4 ops: d#3 is missing"),
        ([0, 1, 1, 2, 3], r"runs op b#1 twice, at steps 1 and 2"),
        ([0, 1, 2, 4], r"step 3 of the order holds 4"),
        ([0, 1, 2, -1], r"step 3 of the order holds -1"),
        ([0, 1, 2, 3.0], r"step 3 holds 3\.0"),
        ([False, 1, 2, 3], r"step 0 holds False"),
        ([0, 1, None, 3], r"step 2 holds None"),
    ],
)
def test_a_bad_order_is_refused_with_the_first_offender(order, message):
    with pytest.raises(GraphError, match=message):
        DIAMOND.check_order(order)


@given(graphs(), st.randoms(use_true_random=False))
def test_exactly_the_topological_orders_pass(graph: Graph, rng: random.Random):
    order = list(range(len(graph)))
    graph.check_order(order)
    rng.shuffle(order)
    position = {op: step for step, op in enumerate(order)}
    broken = [(p, op) for op in order for p in graph.predecessors[op] if position[p] > position[op]]
    if not broken:
        graph.check_order(order)
    else:
        with pytest.raises(GraphError, match=rf"#{broken[0][0]} -> \w*#{broken[0][1]}$"):
            graph.check_order(order)


@given(graphs())
def test_indices_of_a_graph_agree(graph: Graph):
    for op in range(len(graph)):
        assert all(op in graph.successors[p] for p in graph.predecessors[op])
        assert all(op in graph.predecessors[s] for s in graph.successors[op])
        assert list(graph.predecessors[op]) == sorted(set(graph.predecessors[op]))
    for s, users in enumerate(graph.users):
        assert list(users) == sorted({op.index for op in graph.ops if s in op.touches})
        assert graph.allocator[s] == next((op.index for op in graph.ops if s in op.allocates), None)


# ---- contract ----


def test_what_only_a_region_sees_disappears():
    region = DIAMOND.contract([(0, 1, 2, 3)])
    assert [s.name for s in region.storages] == ["s3"]
    assert region.ops[0].payload == (0, 1, 2, 3)
    assert (region.ops[0].reads, region.ops[0].allocates) == ((), (0,))
    assert region.outputs == {0}


def test_what_someone_outside_reads_stays():
    region = DIAMOND.contract([(0, 1)])
    assert [s.name for s in region.storages] == ["s0", "s1", "s2", "s3"]


def test_an_output_stays_though_nobody_reads_it():
    ops = _touch(("a", (), (), (0,)), ("b", (0,), (), (1,)))
    assert len(make_graph(ops, _storages(8, 8), outputs=[0, 1]).contract([(0, 1)]).storages) == 2


def test_an_input_that_nobody_touches_stays_in_the_bytes():
    graph = make_graph(_touch(("a", (), (), (1,)), ("b", (1,), (), (2,))), _storages(100, 8, 8, held=(0,)), outputs=[2])
    assert price_order(graph.contract([(0, 1)])).peak_bytes == 108


def test_a_region_writes_what_its_members_write_from_outside_alone():
    ops = _touch(("make", (), (), (1,)), ("inner_", (), (1,), ()), ("outer_", (1,), (0,), ()))
    region = make_graph(ops, _storages(8, 8, held=(0,))).contract([(0, 1, 2)])
    assert region.ops[0].writes == (0,)
    assert region.ops[0].reads == ()


def test_an_op_alone_makes_even_what_nobody_reads_and_a_region_does_not():
    """The indices of a pooling, say: while it runs unfused they exist."""
    ops = [Op(0, "pool", allocates=(0, 1)), Op(1, "act", reads=(0,), allocates=(2,))]
    graph = make_graph(ops, _storages(8, 100, 8), outputs=[2])
    assert price_order(graph.contract([])).live_bytes == price_order(graph).live_bytes == (108, 16)
    assert price_order(graph.contract([(0, 1)])).live_bytes == (8,)


def test_scratch_of_a_region_is_its_largest_members():
    ops = [Op(0, "a", allocates=(0,), scratch_bytes=5), Op(1, "b", reads=(0,), allocates=(1,), scratch_bytes=9)]
    assert make_graph(ops, _storages(8, 8), outputs=[1]).contract([(0, 1)]).ops[0].scratch_bytes == 9


def test_a_cycle_between_regions_is_refused_by_name():
    with pytest.raises(GraphError, match=r"cycle through a#0"):
        DIAMOND.contract([(0, 3)])
    with pytest.raises(GraphError, match=r"cycle"):
        ops = _touch(("a", (), (), (0,)), ("b", (), (), (1,)), ("c", (0,), (), (2,)), ("d", (1,), (), (3,)))
        make_graph(ops, _storages(8, 8, 8, 8), outputs=[2, 3]).contract([(0, 3), (1, 2)])


def test_a_hazard_makes_a_cycle_too():
    """The reader between two members of a region would have to run inside it."""
    ops = _touch(("add_", (), (0,), ()), ("read", (0,), (), (1,)), ("mul_", (), (0,), ()))
    with pytest.raises(GraphError, match="cycle"):
        make_graph(ops, _storages(8, 8, held=(0,)), outputs=[1]).contract([(0, 2)])


def test_an_op_in_two_regions_is_refused_by_name():
    with pytest.raises(GraphError, match=r"b#1 stands in two regions"):
        DIAMOND.contract([(0, 1), (1, 2)])
    with pytest.raises(GraphError, match=r"b#1 stands in two regions"):
        DIAMOND.contract([(1, 1)])


def test_a_region_of_both_halves_is_refused_by_name():
    graph = training(0, 1)
    first = next(op.index for op in graph.ops if op.backward)
    with pytest.raises(GraphError, match=r"mixes forward and backward: loss#\d+, loss_grad#\d+"):
        graph.contract([(first - 1, first)])


@pytest.mark.parametrize("group", [(), (4,), (-1,), (0, 7)])
def test_a_group_that_is_empty_or_names_no_op_is_refused(group):
    with pytest.raises(GraphError):
        DIAMOND.contract([group])


def test_contracted_graphs_run_the_forward_first():
    """Also where nothing but the phase orders two ops."""
    ops = [Op(0, "bw", allocates=(0,), backward=True), Op(1, "fw", allocates=(1,))]
    assert [op.name for op in make_graph(ops, _storages(8, 8), outputs=[0, 1]).contract([]).ops] == ["fw", "bw"]


@given(graphs(), st.randoms(use_true_random=False))
def test_contracting_nothing_keeps_every_order_and_its_price(graph: Graph, rng: random.Random):
    same = graph.contract([])
    assert [op.payload for op in same.ops] == [(i,) for i in range(len(graph))]
    assert same.predecessors == graph.predecessors
    assert price_order(same).live_bytes == price_order(graph).live_bytes
    assert price_order(shuffled(same, rng)).peak_bytes > 0 or not sum(s.nbytes for s in graph.storages)


def _random_groups(graph: Graph, rng: random.Random, most: int = 4) -> list[tuple[int, ...]]:
    """Disjoint groups that contract without a cycle, found by trial."""
    groups: list[tuple[int, ...]] = []
    free = list(range(len(graph)))
    for _ in range(6):
        group = tuple(rng.sample(free, min(len(free), rng.randint(1, most))))
        try:
            graph.contract([*groups, group] if group else groups)
        except GraphError:
            continue
        if group:
            groups.append(group)
            free = [op for op in free if op not in group]
    return groups


@given(graphs(), st.randoms(use_true_random=False))
def test_a_contracted_graph_is_a_graph(graph: Graph, rng: random.Random):
    groups = _random_groups(graph, rng)
    small = graph.contract(groups)
    assert sorted(m for op in small.ops for m in op.payload) == list(range(len(graph)))
    assert {op.payload for op in small.ops} >= {tuple(sorted(g)) for g in groups}
    assert [op.index for op in small.ops] == list(range(len(small)))
    assert [s.index for s in small.storages] == list(range(len(small.storages)))
    small.check_order(range(len(small)))
    home = {m: op.index for op in small.ops for m in op.payload}
    edges = {(home[p], home[op]) for op in range(len(graph)) for p in graph.predecessors[op]}
    assert {(p, op) for op in range(len(small)) for p in small.predecessors[op]} == {(a, b) for a, b in edges if a != b}
    backward = [op.backward for op in small.ops]
    if not any(a and not b for a, b in pairwise(backward)):
        assert [op.backward for op in small.ops] == sorted(backward)


@pytest.mark.slow
@given(graphs(), st.randoms(use_true_random=False))
def test_any_order_of_a_contracted_graph_is_one_of_the_members(graph: Graph, rng: random.Random):
    small = shuffled(graph.contract(_random_groups(graph, rng)), rng)
    graph.check_order([m for op in small.ops for m in op.payload])


@settings(max_examples=200)
@given(graphs(), st.randoms(use_true_random=False))
def test_a_region_holds_its_inputs_and_outputs_together_and_nothing_inside(graph: Graph, rng: random.Random):
    """Priced from the members alone: the live sets of the unfused order, seen through the regions."""
    small = graph.contract(_random_groups(graph, rng))
    order = [m for op in small.ops for m in op.payload]
    alive = live_sets(graph, order)
    steps = iter(alive)
    expected = []
    for op in small.ops:
        during = set().union(*(next(steps) for _ in op.payload))
        inner = {
            s
            for s, allocator in enumerate(graph.allocator)
            if len(op.payload) > 1
            and allocator in op.payload
            and s not in graph.outputs
            and set(graph.users[s]) <= set(op.payload)
        }
        expected.append(
            sum(graph.storages[s].nbytes for s in during - inner) + max(graph.ops[m].scratch_bytes for m in op.payload)
        )
    assert list(price_order(small).live_bytes) == expected
    assert expected == oracle_bytes(small, range(len(small)))


@given(graphs(), st.randoms(use_true_random=False))
@pytest.mark.slow
def test_contracting_twice_is_contracting_once(graph: Graph, rng: random.Random):
    first = graph.contract(_random_groups(graph, rng))
    groups = _random_groups(first, rng)
    twice = first.contract(groups)
    members = [tuple(sorted(m for r in op.payload for m in first.ops[r].payload)) for op in twice.ops]
    once = graph.contract([m for m in members if len(m) > 1])
    assert {op.payload for op in once.ops} == set(members)
    assert sorted(s.nbytes for s in once.storages) == sorted(s.nbytes for s in twice.storages)
    position = {op.payload: op.index for op in once.ops}
    assert price_order(once, [position[m] for m in members]).live_bytes == price_order(twice).live_bytes


# ---- half ----


@given(graphs(16), st.randoms(use_true_random=False))
def test_the_halves_price_as_the_whole(graph: Graph, rng: random.Random):
    joint = [op.index for op in graph.ops if not op.backward] + [op.index for op in graph.ops if op.backward]
    halves = [graph.half(False), graph.half(True)]
    order: list[int] = []
    live: list[int] = []
    for half in halves:
        small = shuffled(half, rng)
        order += [op.payload for op in small.ops]
        live += price_order(small).live_bytes
    assert sorted(order) == sorted(joint)
    assert tuple(live) == price_order(graph, order).live_bytes


@given(graphs(16))
def test_a_half_keeps_its_edges_and_names_its_ops(graph: Graph):
    for backward in (False, True):
        half = graph.half(backward)
        assert [op.payload for op in half.ops] == [op.index for op in graph.ops if op.backward == backward]
        for op in half.ops:
            source = graph.predecessors[op.payload]
            assert [half.ops[p].payload for p in half.predecessors[op.index]] == [
                p for p in source if graph.ops[p].backward == backward
            ]


def test_a_half_without_ops_still_has_what_the_caller_holds():
    graph = make_graph([Op(0, "f", reads=(0,), allocates=(1,))], _storages(8, 4, held=(0,)), outputs=[1])
    assert len(graph.half(True)) == 0
    assert price_order(graph.half(True)).peak_bytes == 12


def test_the_forward_keeps_what_only_the_backward_will_read():
    ops = [
        Op(0, "f", reads=(0,), allocates=(1, 2)),
        Op(1, "g", allocates=(3,)),
        Op(2, "b", reads=(1,), allocates=(4,), backward=True),
    ]
    graph = make_graph(ops, _storages(1, 10, 100, 1000, 10000, held=(0,)), outputs=[3, 4])
    assert price_order(graph.half(False)).live_bytes == (111, 1011)  # storage 2 dies at once
    assert price_order(graph.half(True)).live_bytes == (11011,)
