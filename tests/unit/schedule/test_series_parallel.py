"""Graphs that collapse to one module have their best order without a search."""

from tests.checking.graphs import Builder
from thunder_mem.memory.running_set import liveness
from thunder_mem.schedule.series_parallel import collapse


def test_residual_blocks_are_one_module():
    """A sum reads its block's input again. It is the last reader in every order, and its own edge says nothing new."""
    b = Builder()
    h = b.op((b.storage(8, held=True),), 8)
    for _ in range(3):
        h = b.op((b.op((h,), 32), h), 8)
    collapsed = collapse(liveness(b.build(outputs=(h,))))
    assert collapsed.solved
    assert collapsed.expand(range(len(collapsed.live))) == list(range(7))


def test_two_last_readers_are_left_apart():
    """Either may free the value, so that no order of one alone is best."""
    b = Builder()
    h = b.op((b.storage(8, held=True),), 8)
    out = b.op((b.op((h,), 32), b.op((h,), 16)), 8)
    assert not collapse(liveness(b.build(outputs=(out,)))).solved
