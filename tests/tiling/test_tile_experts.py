"""Experts in tiles: one loop for each, or for the stack of all; values and gradients against float64 eager."""

import pytest
import thunder
import torch
from litgpt import Config
from litgpt.model import LLaMAMoE
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.experts import MaskedExperts
from tests.tiling.test_tiles import WIDE, WIDTH, assert_as_exact_as_eager, compiled, made, tiles_of
from thunder_mem import MemEfficient, Tiles, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop

EXPERTS, CHOSEN = 3, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def shares_of(scores):
    """The share of each expert in each token (..., experts), of which most are 0."""
    best, chosen = torch.topk(scores, CHOSEN)
    best = best.softmax(-1)
    return torch.stack([torch.where(chosen == k, best, 0.0).sum(-1) for k in range(EXPERTS)], -1)


class Masked(nn.Module):
    """Each expert sees all tokens."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        best, chosen = torch.topk(self.router(x), CHOSEN)
        best = best.softmax(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            y = y + torch.where(chosen == k, best, 0.0).sum(-1, keepdim=True) * expert(x)
        return x + y


class Stacked(nn.Module):
    """One product for all experts, in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form, self.router = form, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDE) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, WIDTH) / WIDE**0.5)

    def forward(self, x):
        shares = shares_of(self.router(x))
        if self.form == "matmul":
            h = torch.relu(x.unsqueeze(0) @ self.up) @ self.down
            return (h * shares.t().unsqueeze(-1)).sum(0)
        if self.form == "expanded":
            h = torch.bmm(torch.relu(torch.bmm(x.expand(EXPERTS, *x.shape), self.up)), self.down)
            return (h * shares.t().unsqueeze(-1)).sum(0)
        h = torch.relu(torch.einsum("nd,edh->neh", x, self.up))
        return torch.einsum("neh,ehd,ne->nd", h, self.down, shares)


class Choosing(nn.Module):
    """Each expert takes the tokens that score highest, as many as it has room for."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            best, chosen = torch.topk(scores[:, k], 10)
            rows = best.unsqueeze(-1) * expert(torch.index_select(x, 0, chosen))
            y = torch.scatter_add(y, 0, chosen.unsqueeze(-1).expand(rows.shape), rows)
        return y


class Coupled(nn.Module):
    """A layer under a checkpoint or not, between what couples tokens."""

    def __init__(self, inner, checkpoints=True):
        super().__init__()
        self.inner, self.checkpoints = inner, checkpoints

    def forward(self, x):
        x = x.cumsum(0)
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        return y.cumsum(0).square().mean()


@pytest.mark.parametrize("rows", [1, 5, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_masked_experts_run_one_by_one(rows, dtype):
    module, x = made(Coupled(Masked()), (24, WIDTH), dtype)
    assert_as_exact_as_eager(module, x, Tiles(rows=rows), EXPERTS, factor=4.0)


def backwards_of(backward):
    """The number of loops in a backward, which are all an expert's own backward."""
    names = [b.sym.name for b in backward if is_chunk_loop(b)]
    assert set(names) <= {"chunk_loop_backward", "chunk_loop_backward_over"}
    return len(names)


@pytest.mark.slow
def test_under_a_checkpoint_no_expert_is_computed_twice():
    """The sum of the others' results is no input of an expert's tiles: its repetition would be all others'."""
    module, x = made(Coupled(Masked()), (24, WIDTH))
    jitted = compiled(module, Tiles(rows=5))
    jitted(x).backward()
    backward = thunder.last_backward_traces(jitted)[-1].bound_symbols
    assert backwards_of(backward) == EXPERTS


class Deep(nn.Module):
    """Layers whose input is a sum of all experts' results, which fused operations could rebuild."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.cumsum(0).square().mean()


@pytest.mark.slow
def test_no_expert_is_repeated_to_rebuild_what_its_checkpoint_keeps():
    with simulate("H100-80GB"):
        x = torch.empty(24, WIDTH, device="cuda")
        jitted = thunder.jit(Deep().to("cuda"), transforms=[MemEfficient(strict=True, tile=Tiles(rows=5))])
        jitted(x)
        backward = thunder.last_backward_traces(jitted)[-1].bound_symbols
    assert backwards_of(backward) == 2 * EXPERTS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("form", ["matmul", "expanded", "einsum"])
def test_stacked_experts_are_one_stretch(form, checkpoints):
    module, x = made(Coupled(Stacked(form), checkpoints), (24, WIDTH))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 1, factor=4.0)


@pytest.mark.slow
def test_experts_that_choose_tokens_run_one_by_one_over_their_rows():
    module, x = made(Coupled(Choosing()), (24, WIDTH))
    assert_as_exact_as_eager(module, x, Tiles(rows=3), EXPERTS, factor=4.0)


def scores_of_attention(q, k, v):
    q, k = q.sin(), k.sin()
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).cumsum(1).sum()


def test_scores_of_attention_are_no_stack_of_weights():
    q, k, v = (torch.randn(2, 32, 4, requires_grad=True) for _ in range(3))
    jitted = compiled(scores_of_attention, Tiles(rows=5))
    jitted(q, k, v).backward()
    assert not tiles_of(jitted)


def test_the_benchmarks_experts_are_litgpts():
    config = Config.from_name(
        "Mixtral-8x7B-v0.1", n_embd=8, n_head=2, n_query_groups=1, intermediate_size=16, n_expert=EXPERTS
    )
    torch.manual_seed(0)
    theirs, x = LLaMAMoE(config), torch.randn(2, 5, 8)
    torch.testing.assert_close(MaskedExperts(theirs)(x), theirs(x))
