"""Programs written for their views and effects, as unfused traces that PyTorch ran."""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.checking.traces import Traced, run, unfused

__all__ = ["WRITTEN", "arguments", "checkpointed", "many_outputs", "written"]


def views(x, w):
    a, b, c = (x @ w).chunk(3, -1)
    d = a.t().reshape(-1) * 2  # a copy, for want of a stride
    e = b[::2].contiguous()
    f = b.unsqueeze(0).expand(4, -1, -1)
    g = (f * 1.5).permute(2, 0, 1).flatten(1)
    h = torch.diagonal(x) + x.view(-1)[: x.shape[0]] + x.to(torch.float32).movedim(0, 1)[0]
    return d.sum() + g.sum(), e, f.contiguous(), c.narrow(1, 0, 2).clone(), h


def registered_views(x, w):
    """Views that Thunder takes from PyTorch as they are."""
    y = x * 2
    parts = y.unbind(0)
    return (
        parts[0] + parts[1].squeeze(),
        y.unflatten(1, (4, 3)).swapaxes(0, 1).reshape(4, -1),
        y.expand_as(y).unsqueeze(-1).contiguous(),
        torch.stack([w, w]).select(0, 1),
        F.pad(y, (1, 1)),
        x.float().detach(),
    )


def in_place(x, w):
    y = x @ w
    y.add_(1)
    y = y.sin()
    v = y.view(-1)
    v.mul_(2)
    y[0] = 3.0
    return y.exp(), v.sum()


def reader_before_write(x, w):
    y = x.detach() * 1
    before = y.sin()
    z = y.cos()
    y.add_(w.t())
    return before + y, z


def dropout(x, w):
    a = F.dropout(x @ w, 0.5)
    b = F.dropout(x.sin(), 0.25)
    return a.sum() + (b * torch.rand_like(b)).sum()


def noise(x, w):
    y = x + torch.randn(12, 12)
    y.mul_(torch.rand(12, 12))
    y[1:] = torch.rand_like(w[1:])
    return y.sin() + F.dropout(w, 0.5)


def checkpointed(x, w):
    def block(x):
        return F.gelu(x @ w) @ w.t()

    return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum()


def attention(x, w):
    q, k, v = (x @ w).reshape(1, 2, 6, 12).transpose(1, 2).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, -1)


def many_outputs(x, w):
    y = (x @ w) @ w.t()
    return x.sin(), y.cos(), (y * x).sum(), y


WRITTEN = (
    views,
    registered_views,
    in_place,
    reader_before_write,
    dropout,
    noise,
    checkpointed,
    attention,
    many_outputs,
)
WITHOUT_GRADIENT = (registered_views,)


def arguments(fn):
    generator = torch.Generator().manual_seed(1)
    asks = fn not in WITHOUT_GRADIENT
    return {name: torch.randn(12, 12, generator=generator).requires_grad_(asks) for name in ("x", "w")}


def written(fn) -> Traced:
    inputs = arguments(fn)
    trace = unfused(fn, *inputs.values())
    return Traced(fn.__name__, trace, inputs, run(trace, inputs))
