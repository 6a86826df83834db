"""Losses of elements by their own gradients: exact as eager's, with less memory, and no unread ones."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, last_plan, measure_peak, predict
from thunder_mem.executors import mem_pointwise_ex

REDUCTIONS = ["mean", "sum", "none"]
WEIGHTS = {
    "plain": {},
    "weight": {"weight": torch.linspace(0.2, 2, 8)},
    "pos_weight": {"pos_weight": torch.linspace(0, 3, 8)},
    "both": {"weight": torch.linspace(0.2, 2, 64)[:, None], "pos_weight": torch.linspace(0, 3, 8)},
}


def planned(fn):
    return thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])


def backward_of(jitted):
    return str(thunder.last_backward_traces(jitted)[-1])


def seen(call, dtype, *args):
    args = [a.detach().to(dtype).requires_grad_(a.requires_grad) for a in args]
    out = call(*args)
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), [a for a in args if a.requires_grad])
    return [t.double() for t in (out, *grads)]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("of_targets", [False, True], ids=["logits", "targets too"])
@pytest.mark.sampled(6)
def test_values_and_gradients_are_as_exact_as_eagers(name, reduction, of_targets):
    torch.manual_seed(0)
    extreme = torch.tensor([100.0, -100.0, 0.0, -0.0]).repeat_interleave(2).reshape(8, 1).expand(8, 8)
    logits = torch.cat([3 * torch.randn(56, 8), extreme]).requires_grad_()
    targets = torch.rand(64, 8).round(decimals=1).requires_grad_(of_targets)

    def loss(a, y):
        given = {key: weight.to(a.dtype) for key, weight in WEIGHTS[name].items()}
        return F.binary_cross_entropy_with_logits(a, y, reduction=reduction, **given)

    jitted = planned(loss)
    found, eager = (seen(fn, torch.float32, logits, targets) for fn in (jitted, loss))
    true = seen(loss, torch.float64, logits, targets)
    for mine, theirs, exact in zip(found, eager, true, strict=True):
        assert mine.isfinite().all()
        least = torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert float((mine - exact).abs().max()) <= max(float((theirs - exact).abs().max()), least)
    assert backward_of(jitted).count(" = mem_binary_cross_entropy_") == 1 + of_targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_too(dtype):
    logits, targets = torch.randn(64, 8).requires_grad_(), torch.rand(64, 8)
    weight = WEIGHTS["pos_weight"]["pos_weight"]

    def loss(a, y):
        return F.binary_cross_entropy_with_logits(a, y, pos_weight=weight.to(a.dtype))

    rounded = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (logits, targets)]
    found, eager = (seen(fn, dtype, *rounded) for fn in (planned(loss), loss))
    torch.testing.assert_close(found, eager, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 64)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.sampled(2)
def test_peaks_are_predicted_and_not_above_eagers(name, reduction):
    x, targets = torch.randn(64, 512, requires_grad=True), torch.rand(64, 512)
    given = {key: w[:, :1] if w.ndim == 2 else w.repeat(64) for key, w in WEIGHTS[name].items()}

    def step(x):
        return F.binary_cross_entropy_with_logits(x * 2, targets, reduction=reduction, **given).sum()

    def peak(call):
        loss = call(x)
        loss.backward()
        x.grad = loss = None
        used_bytes = measure_peak(lambda: call(x).backward())
        x.grad = None
        return used_bytes

    jitted = planned(step)
    prediction = predict(jitted, x, keep_outputs=True)
    assert prediction.measured_bytes == peak(jitted) <= peak(step) + 4  # the loss, where eager's is gone
    if not given:  # Thunder alone does not differentiate a call with weights by keyword
        assert peak(jitted) < 0.8 * peak(thunder.jit(step, executors=[]))


PAIRS = {
    "binary_cross_entropy": lambda a, y, **given: F.binary_cross_entropy(a.sigmoid(), y.sigmoid(), **given),
    "binary_cross_entropy, weighted": lambda a, y, **given: F.binary_cross_entropy(
        a.sigmoid(), y.sigmoid(), WEIGHTS["weight"]["weight"].to(a.dtype), **given
    ),
    "binary_cross_entropy of 0 and 1": lambda a, y, **given: F.binary_cross_entropy(
        (a > 0).to(a.dtype) + 0 * a, (y > 0).to(y.dtype) + 0 * y, **given
    ),
    "l1_loss": lambda a, y, **given: F.l1_loss(a, torch.where(y > 0, a, y), **given),
    "poisson_nll_loss": F.poisson_nll_loss,
    "poisson_nll_loss, full": lambda a, y, **given: F.poisson_nll_loss(a, y.exp(), full=True, **given),
    "poisson_nll_loss of rates": lambda a, y, **given: F.poisson_nll_loss(a.exp(), y, log_input=False, **given),
    "smooth_l1_loss": F.smooth_l1_loss,
    "smooth_l1_loss, beta": lambda a, y, **given: F.smooth_l1_loss(a, y, beta=0.25, **given),
    "smooth_l1_loss, beta 0": lambda a, y, **given: F.smooth_l1_loss(a, torch.where(y > 0, a, y), beta=0.0, **given),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sampled(8)
def test_pairs_have_eagers_values_and_gradients(name, reduction):
    a, y = (torch.randn(5, 8, dtype=torch.float64).requires_grad_() for _ in range(2))

    def loss(a, y):
        return PAIRS[name](a, y, reduction=reduction)

    jitted = planned(loss)
    for mine, eager in zip(*(seen(fn, torch.float64, a, y) for fn in (jitted, loss)), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(jitted(a, y), loss(a, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["binary_cross_entropy", "l1_loss", "poisson_nll_loss", "smooth_l1_loss"])
def test_pairs_peak_as_predicted_and_below_eager(name, reduction):
    """Eager's reduced `binary_cross_entropy` and `smooth_l1_loss` keep the memory of all elements."""
    x, targets = torch.rand(64, 512, requires_grad=True), torch.rand(64, 512)

    def step(x):
        return getattr(F, name)((x * 0.5).sigmoid(), targets, reduction=reduction).sum()

    jitted = planned(step)

    def kept_bytes(fn):
        x.grad = None
        return measure_peak(lambda: fn(x).backward())

    kept_bytes(jitted)
    x.grad = None
    predicted_bytes = predict(jitted, x).measured_bytes
    # The loss of the lambda above is alive in the backward.
    assert predicted_bytes <= kept_bytes(jitted) <= predicted_bytes + 8
    assert predicted_bytes <= kept_bytes(step)


@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16 float32", "bfloat16 float32 float32", "float32 float32 float64"])
def test_weights_may_have_another_dtype(dtypes, executors):
    """As where a model runs in 16 bits, and its loss has weights in float32."""
    of_a, of_y, of_w = (getattr(torch, name) for name in dtypes.split())
    a, y = torch.randn(5, 8).to(of_a).requires_grad_(), torch.rand(5, 8).to(of_y)
    weights = {name: torch.linspace(0.5, 2, 8).to(of_w) for name in ("weight", "pos_weight")}

    def loss(a, y):
        return F.binary_cross_entropy_with_logits(input=a, target=y, **weights)

    jitted = thunder.jit(loss, executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        out = jitted(a, y)
        (grad,) = torch.autograd.grad(out, a)
    expected = loss(a, y)
    assert out.dtype == expected.dtype == of_y and grad.dtype == of_a
    eps = torch.finfo(torch.bfloat16 if torch.bfloat16 in (of_a, of_y) else torch.float32).eps
    torch.testing.assert_close(out, expected, rtol=2 * eps, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, a)[0], rtol=4 * eps, atol=eps / 50)


def test_other_calls_are_left_to_thunder():
    x, wide = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8, dtype=torch.float64)

    def mixed(x):
        return F.binary_cross_entropy_with_logits(x, wide)

    jitted = planned(mixed)
    torch.testing.assert_close(jitted(x), mixed(x))
    torch.testing.assert_close(torch.autograd.grad(jitted(x), x), torch.autograd.grad(mixed(x), x))
    assert "mem_binary_cross_entropy" not in backward_of(jitted)


HEADS = {
    "plain": F.binary_cross_entropy_with_logits,
    "pos_weight": lambda logits, targets: F.binary_cross_entropy_with_logits(
        logits, targets, pos_weight=torch.arange(512) / 100
    ),
    "of probabilities": lambda logits, targets: F.binary_cross_entropy(logits.sigmoid(), targets),
}


@pytest.mark.parametrize("name", HEADS)
def test_its_heads_run_in_chunks(name):
    x, w = torch.randn(2048, 16, requires_grad=True), torch.randn(512, 16, requires_grad=True)
    targets = torch.rand(2048, 512)

    def head(x, w):
        return HEADS[name](F.linear(x, w), targets)

    jitted = planned(head)
    out, expected = jitted(x, w), head(x, w)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (x, w)), torch.autograd.grad(expected, (x, w)))
    assert "chunk_loop" in str(thunder.last_traces(jitted)[-1])


@pytest.mark.parametrize("name", ["plain", "pos_weight"])
def test_a_plan_counts_its_temporaries(name):
    """So that a budget holds where the logits are most of a program."""
    x, w = torch.randn(64, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    targets, options = torch.rand(64, 8), WEIGHTS[name]
    fn = planned(lambda x, w, y: F.binary_cross_entropy_with_logits(F.linear(x, w), y, **options))
    fn(x, w, targets)
    held_bytes = sum(t.nbytes for t in (x, w, targets, *options.values()))
    found_bytes = measure_peak(lambda: torch.autograd.grad(fn(x, w, targets), (x, w))) + held_bytes
    assert abs(found_bytes - last_plan(fn).candidate.peak_bytes) <= 128
