"""Which values all data of the forward passes through."""

from math import inf

from tests.checking.graphs import Builder
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition.block_boundaries import block_boundaries, without_first_block


def facts(graph, cheap=()):
    nobody = (0,) * len(graph)
    return FusionCapabilities(nobody, nobody, 0, tuple(op.name in cheap for op in graph.ops), ((),) * len(graph))


def blocks(first_reads_argument_later=False):
    """Two blocks beside a residual stream, the first of which may hand the program's argument on."""
    b = Builder()
    start = b.storage(8, held=True)
    x = b.op((start,), 8, name="embed")
    found = [x]
    for i in range(2):
        h = b.op((x,), 24, name="up")
        x = b.op((h, x, *([start] if first_reads_argument_later and not i else [])), 8, name="down")
        found.append(x)
    loss = b.op((x,), 1, name="loss")
    b.op((x, loss), 8, backward=True, name="loss_grad")
    return b.build(), found


def test_values_inside_a_block_carry_nothing_alone():
    graph, found = blocks()
    assert block_boundaries(graph, facts(graph), [1.0] * len(graph)) == found


def test_what_is_kept_anyway_and_what_is_small_is_not_counted():
    b = Builder()
    x = b.storage(64, held=True)
    mask = b.op((x,), 64, name="draw")
    h = b.op((x,), 64, name="up")
    count = b.op((h,), 2, name="count")
    y = b.op((h, mask, count), 64, name="down")
    b.op((y, count, mask, b.op((y,), 1, name="loss")), 64, backward=True, name="grad")
    graph = b.build()
    repeat_s = [inf if op.name == "draw" else 1.0 for op in graph.ops]
    assert block_boundaries(graph, facts(graph), repeat_s) == [h, y]
    assert block_boundaries(graph, facts(graph), [1.0] * len(graph)) == [mask, y]  # beside it `h` is not alone


def test_a_cast_and_its_source_are_one_boundary_the_smaller():
    b = Builder()
    x = b.op((b.storage(8, held=True),), 16, name="embed")
    narrow = b.op((x,), 8, name="cast")
    wide = b.op((narrow,), 32, name="cast")
    y = b.op((wide,), 16, name="up")
    b.op((y, b.op((y,), 1, name="loss")), 16, backward=True, name="grad")
    graph = b.build()
    assert block_boundaries(graph, facts(graph, {"cast"}), [1.0] * len(graph)) == [narrow, y]


def test_a_first_block_that_an_argument_bypasses_has_no_boundary_inside():
    graph, found = blocks()
    assert without_first_block(graph, facts(graph), found) == found
    graph, found = blocks(first_reads_argument_later=True)
    assert without_first_block(graph, facts(graph, {"down"}), found[:2]) == [found[1]]
