"""Stages from a plan to the trace that runs."""

from types import SimpleNamespace

import pytest

from thunder_mem.planning.stages import Emitted


@pytest.mark.parametrize(("budget", "limit_bytes"), [(SimpleNamespace(budget_bytes=7), 7), (None, None)])
def test_a_budget_limits_what_stages_may_hold(budget, limit_bytes):
    plan = SimpleNamespace(budget=budget)
    assert Emitted(program=None, trace=None, plan=plan, source=None).budget_bytes == limit_bytes
