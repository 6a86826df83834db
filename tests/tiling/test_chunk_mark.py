"""``with thunder_mem.chunked():`` through Thunder's interpreter."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem.chunking import ChunkingError
from thunder_mem.tiling.marks import chunked
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


def inputs():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(37, 8, generator=g).requires_grad_(), torch.randn(64, 8, generator=g).requires_grad_()
    return x, w, torch.randint(0, 64, (37,), generator=g)


def marked(x, w, t):
    h = torch.tanh(x)
    with chunked():
        loss = F.cross_entropy(F.linear(h, w), t)
    return loss


def coupled(x, w, t):
    with chunked():
        z = F.linear(x, w)
        loss = torch.softmax(z, 0).square().sum()
    return loss


def test_a_mark_chunks_even_a_small_head():
    x, w, t = inputs()
    transform = ChunkLossHead(rows="auto")
    fn = thunder.jit(marked, transforms=[transform])
    loss = fn(x, w, t)
    assert len(transform.record.loops) == 1
    assert "chunked_begin" not in str(thunder.last_traces(fn)[-1])
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(marked(x, w, t), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_refusal_inside_a_mark_is_an_error_with_both_lines():
    with pytest.raises(ChunkingError, match=r"test_chunk_mark.py:\d+.*rows"):
        thunder.jit(coupled, transforms=[ChunkLossHead(rows="auto")])(*inputs())


def test_one_refused_head_of_two_is_an_error_that_names_it():
    def both(x, w, t):
        with chunked():
            loss = F.cross_entropy(F.linear(x, w), t)
            other = torch.softmax(F.linear(x * 2, w), 0).square().sum()
        return loss + other

    line = both.__code__.co_firstlineno + 3
    for options in ({"chunks": 4}, {"rows": "auto"}):
        with pytest.raises(ChunkingError, match=rf"test_chunk_mark.py:{line}\) is not chunked because of .*rows") as e:
            thunder.jit(both, transforms=[ChunkLossHead(**options)])(*inputs())
        assert str(e.value).count("the loss head") == 1


def test_a_hidden_layer_in_a_mark_is_no_head():
    def mlp(x, w, t):
        with chunked():
            hidden = torch.tanh(F.linear(x, w[:20]))
            loss = F.cross_entropy(F.linear(hidden[:, :8], w), t)
        return loss

    transform = ChunkLossHead(chunks=4)
    args = inputs()
    torch.testing.assert_close(thunder.jit(mlp, transforms=[transform])(*args), mlp(*args))
    assert len(transform.record.loops) == 1


def test_what_is_refused_outside_of_a_mark_is_no_error():
    def beside(x, w, t):
        with chunked():
            loss = F.cross_entropy(F.linear(x, w), t)
        return loss + torch.softmax(F.linear(x * 2, w), 0).square().sum()

    transform = ChunkLossHead(chunks=4)
    thunder.jit(beside, transforms=[transform])(*inputs())
    assert len(transform.record.loops) == len(transform.record.refusals) == 1


def test_a_mark_around_nothing_is_an_error():
    def nothing(x, w, t):
        with chunked():
            y = x * 2
        return F.cross_entropy(F.linear(y, w), t)

    with pytest.raises(ChunkingError, match=r"test_chunk_mark.py:\d+ is not chunked: there is no matrix product"):
        thunder.jit(nothing, transforms=[ChunkLossHead(rows="auto")])(*inputs())


def test_without_the_transform_a_mark_does_nothing():
    x, w, t = inputs()
    torch.testing.assert_close(thunder.jit(marked)(x, w, t), marked(x, w, t))
    torch.testing.assert_close(thunder.jit(coupled)(x, w, t), coupled(x, w, t))
