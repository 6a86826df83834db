"""Values that are made again instead of sitting idle over the peak: when, when not, and what it is worth."""

import pytest
import thunder
import torch
from torch.utils.checkpoint import checkpoint

from tests.checking.traces import unfused
from thunder_mem import MemEfficient, last_plan, predict
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.rewrites.recompute import gathers_of_held
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.semantics.aliases import Aliases

N, D = 256, 64
ROW = N * D * 8
TOKENS = torch.arange(N) % D


def randn(*shape, seed, grad=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values / shape[-1] ** 0.5).requires_grad_(grad)


def middle(z, w, m):
    """What peaks: a value of (N, 3 D), and before it one of (N, D)."""
    return ((z @ w).sin() @ w.t()) @ m


def idle(x, w, m):
    y = x.sin() * 2  # of an argument, which is held
    return middle(y @ m, w, m).t() @ y


def idle_view(x, w, m):
    y = (x.sin() * 2).t()
    return middle(y.t() @ m, w, m).t() @ y.t()


def view_after_the_peak(x, w, m):
    y = x.sin() * 2
    z = middle(y @ m, w, m)
    return z.t() @ y + (z.t() @ y[:, : D // 2]) @ m[: D // 2]


def of_what_is_used_later(x, w, m):
    p = x @ m
    y = (p * 2).cos()
    z = middle(y @ m, w, m).t()
    return z @ y + z @ p


def chain(x, w, m):
    a = (x.sin() * 2).cos() + 1
    y = a.exp().tanh()
    return middle(y @ m, w, m).t() @ y


def of_what_dies(x, w, m):
    p = x @ m
    y = (p * 2).cos()
    return middle(y @ m, w, m).t() @ y


def costly(x, w, m):
    y = x @ m
    return middle(y @ m, w, m).t() @ y


def random(x, w, m):
    y = torch.nn.functional.dropout(x, 0.5) * 2
    return middle(y @ m, w, m).t() @ y


def returned(x, w, m):
    y = x.sin() * 2
    return middle(y @ m, w, m).t() @ y, y


def overwritten(x, w, m):
    y = x.sin() * 2
    z = middle(y @ m, w, m)
    y.mul_(3)
    return z.t() @ y


def source_overwritten(x, w, m):
    p = x @ m
    y = (p * 2).cos()
    z = middle(y @ m, w, m)
    p.mul_(3)
    return z.t() @ (y + p)


def arguments(grad=False):
    return randn(N, D, seed=1, grad=grad), randn(D, 3 * D, seed=2, grad=grad), randn(D, D, seed=3, grad=grad)


REMADE = (idle, idle_view, view_after_the_peak, of_what_is_used_later, chain)
LEFT = (of_what_dies, costly, random, returned, overwritten, source_overwritten)


def decided(jitted):
    return [d for d in last_plan(jitted).decisions if d.what == "rematerialized"]


def compiled(fn):
    return thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True, verify=True)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", (*REMADE, *LEFT), ids=lambda f: f.__name__)
def test_results_and_peaks(fn):
    args = arguments()
    jitted = compiled(fn)
    torch.manual_seed(0)
    found = jitted(*args)
    torch.manual_seed(0)
    torch.testing.assert_close(found, fn(*args))
    assert bool(decided(jitted)) == (fn in REMADE)
    prediction = predict(jitted, *args)
    assert measure_peak(jitted, *args) == prediction.peak_bytes - prediction.held_bytes


def test_the_value_is_not_there_at_the_peak():
    args = arguments()
    jitted = compiled(idle)
    jitted(*args)
    (decision,) = decided(jitted)
    assert decision.before_bytes - decision.after_bytes == ROW
    assert decision.how == "1 idle value made again after the peak"


@pytest.mark.slow
def test_a_value_made_in_another_way_is_left():
    def beside(x, w, m):
        y = x.cos() + 3
        return idle(x, w, m) + (y @ m).t() @ y

    jitted = compiled(beside)
    args = arguments()
    torch.testing.assert_close(jitted(*args), beside(*args))
    (decision,) = decided(jitted)
    assert decision.how == "1 idle value made again after the peak"


@pytest.mark.slow
def test_all_that_are_made_and_used_alike():
    def layers(x, w, m):
        for _ in range(4):
            x = (x @ idle(x, w, m)) / N
        return x

    args = arguments()
    jitted = compiled(layers)
    torch.testing.assert_close(jitted(*args), layers(*args))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", REMADE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients(fn, checkpointed):
    def loss(*args):
        result = checkpoint(fn, *args, use_reentrant=False) if checkpointed else fn(*args)
        return result.square().sum()

    args, again = arguments(grad=True), arguments(grad=True)
    compiled(loss)(*args).backward()
    loss(*again).backward()
    for a, b in zip(args, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_idle_rows_of_a_held_table():
    def fn(tokens, w, m):
        y = torch.nn.functional.embedding(tokens, m)
        return middle(y @ m, w, m).t() @ y

    _, w, m = arguments()
    jitted = compiled(fn)
    torch.testing.assert_close(jitted(TOKENS, w, m), fn(TOKENS, w, m))
    (decision,) = decided(jitted)
    assert decision.before_bytes - decision.after_bytes == ROW


@pytest.mark.slow
def test_rows_of_a_held_table_are_gathered_again():
    def fn(tokens, w, m):
        y = torch.nn.functional.embedding(tokens, m)
        return (y @ m).sin().sum()

    _, w, m = arguments(grad=True)
    tokens = TOKENS.reshape(2, -1)  # whose gather has a view inside
    planned = plan_joint_trace(unfused(fn, tokens, w, m), [mem_pointwise_ex], PlanningOptions(strict=True))
    graph = planned.source.graph
    (first, second) = sorted(gathers_of_held(planned.source))
    assert [graph.ops[graph.allocator[s]].backward for s in (first, second)] == [False, True]
    aliases, source = Aliases(planned.source.bsyms), planned.source
    rows = [[name for name, s in source.storage_of.items() if s == gathered] for gathered in (first, second)]
    assert {aliases(name) for name in rows[0]}.isdisjoint({aliases(name) for name in rows[1]})
    compiled_fn = compiled(fn)
    compiled_fn(tokens, w, m).backward()
    again = [t.detach().clone().requires_grad_() for t in (w, m)]
    fn(tokens, *again).backward()
    torch.testing.assert_close([w.grad, m.grad], [t.grad for t in again])
