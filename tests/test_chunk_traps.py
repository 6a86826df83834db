"""What went wrong in other chunked losses: rows that are missing, ignored or laid out otherwise; options."""

import pytest
import torch
import torch.nn.functional as F
from chunk_tools import chunked, exact, head, inputs, relative

from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


def test_a_chunk_may_be_all_ignored():
    x, w, t = inputs()
    t[:20] = -100
    fn, _ = chunked(head)
    grads = torch.autograd.grad(fn(x, w, t), (x, w))
    for got, want in zip(grads, exact(head, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5
    assert not grads[0][:20].any()


def test_a_batch_all_ignored_is_nan_as_in_eager():
    x, w, t = inputs()
    t[:] = -100
    loss = chunked(head)[0](x, w, t)
    assert loss.isnan() and head(x, w, t).isnan()


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


def test_options_are_checked():
    for bad in ({"chunks": 0}, {"rows": -1}, {"chunks": 2, "rows": 3}, {"accumulate": "bf16"}):
        with pytest.raises(ValueError):
            ChunkLossHead(**bad)
    for bad in ({"chunks": 2.0}, {"rows": "many"}, {"chunks": True}):
        with pytest.raises(TypeError):
            ChunkLossHead(**bad)
    assert eval(repr(ChunkLossHead(rows="auto"))).rows == "auto"


def test_small_heads_are_left_alone_in_automatic_mode():
    x, w, t = inputs()
    fn, transform = chunked(head, rows="auto")
    fn(x, w, t)
    assert not transform.record.loops and not transform.record.refusals
