"""Programs of symbolic sizes, `cache="symbolic values"`, are planned and compute what eager PyTorch computes."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient

pytestmark = pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")


def parameters(*shapes):
    return tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def repeated_product(x, w):
    return F.linear(x, w).relu() @ w


def gated(x, w):
    return (F.silu(F.linear(x, w)) * F.gelu(F.linear(x, w))) @ w


def normed(x, w):
    return F.softmax(F.linear(F.layer_norm(x, (4,)), w), -1) @ w + x


def repeated_in_a_checkpoint(x, w):
    return checkpoint(repeated_product, x, w, use_reentrant=False).sin()


def pairs_of_rows(x, w):
    """Its sizes are one symbol twice."""
    return (x @ w.t()).sum(-1, keepdim=True) * (x @ w.t()).sum(-1).sin()


def attention(x, w):
    q = (x @ w.t()).reshape(1, 2, -1, 3)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("executors", ({"executors": []}, {}), ids=("unfused", "default"))
@pytest.mark.parametrize(
    "fn",
    (repeated_product, gated, normed, repeated_in_a_checkpoint, pairs_of_rows, attention),
    ids=lambda f: f.__name__,
)
def test_one_plan_serves_all_sizes(fn, executors, uncompiled):
    """No question about a size is recorded as an operation, where autograd renames the tensors."""
    step = thunder.jit(fn, cache="symbolic values", transforms=[MemEfficient(strict=True)], **executors)
    for rows in (8, 8, 5):
        mine = parameters((rows, 4), (6, 4))
        exact = [t.detach().clone().requires_grad_() for t in mine]
        got, want = step(*mine), fn(*exact)
        torch.testing.assert_close(got, want)
        for result in (got, want):
            result.sin().sum().backward()
        for t, like in zip(mine, exact, strict=True):
            torch.testing.assert_close(t.grad, like.grad)
    assert thunder.cache_misses(step) == 1
