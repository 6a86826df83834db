"""Planning of communication, on traces of groups that are not there."""

from types import SimpleNamespace

import pytest
import torch
from thunder.distributed import FSDPBucketingStrategy

from tests.checking.collectives import two_groups
from tests.checking.traces import claimed, unfused
from thunder_mem.decisions import collective_stages
from thunder_mem.decisions.collective_stages import buckets_not_built, communicating, prepared
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.decisions.stages import Emitted, overlap_collectives
from thunder_mem.semantics.collectives import starts


def test_a_program_communicates_if_it_starts_a_collective(groups):
    assert communicating(two_groups(groups))
    assert not communicating(unfused(lambda x: x.sin(), torch.ones(3)))


def test_collectives_have_an_order_before_planning(groups):
    trace = two_groups(groups)
    ordered = prepared(trace)
    assert ordered is not trace
    assert sum(map(starts, ordered.bound_symbols)) == sum(map(starts, trace.bound_symbols)) == 3


def test_what_is_not_hidden_is_said(groups):
    trace = claimed(two_groups(groups))
    plan = plan_joint_trace(trace, (), PlanningOptions()).plan
    emitted = overlap_collectives(Emitted(SimpleNamespace(given=trace), trace, plan, source=None))
    (said,) = (d for d in emitted.plan.decisions if d.what == "communication")
    assert said.how.startswith("3 collectives, ") and said.how.count(" ms") == 3


@pytest.mark.parametrize(
    ("module", "asked"),
    [
        (SimpleNamespace(bucketing_strategy=FSDPBucketingStrategy.LAYER), ["bucketing_strategy"]),
        (SimpleNamespace(bucket_size_in_mb=50.0), ["bucket_size_in_mb"]),
    ],
)
def test_buckets_that_a_user_asks_for_are_refused(monkeypatch, module, asked):
    monkeypatch.setattr(collective_stages, "get_compile_data", lambda: SimpleNamespace(fn=module))
    with pytest.warns(UserWarning, match=asked[0]):
        assert [refusal.what.partition("=")[0] for refusal in buckets_not_built()] == asked
