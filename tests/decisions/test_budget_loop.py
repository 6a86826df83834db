"""Which plan is taken within a budget, and what is said of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.checking.traces import unfused
from thunder_mem.decisions.budget_loop import _is_dearer_than_recomputing, with_nothing_bought
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.memory.plan import BudgetOutcome

MOVED = BudgetOutcome(100, 90, 2.0, 0.0, "milp", offloaded=("a",), exposed_ms=3.0, without_offload_ms=4.0)


@pytest.mark.parametrize(
    ("outcome", "dearer"),
    [
        (MOVED, True),
        (replace(MOVED, exposed_ms=1.0), False),
        (replace(MOVED, without_offload_ms=None), False),
        (replace(MOVED, offloaded=()), False),
        (None, False),
    ],
)
def test_copies_may_delay_a_step_no_longer_than_recomputation_that_fits(outcome, dearer):
    assert _is_dearer_than_recomputing(SimpleNamespace(budget=outcome)) is dearer


def test_a_plan_that_buys_nothing_says_that_it_exceeds_the_budget():
    default = plan_joint_trace(unfused(lambda x: x.sin(), torch.ones(4)), (), PlanningOptions())
    over = with_nothing_bought(default, 7)
    assert (over.plan.budget.budget_bytes, over.plan.budget.method, over.fits) == (7, "smallest", False)
    assert over.peak_bytes == default.peak_bytes and "nothing fits" in over.plan.decisions[-1].how
