"""Log-sum-exps over rows: the values of chunks combine, and their gradients need the whole."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, inputs, relative
from thunder_mem import ChunkLossHead, MemEfficient, measure_peak


def over_all(x, w, t):
    return torch.logsumexp(F.linear(x, w), (0, 1))


def per_class(x, w, t):
    return torch.logsumexp(F.linear(x, w), 0, keepdim=True).square().mean()


def beside_a_loss(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, t) + 0.1 * torch.logsumexp(z * 2, 0)[:7].sum()


def of_log_probs(x, w, t):
    """The log-marginal of every class, as information-theoretic regularisers have it."""
    log_p = torch.log_softmax(F.linear(x, w), -1)
    return (torch.logsumexp(log_p, 0) - 3.0).square().mean()


def of_a_sequence(x, w, t):
    z = F.linear(x[:36].view(4, 9, -1), w)
    return torch.logsumexp(z, dim=(0, 1)).square().mean()


def masked(x, w, t):
    """A class that is masked in the rows of some chunks, and one that is masked in all rows."""
    z = F.linear(x, w)
    hidden = (torch.arange(37)[:, None] < 20) & (torch.arange(101) == 3) | (torch.arange(101) == 4)
    scores = torch.logsumexp(z.masked_fill(hidden, float("-inf")), 0)
    return torch.where(scores > -1e30, scores, 0.0).square().mean()


CASES = (over_all, per_class, beside_a_loss, of_log_probs, of_a_sequence, masked)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", CASES)
def test_value_and_gradients(fn):
    x, w, t = inputs()
    compiled, transform = chunked(fn, chunks=5)
    loss = compiled(x, w, t)
    grads = torch.autograd.grad(loss, (x, w), torch.tensor(-2.5))
    value, want = exact(fn, x, w, t, tangent=-2.5)
    (plan,) = transform.record.loops
    assert plan.mode == "recompute-in-backward"
    assert [plan.outputs[i].sharding.partial for i in plan.log_sums] == ["logsumexp"]
    assert relative(loss, value) < 1e-5
    for got, ref in zip(grads, want, strict=True):
        assert relative(got, ref) < 1e-5


def test_large_logits_do_not_overflow():
    x, w, t = inputs(scale=100.0)
    loss = chunked(over_all)[0](x, w, t)
    assert loss.isfinite() and relative(loss, exact(over_all, x, w, t)[0]) < 1e-6


@pytest.mark.parametrize("transform", [ChunkLossHead(chunks=8), MemEfficient(chunk=ChunkLossHead(chunks=8))], ids=str)
def test_logits_never_exist_whole(transform):
    x, w, t = inputs(512, 8, 2048)
    compiled = thunder.jit(per_class, executors=[], transforms=[transform])

    def step():
        return torch.autograd.grad(compiled(x, w, t), (x, w))

    grads = step()
    assert measure_peak(step) < 512 * 2048 * 4
    for got, ref in zip(grads, exact(per_class, x, w, t)[1], strict=True):
        assert relative(got, ref) < 1e-5


def test_without_gradients_it_is_a_value_like_any_other():
    x, w, t = inputs()
    compiled, transform = chunked(per_class)
    with torch.no_grad():
        value = compiled(x, w, t)
    assert relative(value, exact(per_class, x, w, t)[0]) < 1e-5
    assert transform.record.loops[0].mode == "forward" and not transform.record.loops[0].log_sums


@pytest.mark.parametrize("dtype,error", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_in_16_bits_the_total_is_put_together_in_float32(dtype, error):
    x, w, t = inputs(dtype=dtype)
    compiled, transform = chunked(over_all, chunks=16)
    loss = compiled(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    assert transform.record.loops
    value, want = exact(over_all, x, w, t)
    assert relative(loss, value) < error
    eager = torch.autograd.grad(over_all(x, w, t), (x, w))
    for got, ref, peer in zip(grads, want, eager, strict=True):
        assert relative(got, ref) < max(error, 1.1 * relative(peer, ref))
