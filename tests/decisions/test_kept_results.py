"""Values of checkpoints that the backward receives where the peak has room, instead of repeating them."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, Tiles, last_plan, measure_peak, predict
from thunder_mem.decisions.kept_results import KEPT

WIDTH, WIDE, TOKENS = 64, 256, 128


class Layer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), dropout

    def forward(self, x):
        x = x - x.softmax(-1)
        return x + F.dropout(self.down(F.relu(self.up(x))), self.dropout)


class Model(nn.Module):
    """Layers in checkpoints, whose weights are larger than their values: the backward peaks beside all gradients."""

    def __init__(self, layers=3, dropout=0.0, loss_inside=True, before=0):
        super().__init__()
        self.before = nn.Sequential(*(Layer() for _ in range(before)))
        self.layers, self.loss_inside = nn.ModuleList(Layer(dropout) for _ in range(layers)), loss_inside

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean() if self.loss_inside else x


def seeded(*args, **options):
    torch.manual_seed(0)
    return Model(*args, **options), torch.randn(TOKENS, WIDTH)


def compiled(module, **options):
    options = {"tile": False} | options
    return thunder.jit(copy.deepcopy(module), executors=[], transforms=[MemEfficient(strict=True, **options)])


def kept(jitted):
    return [d for d in last_plan(jitted).decisions if d.what == KEPT]


def products(jitted):
    """The products that the backward runs."""
    return sum(b.sym.name in ("linear", "matmul") for b in thunder.last_backward_traces(jitted)[-1].bound_symbols)


def gradients(module, loss, **options):
    loss.backward(**options)
    return [p.grad for p in module.parameters()]


def assert_like_float64(module, jitted, x):
    exact = copy.deepcopy(module).double()
    expected = gradients(exact, exact(x.double()))
    for grad, want in zip(gradients(jitted, jitted(x)), expected, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-6)


def test_values_are_received_up_to_the_peak():
    module, x = seeded()
    jitted, plain = compiled(module), compiled(module, keep=False)
    assert_like_float64(module, jitted, x)
    plain(x)
    (said,) = kept(jitted)
    assert not kept(plain) and said.before_bytes == said.after_bytes == last_plan(jitted).candidate.peak_bytes
    assert last_plan(plain).candidate.peak_bytes == last_plan(jitted).candidate.peak_bytes
    # Each repetition makes one product: all but the first layer's backward have room for its result.
    assert (products(plain), products(jitted)) == (11 + 3, 11 + 1)
    ours, theirs = last_plan(jitted), last_plan(plain)
    assert ours.candidate.regions == len(ours.regions) < len(theirs.regions) == theirs.candidate.regions


def test_the_predicted_peak_is_the_measured_one():
    module, x = seeded()
    jitted = compiled(module)

    def step():
        loss = jitted(x)
        torch.autograd.backward(loss, torch.ones(()))

    step()
    jitted.zero_grad()
    assert kept(jitted)
    assert predict(jitted, x, tangents=[torch.ones(())], keep_outputs=True).measured_bytes == measure_peak(step)


def test_only_true_or_false_says_whether_values_are_kept():
    with pytest.raises(TypeError, match="keep is True or False, not 1"):
        MemEfficient(keep=1)


def test_what_the_backward_receives_waits_for_no_loss_outside():
    module, x = seeded(loss_inside=False)
    jitted = compiled(module)
    jitted(x)
    assert not kept(jitted)


def test_what_the_user_asks_to_recompute_is_recomputed():
    module, x = seeded()
    jitted, asked = compiled(module), compiled(module, recompute="layerwise")
    jitted(x), asked(x)
    assert kept(jitted) and not kept(asked)


@pytest.mark.slow
def test_a_budget_is_the_limit():
    module, x = seeded()
    free = compiled(module)
    free(x)
    least_bytes = last_plan(free).candidate.peak_bytes
    budgets = [least_bytes + more for more in (0, 60_000, 10**6)]
    found = [compiled(module, budget=budget) for budget in budgets]
    for jitted, budget in zip(found, budgets, strict=True):
        jitted(x)
        assert last_plan(jitted).budget.peak_bytes == last_plan(jitted).candidate.peak_bytes <= budget
    assert [products(jitted) for jitted in found] == sorted((products(j) for j in found), reverse=True)
    assert products(found[-1]) == 11  # nothing is repeated
    assert_like_float64(module, found[-1], x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("offload", [False, True])
def test_what_a_budget_buys_stays_bought(offload):
    """Layers before the checkpoints recompute values or wait for them from the host, whatever checkpoints keep."""
    module, x = seeded(before=2)
    free = compiled(module)
    free(x)
    budget = last_plan(free).candidate.peak_bytes - 100_000
    jitted = compiled(module, budget=budget, offload=offload)
    assert_like_float64(module, jitted, x)
    outcome = last_plan(jitted).budget
    assert outcome.peak_bytes <= budget
    assert outcome.offloaded if offload else outcome.cost_ms > 0


def test_random_numbers_stay():
    module, x = seeded(dropout=0.3)
    jitted, plain = compiled(module), compiled(module, keep=False)
    torch.manual_seed(1)
    ours = gradients(jitted, jitted(x))
    torch.manual_seed(1)
    theirs = gradients(plain, plain(x))
    assert kept(jitted) and not kept(plain)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_the_graph_may_be_kept_for_a_second_backward():
    """A stretch in tiles writes its gradient over its rows, unless autograd keeps them."""
    module, x = seeded()
    jitted = compiled(module, tile=Tiles(rows=16))
    loss = jitted(x)
    assert kept(jitted)
    first = [g.clone() for g in gradients(jitted, loss, retain_graph=True)]
    for twice, once in zip(gradients(jitted, loss), first, strict=True):
        torch.testing.assert_close(twice, 2 * once)
    for p in jitted.parameters():
        p.grad = None
    assert_like_float64(module, jitted, x)
