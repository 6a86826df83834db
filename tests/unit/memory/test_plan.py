"""A plan after further decisions."""

from thunder_mem.memory.plan import Arrangement, BudgetOutcome, Decision, Plan


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
