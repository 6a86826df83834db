"""Gathers and scatters of one value a row, where an executor fuses what surrounds them."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.prims import PrimIDs

from tests.programs.chunk_cases import CASES, loss_and_grads, prepare
from thunder_mem import ChunkLossHead
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.semantics.effects import leaves


def fused(fn, **options):
    transform = ChunkLossHead(**(options or {"chunks": 3}))
    return thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[transform]), transform


def block_of(compiled):
    """The operations of the largest block with gradients."""
    (bsym,) = (b for b in thunder.last_traces(compiled)[-1].bound_symbols if is_chunk_loop(b))
    bodies = loop_of(bsym).backward
    return bodies[max(bodies)].trace.bound_symbols


def names_of(compiled):
    return [b.sym.name for b in block_of(compiled)]


def wide_sums_of(compiled, columns):
    """The sums along rows of that many columns in it."""
    inner = [leaf for b in block_of(compiled) for leaf in leaves(b)]
    return [b for b in inner if b.sym.id is PrimIDs.SUM and b.args[0].shape[-1] == columns and b.args[1] == (1,)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ce_mean", "ce_smoothing_weights", "grpo", "ppo", "ce_z_loss", "ce_ignore_inside"])
def test_fused_blocks_give_the_same_loss_and_gradients(name):
    case = next(c for c in CASES if c.name == name)
    compiled, transform = fused(case.fn)
    got = loss_and_grads(compiled, prepare(case, torch.float32), case.grads)
    want = loss_and_grads(case.fn, prepare(case, torch.float64), case.grads)
    assert len(transform.record.loops) == case.loops
    for mine, exact in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2e-5, atol=1e-6)


def test_one_region_makes_the_gradient_from_the_logits(monkeypatch):
    """Of a block's results and temporaries only the gradient is as large as the logits."""

    def head(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    # Compiling takes seconds and is not what is tested here: regions run one operation at a time.
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)
    x, w = torch.randn(37, 8).requires_grad_(), torch.randn(4001, 8).requires_grad_()
    t = torch.randint(0, 4001, (37,))
    t[5] = -100
    compiled, transform = fused(head)
    loss = compiled(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    names = names_of(compiled)
    assert "scatter_add" not in names and len([n for n in names if n.startswith("MemPointwise")]) == 2, names
    assert len(wide_sums_of(compiled, 4001)) == 1  # of the exponentials; the scattered gradient's is known
    (plan,) = transform.record.loops
    assert plan.backward_block_bytes < 1.1 * plan.block_rows * plan.row_bytes
    for got, want in zip((loss, *grads), (head(x, w, t), *torch.autograd.grad(head(x, w, t), (x, w))), strict=True):
        torch.testing.assert_close(got, want)

    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):  # as eager, not as Thunder
        compiled(x, w, t + 4001)


def smoothed(x, w, t):
    return F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1)


def test_equal_values_are_multiplied_instead_of_added(monkeypatch):
    """Of a smoothed loss two sums along the vocabulary remain: of the exponentials and of the log-probabilities."""
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)
    x, w = torch.randn(37, 8).requires_grad_(), torch.randn(4001, 8).requires_grad_()
    t = torch.randint(0, 4001, (37,))
    compiled, _ = fused(smoothed)
    got, want = compiled(x, w, t), smoothed(x.double(), w.double(), t)
    assert len(wide_sums_of(compiled, 4001)) == 2
    for mine, exact in zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_smoothed_loss_in_fused_chunks_is_as_exact_as_eager():
    """A fused sum of 4,096 equal values, added one after the other, was fifteen times as far from float64."""
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 64, generator=gen), torch.randn(4096, 64, generator=gen) * 0.3
    t = torch.randint(0, 4096, (512,), generator=gen)

    def errors(fn):
        args = x.clone().requires_grad_(), w.clone().requires_grad_()
        exact = x.double().requires_grad_(), w.double().requires_grad_()
        got = torch.autograd.grad(fn(*args, t), args)
        want = torch.autograd.grad(smoothed(*exact, t), exact)
        return [((g - e).norm() / e.norm()).item() for g, e in zip(got, want, strict=True)]

    compiled, transform = fused(smoothed, chunks=4)
    for ours, eager in zip(errors(compiled), errors(smoothed), strict=True):
        assert ours < eager
    assert len(transform.record.loops) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["open", "fused"])
@pytest.mark.parametrize(
    ("reduction", "dtype", "trains"),
    [("mean", torch.float32, False), ("mean", torch.float16, True), ("none", torch.float32, True)],
)
@pytest.mark.parametrize("outside", [99, -1])
def test_a_target_outside_of_the_vocabulary_raises(reduction, dtype, trains, outside, executors, monkeypatch):
    """In blocks without gradients as well, and where a loss for each row leaves the gradients to the backward."""
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)
    x, w = torch.randn(61, 8, dtype=dtype), torch.randn(97, 8, dtype=dtype)
    t = torch.randint(0, 97, (61,))
    compiled = thunder.jit(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction=reduction),
        executors=executors,
        transforms=[ChunkLossHead(chunks=3)],
    )
    args = x.requires_grad_(trains), w.requires_grad_(trains)
    compiled(*args, t)
    t[7] = outside
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        compiled(*args, t)


def test_sums_that_are_not_along_the_scattered_dim_stay(monkeypatch):
    """Over the rows, and of two scatters added up."""
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)

    def head(x, w, t, u):
        log_p = F.linear(x, w).log_softmax(-1)
        picked = log_p.gather(1, t[:, None]) + 2 * log_p.gather(1, u[:, None])
        counts = torch.zeros_like(log_p).scatter_add(1, t[:, None], picked).sum(0)
        return picked.sum() + counts.square().sum()

    x, w = torch.randn(37, 8).requires_grad_(), torch.randn(41, 8).requires_grad_()
    t, u = torch.randint(0, 41, (2, 37))
    compiled, _ = fused(head)
    got, want = compiled(x, w, t, u), head(x.double(), w.double(), t, u)
    grads = zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for mine, exact in grads:
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_nothing_is_rewritten_where_nobody_fuses():
    x, w = torch.randn(37, 8).requires_grad_(), torch.randn(401, 8)
    compiled = thunder.jit(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t), executors=[], transforms=[ChunkLossHead(chunks=3)]
    )
    compiled(x, w, torch.randint(0, 401, (37,)))
    assert "mem_scatter_add_in_place" in names_of(compiled)
