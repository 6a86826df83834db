"""Cross entropies with smoothed labels leave ignored targets out, as eager's do; plain Thunder's do not."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, explain

CLASSES, WIDTH = 64, 8


def head(reduction="mean", classes=CLASSES, weighted=False, ignore_index=-100):
    def fn(w, x, target, weight):
        weight = weight.to(x.dtype) if weighted else None
        logits = (x @ w)[..., :classes].movedim(-1, 1)
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=0.1
        )

    return fn


def inputs(shape=(26,), ignored=3, ignore_index=-100):
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(CLASSES, shape, generator=generator)
    target.view(-1)[:ignored] = ignore_index
    w, x, weight = (torch.rand(s, generator=generator) for s in ((WIDTH, CLASSES), (*shape, WIDTH), (CLASSES,)))
    return w, x, target, weight


def loss_and_gradient(fn, w, x, *others):
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    loss = fn(w, x, *others)
    return loss, *torch.autograd.grad(loss.sum(), (w, x))


def differences(fn, step, args):
    w, x, *others = args
    exact = loss_and_gradient(fn, w.double(), x.double(), *others)
    return [float((a - b).abs().max()) for a, b in zip(loss_and_gradient(step, *args), exact, strict=True)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("chunk", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 5}, {"weighted": True}, {"shape": (3, 7)}, {"ignored": 0}, {"ignored": 25}],
    ids=str,
)
def test_losses_and_gradients_are_eagers(chunk, reduction, options):
    given = {k: v for k, v in options.items() if k in ("shape", "ignored", "ignore_index")}
    fn = head(reduction, **{k: v for k, v in options.items() if k in ("weighted", "ignore_index")})
    step = thunder.jit(fn, executors=[], transforms=[MemEfficient(chunk=chunk, strict=True)])
    assert max(differences(fn, step, inputs(**given))) < 1e-4


@pytest.mark.slow
def test_in_regions_and_in_a_checkpoint():
    plain = head()

    def fn(*args):
        return checkpoint(plain, *args, use_reentrant=False)

    with uncompiled_regions():
        for each in (plain, fn):
            step = thunder.jit(each, transforms=[MemEfficient(strict=True)])
            assert max(differences(plain, step, inputs())) < 1e-4


def test_plain_thunder_counts_ignored_targets():
    """So that `torch_functions/mended_functions.py` goes when Thunder is repaired."""
    fn = head()
    loss, *_ = differences(fn, thunder.jit(fn, executors=[]), inputs())
    assert loss > 0.01


def test_targets_that_are_probabilities_stay_as_thunder_has_them():
    def fn(logits, target):
        return F.cross_entropy(logits, target, label_smoothing=0.1)

    logits, target = torch.rand(6, 8), torch.rand(6, 8).softmax(-1)
    step = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(step(logits, target), fn(logits, target))
    assert not any("smoothed" in str(t.get_provenance()) for t in thunder.last_traces(step))


def test_the_loss_is_still_named_in_reports():
    step = thunder.jit(head(), executors=[], transforms=[MemEfficient(recompute="CrossEntropy+:recompute:-1")])
    args = inputs()
    assert max(differences(head(), step, args)) < 1e-4
    assert explain(step, *args)
