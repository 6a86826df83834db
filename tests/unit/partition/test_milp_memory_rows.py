"""Rows of one trial say what other choices hold."""

from math import inf

from tests.checking.graphs import Builder
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.partition.milp_memory_rows import MilpVariables, memory_rows
from thunder_mem.partition.min_cut_partition import saved_storages


def chain_from_a_draw():
    """The backward uses `mask`, made of `hidden`, before `hidden` itself; `drawn` cannot be made again."""
    b = Builder()
    drawn = b.op((b.storage(8, held=True),), 40)
    hidden = b.op((drawn,), 100)
    mask = b.op((hidden,), 10)
    end = b.op((mask,), 8)
    grad = b.op((end,), 8, backward=True)
    grad = b.op((grad, mask), 8, backward=True)
    grad = b.op((b.op((grad,), 50, backward=True),), 8, backward=True)
    b.op((grad, hidden), 8, backward=True)
    graph = b.build()
    nobody = (0,) * len(graph)
    operands = tuple(tuple(sorted({graph.allocator[s] for s in op.reads} - {None})) for op in graph.ops)
    fuse = FusionCapabilities(nobody, nobody, 0, (False,) * len(graph), operands)
    return PartitionProblem(graph, fuse, [inf, *[1.0] * (len(graph) - 1)]), frozenset({hidden, mask})


def test_rows_of_a_trial_without_recomputation_say_what_recomputation_holds():
    """`drawn` is kept for the repetition, and `hidden` waits for its own use, which comes after that of `mask`."""
    problem, rebuilt = chain_from_a_draw()
    candidates = MilpVariables(problem.graph, problem.fuse, rebuilt, problem.repeat_s)
    rows = memory_rows(candidates, problem.trial(frozenset()))
    other, kept = problem.trial(rebuilt), saved_storages(problem.graph, rebuilt)
    said = {row.key: row.live_bytes(candidates, rebuilt, kept) for row in rows}
    assert said == {key: other.timeline.live_bytes[other.names.index(key)] for key in said}
