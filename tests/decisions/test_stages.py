"""Stages from a plan to the trace that runs."""

from types import SimpleNamespace

import pytest
import torch
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor

from tests.checking.collectives import tensor
from tests.checking.graphs import Builder
from tests.checking.traces import unfused
from thunder_mem.decisions import stages
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.decisions.stages import Emitted, with_kernels
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.layout import Layout
from thunder_mem.semantics.op_traits import MemoryTraits, declare


@pytest.mark.parametrize(("budget", "limit_bytes"), [(SimpleNamespace(budget_bytes=7), 7), (None, 9)])
def test_copies_have_the_room_of_the_budget_or_else_of_the_plan(monkeypatch, budget, limit_bytes):
    scheduled = SimpleNamespace(trace="with copies beside other work", limit_bytes=None)

    def schedule(trace, device, limit_bytes):
        scheduled.limit_bytes = limit_bytes
        return scheduled

    monkeypatch.setattr(stages, "schedule_transfers", schedule)
    monkeypatch.setattr(stages, "with_transfers", lambda plan, scheduled: plan)
    program = SimpleNamespace(source=SimpleNamespace(graph=Builder().build()))
    plan = SimpleNamespace(budget=budget, candidate=SimpleNamespace(peak_bytes=9))
    emitted = stages.schedule_copies(Emitted(program, None, plan, None))
    assert (emitted.trace, scheduled.limit_bytes) == (scheduled.trace, limit_bytes)


def test_kernels_of_regions_are_counted_with_the_bytes_between_them():
    executor = OperatorExecutor("kernels_between", version="1")
    declare(executor, lambda name: MemoryTraits(kernels=lambda bsym, layout: KernelFigures(2, 96, 400)))
    with tracectx(TraceCtx(None)):
        region = Symbol("region", executor=executor).bind(tensor("x", 4), output=tensor("y", 4))
    b = Builder()
    b.op((b.storage(16, held=True),), 16, scratch=96)
    plan = plan_joint_trace(unfused(lambda x: x.sin(), torch.ones(4)), (), PlanningOptions()).plan
    source = SimpleNamespace(bsyms=[region], graph=b.build(), layout=Layout())
    said = with_kernels(plan, source).decisions[-1]
    assert said.how.startswith("2 kernels of 1 region, which keep at most 96 ")
    assert said.after_bytes - said.before_bytes == 96
