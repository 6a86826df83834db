"""Heads of which only some rows are asked for: these are picked before the product, through whatever stands between."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy

from tests.programs.chunk_tools import relative
from thunder_mem import ChunkLossHead, MemEfficient, measure_peak
from thunder_mem.sharding.propagation import RuleError
from thunder_mem.sharding.row_cuts import Block, Pick, kept_shape, through_reshape

B, T, D, V = 3, 10, 8, 131
INDEX = torch.tensor([3, 5, 7])


def ce(z, t):
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), t.reshape(-1))


FILED = {
    "@ t": lambda x, w, t, u, b: ce((x @ w.t())[:, :-1], t[:, 1:]),
    "matmul transpose": lambda x, w, t, u, b: ce(torch.matmul(x, w.transpose(0, 1))[:, :-1], t[:, 1:]),
    "batch": lambda x, w, t, u, b: ce((x @ w.t())[1:], t[1:]),
    "add alpha": lambda x, w, t, u, b: ce(torch.add(F.linear(x, w), u, alpha=2)[:, :-1], t[:, 1:]),
    "sub alpha": lambda x, w, t, u, b: ce(torch.sub(F.linear(x, w), u, alpha=2)[:, :-1], t[:, 1:]),
    "addcmul": lambda x, w, t, u, b: ce(torch.addcmul(F.linear(x, w), u, u)[:, :-1], t[:, 1:]),
}
PRODUCTS = {
    "linear with bias": lambda x, w, t, u, b: ce(F.linear(x, w, b)[:, :-1], t[:, 1:]),
    "addmm": lambda x, w, t, u, b: ce(torch.addmm(b, x.reshape(-1, D), w.t(), beta=2)[1:], t.reshape(-1)[1:]),
    "mm": lambda x, w, t, u, b: ce(torch.mm(x.reshape(-1, D), w.t()).view(B, T, V)[:, :-1], t[:, 1:]),
    "inner": lambda x, w, t, u, b: ce(torch.inner(x, w)[:, :-1], t[:, 1:]),
    "einsum": lambda x, w, t, u, b: ce(torch.einsum("btd,vd->btv", x, w)[:, :-1], t[:, 1:]),
    "einsum, classes first": lambda x, w, t, u, b: ce(
        torch.einsum("vd,btd->bvt", w, x).transpose(1, 2)[:, 1:], t[:, 1:]
    ),
    "weight on the left": lambda x, w, t, u, b: ce((w @ x.reshape(-1, D).t())[:, 1:].t(), t.reshape(-1)[1:]),
}
BETWEEN = {
    "addcmul, second": lambda x, w, t, u, b: ce(torch.addcmul(u, F.linear(x, w), u)[:, :-1], t[:, 1:]),
    "softcap": lambda x, w, t, u, b: ce((torch.tanh(F.linear(x, w) / 3) * 3)[:, :-1], t[:, 1:]),
    "silu, read twice": lambda x, w, t, u, b: ce(F.silu(x @ w.t())[:, :-1], t[:, 1:]),
    "scale": lambda x, w, t, u, b: ce((F.linear(x, w) * b)[:, :-1], t[:, 1:]),
    "temperature": lambda x, w, t, u, b: ce((x @ w.t() / x.sum(-1, keepdim=True).abs().add(1))[:, :-1], t[:, 1:]),
    "where": lambda x, w, t, u, b: ce(torch.where(u > 0, x @ w.t(), u)[:, :-1], t[:, 1:]),
    "transposed": lambda x, w, t, u, b: F.cross_entropy((x @ w.t()).transpose(1, 2)[:, :, :-1], t[:, 1:]),
    "log_softmax": lambda x, w, t, u, b: F.log_softmax(x @ w.t(), -1)[:, :-1].square().mean(),
    "two products": lambda x, w, t, u, b: ce((F.linear(x, w) + F.linear(x * 2, w * 0.5))[:, :-1], t[:, 1:]),
    "a teacher": lambda x, w, t, u, b: F.kl_div(
        F.log_softmax(F.linear(x, w)[:, :-1], -1), F.softmax(F.linear(x.detach() * 2, w.detach())[:, 1:], -1)
    ),
    "a softmax of rows beside": lambda x, w, t, u, b: ((x @ w.t() - u.softmax(0)) ** 2).mean(),
}


def parts(x, w, t, u, b):
    first, second = (x @ w.t()).split(T // 2, dim=1)
    return ce(first, t[:, : T // 2]) + ce(second, t[:, T // 2 :])


def unbound(x, w, t, u, b):
    return sum(ce(z, t[i]) for i, z in enumerate((x @ w.t()).unbind(0)))


def accuracy_beside(x, w, t, u, b):
    z = x @ w.t()
    return ce(z[:, :-1], t[:, 1:]) + (z[:, :-1].argmax(-1) == t[:, 1:]).sum() * 0.5


PICKS = {
    "narrow": lambda x, w, t, u, b: ce((x @ w.t()).narrow(-2, 1, T - 1), t[:, 1:]),
    "step": lambda x, w, t, u, b: ce((x @ w.t())[:, ::2], t[:, ::2]),
    "negative and step": lambda x, w, t, u, b: ce((x @ w.t())[1:, -7:-1:2], t[1:, -7:-1:2]),
    "select": lambda x, w, t, u, b: ce((x @ w.t()).select(1, 3), t[:, 3]),
    "last": lambda x, w, t, u, b: ce((x @ w.t())[:, -1], t[:, -1]),
    "index_select": lambda x, w, t, u, b: ce((x @ w.t()).index_select(1, INDEX), t[:, INDEX]),
    "index": lambda x, w, t, u, b: ce((x @ w.t()).view(-1, V)[INDEX - 9], t.reshape(-1)[INDEX - 9]),
    "of merged rows": lambda x, w, t, u, b: ce((x @ w.t()).view(-1, V)[1:], t.reshape(-1)[1:]),
    "of rows taken apart": lambda x, w, t, u, b: ce(
        (x.reshape(-1, D) @ w.t()).view(B, T, V)[:, :-1], t[:, 1:]
    ),
    "twice": lambda x, w, t, u, b: ce((x @ w.t())[:, :-1][1:], t[1:, 1:]),
    "with a part of the vocabulary": lambda x, w, t, u, b: ce(
        (x @ w.t())[:, :-1, : V - 9], t[:, 1:].clamp(max=V - 10)
    ),
    "split": parts,
    "unbind": unbound,
    "accuracy": accuracy_beside,
}  # fmt: skip


def no_grad_logits(x, w, t, u, b):
    with torch.no_grad():
        z = F.linear(x, w, b)
    return ce((z * w.sum(1) * b)[:, :-1], t[:, 1:])


def no_grad_logits_whole(x, w, t, u, b):
    with torch.no_grad():
        z = F.linear(x, w, b)
    return ce(z * w.sum(1) * b, t)


def own_teacher(x, w, t, u, b):
    with torch.no_grad():
        z = F.linear(x * 2, w, b)
    return F.kl_div(F.log_softmax(F.linear(x, w, b), -1), F.softmax(z, -1), reduction="sum")


def own_teacher_shifted(x, w, t, u, b):
    with torch.no_grad():
        z = F.linear(x * 2, w, b)
    return F.kl_div(F.log_softmax(F.linear(x, w, b)[:, :-1], -1), F.softmax(z[:, 1:], -1), reduction="sum")


def same_rows_without_gradient(x, w, t, u, b):
    with torch.no_grad():
        z = F.linear(x, w * 2, b)
    return (F.linear(x, w) - z).square().mean()


CUT_OFF = {
    f.__name__: f
    for f in (no_grad_logits, no_grad_logits_whole, own_teacher, own_teacher_shifted, same_rows_without_gradient)
}
GROUPS = {"filed": FILED, "products": PRODUCTS, "between": BETWEEN, "picks": PICKS, "cut off": CUT_OFF}
LOOPS = {"split": 2, "unbind": 3}


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    x, w, u, b = (torch.randn(s, generator=generator) for s in ((B, T, D), (V, D), (B, T, V), (V,)))
    t = torch.randint(0, V, (B, T), generator=generator)
    x, w, b = (a.to(dtype).requires_grad_() for a in (x, w * 0.3, b * 0.5))
    return x, w, t, u.to(dtype), b


@pytest.mark.parametrize(
    "group", [g if g in ("filed", "cut off") else pytest.param(g, marks=pytest.mark.slow) for g in GROUPS]
)
@pytest.mark.slow
def test_heads_of_some_rows(group):
    """All of a group as one program, so that they compile once."""
    heads = GROUPS[group]

    def together(*args):
        return tuple(fn(*args[5 * i : 5 * i + 5]) for i, fn in enumerate(heads.values()))

    transform = ChunkLossHead(chunks=4)
    args = [a for _ in heads for a in inputs(torch.float32)]
    losses = thunder.jit(together, executors=[], transforms=[transform])(*args)
    sum(losses).backward()
    for i, (name, fn) in enumerate(heads.items()):
        exact = inputs(torch.float64)
        want = fn(*exact)
        want.backward()
        assert relative(losses[i], want.detach()) < 1e-5, name
        for got, leaf in zip(args[5 * i : 5 * i + 5], exact, strict=True):
            if leaf.grad is not None:
                assert relative(got.grad, leaf.grad) < 2e-5, name
            else:
                assert got.grad is None or not got.grad.any(), name
    assert not transform.record.refusals, transform.record.refusals
    assert len(transform.record.loops) == sum(LOOPS.get(name, 1) for name in heads)


def overwritten(x, w, t, u, b):
    """The product reads a bias that is another one when the slice is taken."""
    z = F.linear(x, w, b)
    b.mul_(-2.0)
    return ce(z[:, :-1], t[:, 1:])


REFUSED = {
    "overlapping": lambda x, w, t, u, b: ce((z := x @ w.t())[:, :-1], t[:, 1:]) + z[:, 1:].square().mean(),
    "also whole": lambda x, w, t, u, b: ce((z := x @ w.t())[:, :-1], t[:, 1:]) + z.amax(),
    "overwritten": overwritten,
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_picked_first(name):
    transform = ChunkLossHead(chunks=4)
    jitted = thunder.jit(REFUSED[name], executors=[], transforms=[transform])
    got, want = ([*inputs(d)[:4], inputs(d)[4].detach()] for d in (torch.float32, torch.float64))
    loss, exact = jitted(*got), REFUSED[name](*want)
    assert not transform.record.loops and "slice of the rows" in str(transform.record.refusals[0])
    assert relative(loss.detach(), exact.detach()) < 1e-5
    grads = torch.autograd.grad(loss, got[:2]), torch.autograd.grad(exact, want[:2])
    for ours, theirs in zip(*grads, strict=True):
        assert relative(ours, theirs) < 2e-5


def test_the_usual_loss_of_a_language_model_by_default():
    """As filed: logits of 4 MiB never exist whole."""
    h, w, t = torch.randn(4, 256, 64), torch.randn(4096, 64) * 0.05, torch.randint(0, 4096, (4, 256))

    def loss(h, w):
        return F.cross_entropy((h @ w.t())[:, :-1].reshape(-1, 4096), t[:, 1:].reshape(-1))

    h.requires_grad_(), w.requires_grad_()
    jitted = thunder.jit(loss, executors=[], transforms=[MemEfficient(strict=True)])
    got = torch.autograd.grad(jitted(h, w), (h, w))
    for ours, theirs in zip(got, torch.autograd.grad(loss(h.double(), w.double()), (h, w)), strict=True):
        assert relative(ours, theirs) < 1e-5
    assert measure_peak(lambda: torch.autograd.grad(jitted(h, w), (h, w))) < 8 * 2**20


def test_one_row_of_each_sequence_needs_no_other():
    """Nothing is chunked, and still no logits of other rows exist."""
    h, w = torch.randn(4, 256, 64, requires_grad=True), torch.randn(4096, 64)
    jitted = thunder.jit(lambda h, w: (h @ w.t())[:, -1].logsumexp(-1).sum(), executors=[], transforms=[MemEfficient()])
    jitted(h, w).backward()
    assert measure_peak(lambda: jitted(h, w).backward()) < 2 * 2**20


def test_a_hidden_layer_keeps_its_rows():
    """Only products as wide as logits are worth rewriting: this one has the rows that the user gave it."""

    def fn(x, up, w, t):
        return ce(F.linear(F.relu(F.linear(x, up))[:, :-1], w), t[:, 1:])

    x, w, t, *_ = inputs(torch.float32)
    jitted = thunder.jit(fn, executors=[], transforms=[transform := ChunkLossHead(chunks=4)])
    up, w = torch.randn(2 * D, D), torch.randn(V, 2 * D, requires_grad=True)
    torch.testing.assert_close(jitted(x, up, w, t), fn(x, up, w, t))
    (hidden,) = (b.output for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "linear")
    assert transform.record.loops and hidden.shape == (B, T, 2 * D)


def test_rows_are_picked_above_several_products():
    """The verifier trusts no value between two selections, which the program does not have."""

    def fn(x, up, gate, down, w, t):
        x = x + F.linear(F.linear(x, up) * F.relu(F.linear(x, gate)), down)
        return F.cross_entropy(F.linear(x, w)[:, :-1].flatten(0, 1), t[:, 1:].flatten())

    x, up, gate, down, w = (
        torch.randn(s, dtype=torch.float64).requires_grad_()
        for s in ((3, 11, 16), (48, 16), (48, 16), (16, 48), (37, 16))
    )
    given = (x, up, gate, down, w, torch.randint(0, 37, (3, 11)))
    options = MemEfficient(strict=True, chunk=ChunkLossHead(rows=3))
    jitted = thunder.jit(fn, executors=[], transforms=[options])
    found, exact = ((loss := f(*given), *torch.autograd.grad(loss, given[:5])) for f in (jitted, fn))
    torch.testing.assert_close(found, exact)


def test_rows_of_a_teachers_logits_are_picked_before_their_product_too():
    jitted = thunder.jit(own_teacher_shifted, executors=[], transforms=[transform := ChunkLossHead(chunks=4)])
    jitted(*inputs(torch.float32))
    bsyms = thunder.last_traces(jitted)[-1].bound_symbols
    made = {tuple(p.shape) for b in bsyms for p in b.flat_proxy_outs if isinstance(p, TensorProxy)}
    assert transform.record.loops and made.isdisjoint({(B, T, V), (B, T - 1, V)})


def test_cuts_through_reshapes():
    last = (Block(1, 1, (Pick(8, (0, 7, 1)),)),)
    (block,) = through_reshape((32, 100), (4, 8, 100), last)
    assert (block.first, block.count, block.kept) == (0, 1, (28,))
    (block,) = through_reshape((4, 8, 100), (32, 100), (Block(0, 1, (Pick(32, (1, 32, 1)),)),))
    assert (block.first, block.count, block.kept) == (0, 2, (1, 31))
    assert kept_shape((4, 8, 100), (block,)) == (1, 31, 100)
    assert through_reshape((1, 4, 8, 100), (4, 8, 100), last) == (Block(2, 1, last[0].picks),)
    with pytest.raises(RuleError, match="merges the rows"):
        through_reshape((8, 4, 3), (4, 8, 3), last)
