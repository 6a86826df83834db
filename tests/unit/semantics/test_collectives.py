"""Which bound symbols communicate, and how."""

import pytest
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor

from tests.checking.collectives import tensor, two_groups
from tests.checking.traces import body, claimed
from thunder_mem.semantics.collectives import group_of, is_gather, is_reduction, starts
from thunder_mem.semantics.op_traits import MemoryTraits, declare


@pytest.mark.parametrize("claim", [False, True], ids=["open", "claimed"])
def test_gathers_and_sums_over_ranks_are_told_apart(groups, claim):
    trace = two_groups(groups)
    bsyms = body(claimed(trace) if claim else trace)
    kinds = [(is_gather(b), is_reduction(b)) for b in bsyms if starts(b)]
    assert kinds == [(True, False), (False, True), (False, True)]


def test_a_loop_that_communicates_inside_starts_a_collective(groups):
    executor = OperatorExecutor("loops_over_ranks", version="1")
    declare(executor, lambda name: MemoryTraits(group=lambda bsym: groups[0]))
    with tracectx(TraceCtx(None)):
        loop = Symbol("loop", executor=executor).bind(tensor("x", 4), output=tensor("y", 4))
    assert starts(loop) and group_of(loop) is groups[0]
