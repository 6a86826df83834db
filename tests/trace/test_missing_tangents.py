"""Outputs that a loss does not use: no zeros stand for their gradients before the backward reads them."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import thunderfx
from torch import nn

from tests.checking.traces import unfused
from thunder_mem import MemEfficient, measure_peak, predict, predict_step
from thunder_mem.trace import reading


class WithLogits(nn.Module):
    """Logits (B, 1000) beside their loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 32), nn.Linear(32, 1000, bias=False)

    def forward(self, tokens):
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits, tokens), logits


def peak(call, model, tokens):
    def step():
        call(tokens)[0].backward()

    step()
    for p in model.parameters():
        p.grad = None
    return measure_peak(step)


@pytest.mark.parametrize("compiled", (thunder.jit, thunderfx))
def test_logits_beside_a_loss_cost_no_second_gradient(compiled):
    torch.manual_seed(0)
    model, tokens = WithLogits(), torch.randint(0, 1000, (256,))
    eager = peak(model, model, tokens)
    jitted = compiled(model, executors=[], transforms=[MemEfficient(strict=True)])
    assert peak(jitted, model, tokens) <= eager
    if compiled is thunder.jit:
        measured = peak(jitted, model, tokens)
        for p in model.parameters():
            p.grad = None
        assert predict_step(jitted, None, lambda out: out[0], tokens).measured_bytes == measured


PROGRAMS = {
    "all are differentiable": lambda a: (a.sin() * 2, a.cos().exp(), a * 3),
    "one is an index": lambda a: (a.sin() * 2, a.argmax(-1), a.cos().exp()),
    "one is a view of another": lambda a: ((b := a.sin() * 2), b[:3].exp(), b.t()),
    "one is an argument": lambda a: (a.sin(), a, a * a),
    "one does not depend on it": lambda a: (a.sin(), a.detach() * 2, a.exp()),
    "one is returned twice": lambda a: ((b := a.sin()), b, b.cos()),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers_and_the_prediction_is_exact(name, used):
    fn, a = PROGRAMS[name], torch.randn(40, 40, requires_grad=True)
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])

    def gradient(call):
        a.grad = None
        outs = call(a)
        torch.autograd.backward([outs[i] for i in used], [torch.ones_like(outs[i]) for i in used])
        return a.grad

    torch.testing.assert_close(gradient(jitted), gradient(fn))
    a.grad = None
    measured = measure_peak(lambda: gradient(jitted))
    a.grad = None
    distinct = list({id(t): t for t in fn(a)}.values())
    if len(distinct) == 3:
        tangents = [torch.ones_like(t) if i in used else None for i, t in enumerate(distinct)]
        assert predict(jitted, a, tangents=tangents, keep_outputs=True).measured_bytes == measured


def test_a_graph_is_walked_twice():
    a = torch.randn(4, 4, requires_grad=True)
    jitted = thunder.jit(lambda a: (a.sin(), a.cos()), executors=[], transforms=[MemEfficient(strict=True)])
    first, second = jitted(a)
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    torch.testing.assert_close(a.grad, a.cos() - a.sin())


def test_an_argument_that_is_returned_keeps_its_own_zeros():
    """It comes from another compiled function, whose backward takes no None."""
    a = torch.randn(4, 4, requires_grad=True)
    plain = thunder.jit(lambda a: (a.sin(), a.cos()), executors=[])
    ours = thunder.jit(lambda b: (b, b.exp(), b * 2), executors=[], transforms=[MemEfficient(strict=True)])
    sum(t.sum() for t in ours(plain(a)[0])).backward()
    torch.testing.assert_close(a.grad, (3 + a.sin().exp()) * a.cos())


def test_symbolic_sizes_keep_their_zeros():
    jitted = thunder.jit(
        lambda a: (a.sin(), a.cos()), executors=[], transforms=[MemEfficient()], cache="symbolic values"
    )
    for rows in (4, 6):
        a = torch.randn(rows, 3, requires_grad=True)
        jitted(a)[1].sum().backward()
        torch.testing.assert_close(a.grad, -a.sin())


def test_zeros_for_an_output_without_a_gradient_are_in_the_backward(monkeypatch):
    monkeypatch.setattr(reading, "takes_none", lambda outputs: False)
    trace = unfused(lambda x: (x.sin(), x.argmax(-1)), torch.ones(128, 3, requires_grad=True))
    source = reading.read_trace(trace)
    (zeros,) = (s for s in source.graph.storages if s.name.startswith("zeros for "))
    assert zeros.nbytes == 128 * 8 and source.graph.ops[source.graph.allocator[zeros.index]].backward
