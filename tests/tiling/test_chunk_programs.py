"""Heads as people also write them: several in one program, each against its own float64 eager run."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import relative
from thunder_mem import MemEfficient, policies
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead

N, D, V = 37, 8, 61


def tokens_log_p(z, t):
    return F.log_softmax(z, -1).gather(-1, t[:, None]).squeeze(-1)


def no_grad_weights(x, w, t):
    z = F.linear(x, w)
    with torch.no_grad():
        confidence = torch.softmax(z, -1).max(-1)[0]
    return (F.cross_entropy(z, t, reduction="none") * confidence).mean()


def self_distilled(x, w, t):
    z = F.linear(x, w)
    return -(torch.softmax(z.detach() / 2, -1) * torch.log_softmax(z, -1)).sum(-1).mean()


def reinforced(x, w, t):
    reward = torch.sin(t.to(x.dtype))
    log_p = -F.cross_entropy(F.linear(x, w), t, reduction="none")
    return -(log_p * (reward - reward.mean()) / (reward.std() + 1e-6)).mean()


def focal(x, w, t):
    ce = F.cross_entropy(F.linear(x, w), t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def hinge(x, w, t):
    z = F.linear(x, w)
    return F.relu(1 + z - z.gather(1, t[:, None])).sum() / N


def two_heads_added(x, w, t):
    a, b = F.linear(x, w), F.linear(x * x, w)
    return F.cross_entropy(a + b, t) + F.mse_loss(a, b)


def masked_logits(x, w, t):
    z = F.linear(x, w)
    z.masked_fill_(z > 2.0, 0.0)
    return F.cross_entropy(z, t)


def loss_and_its_square(x, w, t):
    loss = F.cross_entropy(F.linear(x, w), t)
    return loss + loss * loss


def embedded_by_the_head(x, w, t):
    return F.cross_entropy(F.linear(F.embedding(t, w) + x, w), t)


def of_another_product(x, w, t):
    return F.cross_entropy(F.linear(F.gelu(F.linear(x, w[:D])), w), t)


def weight_norm(x, w, t):
    return F.cross_entropy(F.linear(x, w / w.norm(dim=1, keepdim=True)), t)


def cosine(x, w, t):
    return F.cross_entropy(10 * F.linear(F.normalize(x, dim=-1), F.normalize(w, dim=-1)), t)


def four_dims(x, w, t):
    return F.cross_entropy(F.linear(x[:36].view(2, 3, 6, D), w).permute(0, 3, 1, 2), t[:36].view(2, 3, 6))


def classes_first(x, w, t):
    return F.cross_entropy(F.linear(x.view(1, N, D), w).transpose(1, 2), t.view(1, N))


def einsum(x, w, t):
    return F.cross_entropy(torch.einsum("nd,vd->nv", x, w), t)


def addmm(x, w, t):
    return F.cross_entropy(torch.addmm(w[:, 0], x, w.t()), t)


def weight_on_the_left(x, w, t):
    return F.cross_entropy((w @ x.t()).t(), t)


def last_tokens(x, w, t):
    return F.cross_entropy(F.linear(x.view(1, N, D), w)[:, -5:].reshape(-1, V), t[-5:])


def rows_by_index(x, w, t):
    return F.cross_entropy(F.linear(x[t.clamp(max=N - 1)], w), t)


def halves_of_the_vocabulary(x, w, t):
    return F.cross_entropy(torch.cat([F.linear(x, w[:30]), F.linear(x, w[30:])], -1), t)


def groups(x, w, t):
    sums = tokens_log_p(F.linear(x[:36], w), t[:36]).view(4, 9).sum(1)
    return -F.logsigmoid(sums[0] - sums[1])


def hardest_tokens(x, w, t):
    return F.cross_entropy(F.linear(x, w), t, reduction="none").topk(5)[0].mean()


def mean_and_deviation(x, w, t):
    losses = F.cross_entropy(F.linear(x, w), t, reduction="none")
    return losses.mean() + losses.std()


def mean_logits(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, t) + z.mean(0).square().sum()


def overlapping_rows(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z[:20], t[:20]) + z[10:].square().mean()


def rows_and_all(x, w, t):
    z = F.linear(x, w)
    return F.cross_entropy(z[:20], t[:20]) + torch.logsumexp(z, -1).mean()


PROGRAMS = {
    "one scalar": (focal, hinge, self_distilled),
    "losses": (no_grad_weights, reinforced, two_heads_added, loss_and_its_square, embedded_by_the_head, masked_logits),
    "weights": (of_another_product, weight_norm, cosine, addmm, halves_of_the_vocabulary),
    "layouts": (four_dims, classes_first, einsum, weight_on_the_left, last_tokens, rows_by_index),
    "vectors": (groups, hardest_tokens, mean_and_deviation, mean_logits),
}
WHOLE = (overlapping_rows, rows_and_all)
"""These need logits of some rows twice."""


def inputs(seed, dtype):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * 0.3
    t = torch.randint(0, V, (N,), generator=g)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), t


def together(programs):
    """All programs as one, so that they compile once: `losses(x0, w0, t0, x1, ...)`."""

    def losses(*args):
        return tuple(fn(*args[3 * i : 3 * i + 3]) for i, fn in enumerate(programs))

    return losses


def compare(programs):
    transform = ChunkLossHead(chunks=5)
    args = [a for i in range(len(programs)) for a in inputs(i, torch.float32)]
    losses = thunder.jit(together(programs), transforms=[transform])(*args)
    sum(losses).backward()
    for i, fn in enumerate(programs):
        x, w, t = inputs(i, torch.float64)
        want = fn(x, w, t)
        want.backward()
        assert relative(losses[i], want) < 1e-5, fn.__name__
        for got, exact in zip(args[3 * i : 3 * i + 2], (x, w), strict=True):
            assert relative(got.grad, exact.grad) < 2e-5, fn.__name__
    return transform.record


@pytest.mark.parametrize(
    "name", [n if n == "one scalar" else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]
)
def test_loss_and_gradients(name):
    record = compare(PROGRAMS[name])
    assert not record.refusals, record.refusals
    assert len(record.loops) == len(PROGRAMS[name])
    assert {p.mode for p in record.loops} == {"recompute-in-backward" if name == "vectors" else "grads-in-forward"}


@pytest.mark.slow
def test_what_is_refused_still_runs_and_says_where():
    record = compare(WHOLE)
    assert not record.loops and len(record.refusals) == len(WHOLE)
    for refusal in record.refusals:
        assert "test_chunk_programs.py:" in refusal.source and refusal.op and refusal.reason


@pytest.mark.slow
@pytest.mark.parametrize("upcast", [lambda x, w: F.linear(x, w).float(), lambda x, w: F.linear(x.float(), w.float())])
def test_bfloat16_with_an_upcast(upcast):
    x, w, t = inputs(0, torch.bfloat16)
    transform = ChunkLossHead(chunks=5)
    compiled = thunder.jit(lambda x, w, t: F.cross_entropy(upcast(x, w), t), transforms=[transform])
    grads = torch.autograd.grad(compiled(x, w, t), (x, w))
    xd, wd = (a.detach().double().requires_grad_() for a in (x, w))
    exact = torch.autograd.grad(F.cross_entropy(F.linear(xd, wd), t), (xd, wd))
    assert len(transform.record.loops) == 1
    for got, want in zip(grads, exact, strict=True):
        assert relative(got, want) < 1e-2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "policy",
    [
        policies.save_only_matmul_outputs,
        policies.recompute_everything,
        policies.every_second_matmul,
        policies.save_between_layers,
        policies.save_only_attention_outputs,
        lambda op, graph: "recompute" if op.word.startswith("ChunkLoop") and op.refusal is None else "auto",
    ],
)
@pytest.mark.parametrize("budget", [None, 7_000_000])
def test_policies_leave_heads_right(policy, budget):
    """A head that makes its gradients writes one over its rows, which no second run may read."""
    torch.manual_seed(0)
    weights = [torch.randn(s) / 16 for s in ((2048, 64), (256, 64), (64, 256), (4096, 64))]
    targets = torch.randint(4096, (2048,))

    def loss(x, up, down, head, targets):
        return F.cross_entropy(F.linear(F.linear(F.relu(F.linear(x, up)), down), head), targets)

    def gradients(fn, dtype):
        leaves = [w.to(dtype).requires_grad_() for w in weights]
        return torch.autograd.grad(fn(*leaves, targets), leaves)

    transform = MemEfficient(strict=True, verify=True, recompute=policy, budget=budget)
    jitted = thunder.jit(loss, executors=[], transforms=[transform])
    found = gradients(jitted, torch.float32)
    assert any(b.sym.name == "chunk_loop_with_grads" for b in thunder.last_traces(jitted)[-1].bound_symbols)
    for ours, exact in zip(found, gradients(loss, torch.float64), strict=True):
        assert relative(ours, exact) < 1e-5
