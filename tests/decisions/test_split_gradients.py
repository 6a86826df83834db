"""Gradients of a tensor's pieces are concatenated, where Thunder pads and adds them."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as pytorch_executor
from torch import nn

from thunder_mem import MemEfficient, measure_peak, predict
from thunder_mem.decisions.split_gradients import with_joined_pieces

X = torch.randn(4, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chunks(x, dim=-1):
    a, b, c = (x * 2).chunk(3, dim)
    return a.sin() * b.cos() + c.square()


def nested(x):
    left, right = (x * 2).chunk(2, -1)
    a, b = left.chunk(2, 1)
    return a.sin() * b.cos() * right.sum(), right.exp()


JOINED = {
    "chunks": chunks,
    "along another dim": lambda x: chunks(x, 1),
    "uneven": lambda x: sum(p.sin().sum() for p in (x * 2).split((5, 1, 6), -1)),
    "unbound": lambda x: sum(p.sin() * i for i, p in enumerate((x * 2).unbind(0))),
    "slices in another order": lambda x: (y := x * 2)[..., 8:].sin().sum() * y[..., :3].cos().sum() + y[..., 3:8].sum(),
    "of pieces": nested,
    "used twice": lambda x: (p := (x * 2).chunk(2, -1))[0].sin() * p[0].cos() * p[1],
    "beside the whole": lambda x: (y := x * 2).sin().sum() + y[..., :4].cos().sum() * y[..., 4:].exp().sum(),
    "views of pieces": lambda x: sum(p.transpose(0, 1).flatten(1).sin().sum() for p in (x * 2).chunk(3, -1)),
}
LEFT = {
    "a gap": lambda x: (y := x * 2)[..., :4].sin().sum() * y[..., 6:].cos().sum(),
    "an overlap": lambda x: (y := x * 2)[..., :7].sin().sum() * y[..., 6:].cos().sum(),
    "a step": lambda x: (y := x * 2)[..., ::2].sin().sum() * y[..., 1::2].cos().sum(),
    "two dims": lambda x: (y := x * 2)[:, :3, :4].sin().sum() * y[:, 3:, 4:].cos().sum(),
    "a piece of no places": lambda x: (y := x * 2)[..., :0].sin().sum() + y[..., :12].cos().sum() + y.sum(),
    "padded with ones": lambda x: F.pad(x, (0, 12), value=1.0) + F.pad(x.sin(), (12, 0)),
}


def outputs_and_gradient(call):
    x = X.clone().requires_grad_()
    out = call(x)
    outs = out if isinstance(out, tuple) else (out,)
    return *outs, *torch.autograd.grad(sum((o * o.detach().cos()).sum() for o in outs), x)


def made(jitted):
    return [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols]


@pytest.mark.parametrize(("name", "executors"), [*((name, []) for name in JOINED | LEFT), ("chunks", None)])
def test_gradients_are_eagers(name, executors):
    fn = (JOINED | LEFT)[name]
    options = {} if executors is None else {"executors": executors}
    jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)], **options)
    for mine, eager in zip(outputs_and_gradient(jitted), outputs_and_gradient(fn), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)
    if executors == []:
        assert ("cat" in made(jitted)) == (name in JOINED)
        assert not (name in JOINED and any("pad" in made_by for made_by in made(jitted)))


@pytest.mark.parametrize("is_written", [False, True])
def test_pieces_that_are_written_in_between_are_not_read_later(is_written):
    def fn(x, y, z):
        left = prims.pad(x, 0.0, ((0, 3, 0),))
        if is_written:
            prims.copy_(z, x, grad_enabled=False)
        return prims.add(left, prims.pad(y, 0.0, ((3, 0, 0),)))

    traced = thunder.trace()(fn, *(torch.ones(3) for _ in range(3)))
    claimed = transform_for_execution(traced, [pytorch_executor])
    joined = with_joined_pieces(claimed)
    assert [b.sym.name for b in joined.bound_symbols].count("cat") == (not is_written)
    assert (joined is claimed) == is_written


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()


def test_attention_peaks_below_eager_as_predicted():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(8, 128, 64)
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    predicted = predict(jitted, x).measured_bytes
    peaks = [measure_peak(lambda call=call: call(x).backward()) for call in (jitted, model)]
    assert 0 <= peaks[0] - predicted <= 8 and peaks[0] <= 0.92 * peaks[1]
