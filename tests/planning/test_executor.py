"""What stands in Thunder's list in place of a fusion executor."""

import pytest
from thunder.extend import FusionExecutor

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.planning.executor import install_planner, user_executors


class Echo(FusionExecutor):
    """Answers with its question."""

    def __init__(self):
        super().__init__("echo", version="1")

    def can_execute(self, bsym):
        return bsym == "mine"

    def can_fuse(self, bsym):
        return bsym == "mine"

    def get_execution_transform(self, bsym):
        return "execution", bsym

    def get_grad_transform(self, sym):
        return "grad", sym

    def fuse(self, region, fusion_counter):
        return region, fusion_counter

    def fusion_pass(self, trace):
        raise AssertionError("the planner's pass runs in its place")


def test_a_planner_answers_as_its_executor_would():
    echo = Echo()
    (planner,) = install_planner([echo], PlanningOptions())
    assert (planner.name, planner.version) == ("echo", "1")
    assert [planner.can_execute("mine"), planner.can_execute("other")] == [True, False]
    assert [planner.can_fuse("mine"), planner.can_fuse("other")] == [True, False]
    assert planner.get_execution_transform("sin") == ("execution", "sin")
    assert planner.get_grad_transform("sin") == ("grad", "sin")
    assert planner.fuse("region", 3) == ("region", 3)
    assert user_executors([planner]) == (echo,)


def test_a_planner_without_an_executor_takes_nothing():
    (planner,) = install_planner([], PlanningOptions())
    assert not planner.can_execute("mine") and not planner.can_fuse("mine")
    assert planner.get_execution_transform("sin") is None and planner.get_grad_transform("sin") is None
    with pytest.raises(RuntimeError, match="no fusion executor"):
        planner.fuse("region", 3)
    assert user_executors([planner]) == ()
