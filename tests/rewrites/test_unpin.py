"""Small views that are copied to let go of large bases: when, when not, and what it is worth in measured bytes."""

import pytest
import thunder
import torch

from tests.checking.traces import unfused
from thunder_mem import MemEfficient, last_plan, predict
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.rewrites.copy_small_views import pinned_bases
from thunder_mem.runtime.measure import measure_peak

N, D = 256, 64
ROW = N * D * 8


def randn(*shape, seed, grad=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values / shape[-1] ** 0.5).requires_grad_(grad)


def middle(z, m):
    """What peaks: three values of (N, 2 D) at once."""
    a = z @ torch.cat([m, m], 1)
    return (a.sin() @ torch.cat([m, m], 0).t().t()) @ m


def pinned(x, w, m):
    y = x @ w  # (N, 3 D), of which a third is needed in the end
    return middle(y[:, :D] @ m, m) @ y[:D, 2 * D :]


def two_late_views(x, w, m):
    y = x @ w
    return (middle(y[:, :D] @ m, m) * y[:, D : 2 * D]) @ y[:D, 2 * D :]


def read_at_the_end(x, w, m):
    y = x @ w
    return middle(y[:, :D] @ m, m) @ y.t()[:D] @ y


def returned(x, w, m):
    y = x @ w
    return middle(y[:, :D] @ m, m) @ y[:D, 2 * D :], y


def overwritten(x, w, m):
    y = x @ w
    z = middle(y[:, :D] @ m, m)
    y[:, :D].mul_(2)
    return z @ y[:D, 2 * D :] + y[:, :D]


def an_argument(x, w, m):
    return middle(x[:, :D] @ m, m) @ x[:D, :D]


def as_large(x, w, m):
    y = (x @ w)[:, :D].contiguous()
    return middle(y @ m, m) @ y.t() @ y


def expanded(x, w, m):
    y = (x @ w)[:1] * 2
    return middle((x @ w)[:, :D] @ m, m) @ y.expand(D, 3 * D)[:, :D]


def arguments(grad=False):
    return randn(N, D, seed=1, grad=grad), randn(D, 3 * D, seed=2, grad=grad), randn(D, D, seed=3, grad=grad)


COPIED = (pinned, two_late_views)
LEFT = (read_at_the_end, returned, overwritten, an_argument, as_large, expanded)


def decided(jitted):
    return [d for d in last_plan(jitted).decisions if d.what == "views"]


@pytest.mark.parametrize("fn", (*COPIED, *LEFT), ids=lambda f: f.__name__)
def test_results_and_peaks(fn):
    args = arguments()
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(jitted(*args), fn(*args))
    assert bool(decided(jitted)) == (fn in COPIED)
    prediction = predict(jitted, *args)
    assert measure_peak(jitted, *args) == prediction.peak_bytes - prediction.held_bytes


def test_the_base_goes_before_the_peak():
    args = arguments()
    jitted = thunder.jit(pinned, executors=[], transforms=[MemEfficient(strict=True)])
    jitted(*args)
    (decision,) = decided(jitted)
    # A base of three rows stays away, a copy of D x D stays.
    assert decision.before_bytes - decision.after_bytes == 3 * ROW - D * D * 8
    assert "clone" in str(thunder.last_traces(jitted)[-1])


def test_a_copy_for_every_base_that_is_used_alike():
    def layers(x, w, m):
        for _ in range(4):
            x = pinned(x, w, m)
        return x

    args = arguments()
    jitted = thunder.jit(layers, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(jitted(*args), layers(*args))
    (decision,) = decided(jitted)
    assert decision.how.startswith("4 small views")


@pytest.mark.slow
def test_gradients():
    """In a checkpoint, so that the base is made and used in the backward alone."""
    from torch.utils.checkpoint import checkpoint

    def fn(x, w, m):
        return checkpoint(two_late_views, x, w, m, use_reentrant=False).square().sum()

    args = arguments(grad=True)
    jitted = thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True, verify=True)])
    jitted(*args).backward()
    again = arguments(grad=True)
    fn(*again).backward()
    for a, b in zip(args, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_what_the_backward_receives_is_left_alone():
    """The base is saved for the backward, so no copy in the forward would let it go."""
    planned = plan_joint_trace(unfused(pinned, *arguments(grad=True)), [mem_pointwise_ex], PlanningOptions(strict=True))
    graph = planned.source.graph
    received = {s for op in graph.ops if op.backward for s in op.reads if not graph.storages[s].held}
    received = {s for s in received if (made := graph.allocator[s]) is not None and not graph.ops[made].backward}
    assert 3 * ROW in {graph.storages[s].nbytes for s in received}
    assert received.isdisjoint(split.storage for split in pinned_bases(planned.source, planned.plan))
    assert not any(decision.what == "views" for decision in planned.plan.decisions)
