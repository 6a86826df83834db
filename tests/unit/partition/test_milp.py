"""The integer program chooses between work and copies that nothing hides."""

import pytest

from tests.checking.graphs import Builder
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition.milp import solve
from thunder_mem.partition.milp_memory_rows import MemoryRow, MilpVariables
from thunder_mem.partition.transfer_windows import Moves, Window


@pytest.mark.parametrize(("work_beside_s", "offloads"), [(0.0, False), (4.0, True)])
def test_a_value_is_offloaded_only_where_other_work_hides_its_copies(work_beside_s, offloads):
    b = Builder()
    value = b.op((b.storage(8, held=True),), 8)
    b.op((value,), 8, backward=True)
    graph = b.build()
    fuse = FusionCapabilities((0, 0), (0, 0), 0, (False, False), ((), (0,)))
    candidates = MilpVariables(graph, fuse, frozenset({value}), [1.0, 1.0], movable=frozenset({value}))
    window = Window(frozenset({value}), work_beside_s)
    moves = Moves({value: 4.0}, (window,), (window,), {value: 1.0})
    full = MemoryRow(0, 0, {value: 8}, frozenset(), {})
    found = solve(candidates, [full], 4, moves=moves)
    assert (found.offloaded, found.rebuilt) == ((frozenset({value}), frozenset())[:: 1 if offloads else -1])
