"""Heads that do not run chunk by chunk: the operation, the line and the reason are told."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.cases import randn
from tests.programs.chunk_tools import chunked, exact, inputs, relative
from thunder_mem import ChunkLossHead


def refuses(fn, *args, expect):
    compiled, transform = chunked(fn)
    got = compiled(*args)
    want = fn(*args)
    assert not transform.record.loops
    assert transform.record.refusals
    text = str(transform.record.refusals[0])
    assert expect in text, text
    assert "test_chunk_refusals.py:" in text, text
    return got, want


def test_softmax_over_rows_is_refused():
    x, w, t = inputs()
    got, want = refuses(
        lambda x, w, t: torch.log_softmax(F.linear(x, w), 0).gather(1, t[:, None]).mean(), x, w, t, expect="rows"
    )
    torch.testing.assert_close(got, want)


def test_contrastive_loss_is_refused():
    def clip(x, y):
        z = x @ y.T * 10
        labels = torch.arange(x.shape[0])
        return (F.cross_entropy(z, labels) + F.cross_entropy(z.T, labels)) / 2

    g = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(64, 8, generator=g), dim=-1).requires_grad_() for _ in range(2))
    got, want = refuses(clip, x, y, expect="rows")
    torch.testing.assert_close(got, want)


def test_returned_logits_are_refused():
    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t), z

    x, w, t = inputs()
    got, want = refuses(fn, x, w, t, expect="returned whole")
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_dropout_on_logits_draws_the_same_numbers():
    """The mask is drawn whole, outside the loop, so that the generator's stream stays Thunder's."""

    def fn(x, w, t):
        return F.cross_entropy(F.dropout(F.linear(x, w), 0.5), t)

    x, w, t = inputs()
    compiled, transform = chunked(fn)
    results = []
    for step in (compiled, thunder.jit(fn)):
        torch.manual_seed(0)
        loss = step(x, w, t)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    assert transform.record.loops
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_random_numbers_made_from_logits_are_refused():
    x, w, t = inputs()
    refuses(
        lambda x, w, t: (torch.multinomial(torch.softmax(F.linear(x, w), -1), 1).squeeze(-1) == t).float().mean(),
        *(a.detach() for a in (x, w)), t, expect="random numbers",
    )  # fmt: skip


def test_logits_that_feed_a_projection_are_refused_or_right():
    """Soft embeddings: large values are contracted to rows as wide as the input."""

    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + (torch.softmax(z, -1) @ w).square().mean()

    x, w, t = inputs()
    compiled, _ = chunked(fn)
    grads = torch.autograd.grad(compiled(x, w, t), (x, w))
    for got, want in zip(grads, exact(fn, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize("where", ["weight", "weights of rows", "hidden"])
def test_a_mean_of_what_the_loop_reads_is_no_write(where):
    """It divides by a count that Thunder casts from int to float: a symbol without a tensor."""
    x, w, targets, rows = randn(65, 16), randn(400, 16, seed=1), torch.arange(65) % 400, randn(65, grad=False).abs()

    def fn(x, w):
        if where == "weight":
            return F.cross_entropy(F.linear(x, w) - w.mean(1), targets)
        if where == "hidden":
            h = torch.tanh(x)
            return F.cross_entropy(F.linear(h, w) / (1 + h.mean().abs()), targets)
        losses = F.cross_entropy(F.linear(x, w), targets, reduction="none")
        return (losses * rows.to(x.dtype)).mean() / rows.to(x.dtype).mean()

    jitted = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(chunks=4)])
    loss = jitted(x, w)
    assert "chunk_loop" in str(thunder.last_traces(jitted)[-1])
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = fn(*doubles)
    torch.testing.assert_close(loss, expected.float())
    actual, wanted = torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, doubles)
    torch.testing.assert_close(actual, tuple(g.float() for g in wanted))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
        self.head = torch.nn.Linear(16, 101, bias=False)

    def forward(self, x):
        h = self.body(x)
        z = self.head(h)
        return torch.nn.Softmax(dim=0)(z).square().sum()


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.nn.Sequential(m)], ids=["itself", "in a container"])
def test_a_modules_head_is_named_by_the_line_that_calls_it(wrap):
    compiled, transform = chunked(wrap(Model()))
    compiled(torch.randn(37, 16))
    (refusal,) = transform.record.refusals
    line = Model.forward.__code__.co_firstlineno
    assert refusal.head_source == f"{__file__}:{line + 2}" and refusal.source == f"{__file__}:{line + 3}"
    assert "head_weight" in refusal.head


def test_without_a_line_of_the_users_it_is_named_by_its_module():
    model = torch.nn.Sequential(torch.nn.Linear(16, 101), torch.nn.Softmax(dim=0))
    compiled, transform = chunked(model)
    compiled(torch.randn(37, 16))
    (refusal,) = transform.record.refusals
    assert (refusal.head_source, refusal.source) == ("module 0 (Linear)", "module 1 (Softmax)")
