"""Copies to the host and back take the time that no other work hides."""

from types import SimpleNamespace

import pytest

from tests.checking.graphs import Builder
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.partition.transfer_windows import moves_of


def program():
    """Three forward steps and their backward; `early` is read again only through `remade`."""
    b = Builder()
    early = b.op((b.storage(8, held=True),), 8)
    remade = b.op((early,), 8)
    late = b.op((remade,), 8)
    end = b.op((late,), 8)
    grad = b.op((end,), 8, backward=True)
    grad = b.op((grad, late), 8, backward=True)
    b.op((grad, remade), 8, backward=True)
    return b.build(), early, remade, late


def a_link(seconds):
    """A device whose copies of 8 bytes take so many seconds."""
    return SimpleNamespace(copy_seconds=lambda nbytes: nbytes / 8 * seconds)


def test_nothing_is_exposed_where_copies_are_as_short_as_the_work_beside_them():
    graph, early, remade, late = program()
    moves = moves_of(graph, {early, remade, late}, [1.0] * len(graph), a_link(0.5))
    assert moves.movable == {early, remade, late}
    assert moves.exposed_seconds(moves.movable) == moves.exposed_seconds(()) == 0.0


@pytest.mark.parametrize(
    ("names", "exposed"),
    # After `late` is made one second of the forward is left, and its use is one second into the backward.
    [("late", 1 + 1), ("remade", 0 + 0), ("early", 0 + 0), ("remade late", 2 + 2), ("early remade late", 3 + 4)],
)
def test_the_rest_of_long_copies_is_exposed_on_both_ways(names, exposed):
    graph, early, remade, late = program()
    values = {"early": early, "remade": remade, "late": late}
    moves = moves_of(graph, set(values.values()), [1.0] * len(graph), a_link(2))
    chosen = frozenset(values[name] for name in names.split())
    assert moves.exposed_seconds(chosen) == exposed
    nobody = (0,) * len(graph)
    fuse = FusionCapabilities(nobody, nobody, 0, (False,) * len(graph), ((),) * len(graph))
    problem = PartitionProblem(graph, fuse, [5.0] * len(graph), moves=moves)
    assert problem.seconds(frozenset(), chosen) == exposed
    assert problem.seconds(frozenset({end_of(graph)}), chosen) == exposed + 5


def end_of(graph):
    """The last value that the forward makes."""
    return max(s for op in graph.ops if not op.backward for s in op.allocates)


def test_less_work_between_making_and_use_is_more_haste():
    graph, early, remade, late = program()
    moves = moves_of(graph, {early, remade, late}, [1.0] * len(graph), a_link(1))
    assert 1.0 == moves.haste[early] < moves.haste[remade] < moves.haste[late] < 2.0
