"""A plan after further decisions, and the bytes of its steps."""

from thunder_mem.memory.graph import Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.plan import Arrangement, BudgetOutcome, Decision, Plan, PlannedRegion
from thunder_mem.memory.plan_steps import plan_steps


def test_decisions_are_added_and_peaks_are_the_chosen_ones():
    first, then = Decision("order", "by sift", "peak", 9, 8), Decision("reuse", "1 result", "peak", 8, 7)
    own, ours = Arrangement("Thunder's own", 9, 9, 3), Arrangement("planned", 8, 6, 2)
    plan = Plan((), "planned", (own, ours), "sift", decisions=(first,), budget=BudgetOutcome(10, 8, 0.0, 0.0, "free"))

    assert plan.after() == plan
    said = plan.after(then)
    assert said.decisions == (first, then) and (said.candidates, said.budget) == (plan.candidates, plan.budget)

    lower = plan.after(then, peaks=(5, 7))
    assert lower.candidates == (own, Arrangement("planned", 5, 7, 2))
    assert lower.decisions == (first, then) and lower.budget.peak_bytes == lower.candidate.peak_bytes == 7
    assert plan.candidate is ours


def test_the_bytes_of_steps_count_scratch():
    """The peak is the step with scratch, and not the one that holds the most storages."""
    storages = [Storage(0, 8, held=True), Storage(1, 16), Storage(2, 4), Storage(3, 4)]
    ops = [
        Op(0, "exp", reads=(0,), allocates=(1,)),
        Op(1, "sum", reads=(1,), allocates=(2,)),
        Op(2, "attention", reads=(2,), allocates=(3,), scratch_bytes=32),
    ]
    graph = make_graph(ops, storages, outputs=[3])
    regions = tuple(PlannedRegion((op.index,)) for op in ops)
    steps = plan_steps(graph, Plan(regions, "ours", (Arrangement("ours", 48, 0, 3),), "source"))
    assert steps.live_bytes == price_order(graph).live_bytes == (24, 28, 48)
    assert steps.peak == 2
