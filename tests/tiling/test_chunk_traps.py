"""What went wrong in other chunked losses: rows that are missing, ignored or laid out otherwise; options."""

import re

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, head, inputs, relative
from thunder_mem import MemEfficient, last_plan
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


def test_a_chunk_may_be_all_ignored():
    x, w, t = inputs()
    t[:20] = -100
    fn, _ = chunked(head)
    grads = torch.autograd.grad(fn(x, w, t), (x, w))
    for got, want in zip(grads, exact(head, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5
    assert not grads[0][:20].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_all_ignored_is_nan_as_in_eager(dtype):
    x, w, t = inputs(dtype=dtype)
    t[:] = -100
    loss, want = chunked(head)[0](x, w, t), head(x, w, t)
    assert loss.isnan() and want.isnan()
    for got, ref in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
        torch.testing.assert_close(got, ref, equal_nan=True)


@pytest.mark.parametrize(
    "n,d,v,chunks", [(5, 3, 40, 4), (2, 3, 40, 9), (40, 3, 40, 3), (9, 24, 24, 3), (24, 24, 24, 5)]
)
def test_awkward_sizes(n, d, v, chunks):
    """Fewer rows than chunks, N == V, D == V, all equal."""
    x, w, t = inputs(n, d, v)
    fn, transform = chunked(head, chunks=chunks)
    loss = fn(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    value, want = exact(head, x, w, t)
    assert relative(loss, value) < 1e-5
    for got, ref in zip(grads, want, strict=True):
        assert relative(got, ref) < 1e-5
    if v > d:
        assert transform.record.loops and transform.record.loops[0].chunks <= min(n, chunks)


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_or_one_row_runs_as_ever(n):
    x, w, t = inputs(n, 4, 50)
    fn, transform = chunked(lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="sum"))
    loss = fn(x, w, t)
    assert not transform.record.loops
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), t, reduction="sum"))


def test_strided_and_sliced_inputs():
    base = torch.randn(6, 11, 32, generator=torch.Generator().manual_seed(3))
    x = base[:, 2:, ::2].requires_grad_()
    w = torch.randn(16, 90, generator=torch.Generator().manual_seed(4)).T.requires_grad_()
    t = torch.randint(0, 90, (6, 9), generator=torch.Generator().manual_seed(5))

    def fn(x, w, t):
        return F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten())

    compiled, transform = chunked(fn, rows=7)
    grads = torch.autograd.grad(compiled(x, w, t), (x, w))
    assert transform.record.loops[0].chunks == 8
    for got, want in zip(grads, exact(fn, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"chunks": 0}, ValueError, "chunks must be at least 1, but got 0"),
        ({"rows": -1}, ValueError, "rows must be at least 1, but got -1"),
        ({"chunks": 2, "rows": 3}, ValueError, "chunks=2 and rows=3 both say"),
        ({"chunks": "auto", "rows": 3}, ValueError, "chunks='auto' and rows=3 both say"),
        ({"accumulate": "bf16"}, ValueError, "accumulate is one of 'float32', 'input', but got 'bf16'"),
        ({"chunks": 2.0}, TypeError, 'chunks is a positive int, "auto" or None, but got 2.0'),
        ({"rows": "many"}, TypeError, "rows is a positive int, \"auto\" or None, but got 'many'"),
        ({"chunks": "16"}, TypeError, "but got '16'"),
        ({"chunks": True}, TypeError, "but got True"),
    ],
    ids=str,
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ChunkLossHead(**options)


@pytest.mark.parametrize("options", [{"chunks": "auto"}, {"rows": "auto"}, {"chunks": 3}, {"rows": 7}], ids=str)
def test_options_are_printed(options):
    again = eval(repr(ChunkLossHead(**options)))
    assert (again.chunks, again.rows) == (options.get("chunks"), options.get("rows"))


def test_auto_is_one_word_for_both():
    x, w, t = inputs(600, 4, 1001)
    plans = []
    for options in ({"chunks": "auto"}, {"rows": "auto"}, {"chunks": "auto", "rows": "auto"}):
        fn, transform = chunked(head, **options)
        fn(x, w, t)
        plans.append(transform.record.loops)
    assert plans[0] == plans[1] == plans[2] and plans[0][0].sized == "head"


@pytest.mark.parametrize("make", [lambda c: c, lambda c: MemEfficient(chunk=c)], ids=["alone", "MemEfficient"])
def test_symbolic_sizes_are_refused(make):
    x, w, t = inputs()
    alone = ChunkLossHead(chunks=4)
    fn = thunder.jit(head, executors=[], transforms=[make(alone)], cache="symbolic values")
    for rows in (37, 20):
        loss = fn(x[:rows], w, t[:rows])
        torch.testing.assert_close(loss, head(x[:rows], w, t[:rows]))
    if isinstance(make(alone), MemEfficient):
        told = [(r.what, r.reason) for r in last_plan(fn).refused]
    else:
        told = [(r.op, r.reason) for r in alone.record.refusals]
    assert any(op == "linear" and "symbols" in reason for op, reason in told)


def test_a_chunker_that_fails_leaves_the_program(monkeypatch):
    def fails(trace):
        raise RuntimeError("an unknown trace")

    x, w, t = inputs()
    monkeypatch.setattr("thunder_mem.transforms.chunk_loss_head.without_writes", fails)
    fn, transform = chunked(head)
    with pytest.warns(UserWarning, match="left the program as it is: RuntimeError: an unknown trace"):
        torch.testing.assert_close(fn(x, w, t), head(x, w, t))
    assert "an unknown trace" in transform.record.refusals[0].reason


def test_small_heads_are_left_alone_in_automatic_mode():
    x, w, t = inputs()
    fn, transform = chunked(head, rows="auto")
    fn(x, w, t)
    assert not transform.record.loops and not transform.record.refusals
