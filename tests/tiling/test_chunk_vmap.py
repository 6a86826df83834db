"""torch.func.vmap over rows as the oracle: under it no row can see another.

What the chunker calls a region must give the same when every row goes through it alone; and what it
refuses must not.
"""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.trace import from_trace, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.extend import get_always_executors

from tests.programs.chunk_cases import CASES, Case
from thunder_mem.chunk_loop.row_blocks import read_rows
from thunder_mem.loop_body.block import build_body
from thunder_mem.sharding.propagation import RULES, Relation
from thunder_mem.tiling import find as chunking
from thunder_mem.tiling.build import _sides
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


@pytest.fixture
def regions(monkeypatch):
    """What the chunker finds; no loop is built of it."""
    found = []

    def build_loop(region, *args):
        found.append(region)

    monkeypatch.setattr(chunking, "build_loop", build_loop)
    return found


def whole(region, tensors):
    """The values at the region's border, computed whole, operation by operation as Thunder traced them."""
    values = [v.proxy for v in (*region.inputs, *region.outputs)]
    source = region.program
    trace = from_trace(source.trace)
    trace.bound_symbols = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in source.args]
    trace.bound_symbols += [leaf.bsym for leaf in source.leaves]
    trace.args = source.args
    with tracectx(trace):
        trace.bound_symbols.append(prims.python_return.bind(tuple(values), output=None))
    fn = transform_for_execution(trace, get_always_executors()).python_callable(include_decorators=False)
    results = fn(*(tensors[a.name] for a in source.args))
    return results[: len(region.inputs)], results[len(region.inputs) :]


def rows_of(t, sharding, n):
    return torch.stack([read_rows(t, sharding, i, i + 1) for i in range(n)])


def one_by_one(region, inputs):
    """The region's outputs for every row alone, (n, *one row's shape)."""
    index = {v.key: i for i, v in enumerate(region.inputs)}
    sides = _sides(region, index)
    wanted = [False] * (len(region.amplifiers) + len(sides))
    body = build_body(region, [region.inputs[i] for i in sides], wanted, 1, get_always_executors(), True)

    def row(*local):
        products = []
        for a in region.amplifiers:
            shardings = region.shardings[a.leaf.index]
            x, w = (local[index[t.name, shardings[slot]]] for slot, t in enumerate(a.leaf.inputs[:2]))
            products.append(F.linear(x, w) if a.leaf.name == "linear" else x @ w)
        return tuple(body.fn(*products, *(local[i] for i in sides)))

    split = [v.sharding.split for v in region.inputs]
    args = [rows_of(t, v.sharding, region.n) if s else t for t, v, s in zip(inputs, region.inputs, split, strict=True)]
    return torch.func.vmap(row, in_dims=tuple(0 if s else None for s in split))(*args)


COMBINED = {"sum": lambda r: r.sum(0), "max": lambda r: r.amax(0), "logsumexp": lambda r: torch.logsumexp(r, 0)}


def check(region, tensors):
    inputs, outputs = whole(region, tensors)
    for value, want, rows in zip(region.outputs, outputs, one_by_one(region, inputs), strict=True):
        kind = value.sharding.partial
        expected = want if kind else rows_of(want, value.sharding, region.n)
        torch.testing.assert_close(COMBINED[kind](rows) if kind else rows, expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_alone_gives_the_whole(case: Case, regions):
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in case.tensors().items()}
    wanted = {k: v.clone().requires_grad_(k in case.grads) for k, v in tensors.items()}
    thunder.jit(case.fn, executors=[], transforms=[ChunkLossHead(chunks=5)])(**wanted)
    assert len(regions) == case.loops
    for region in regions:
        check(region, tensors)


@pytest.mark.parametrize("kind,loss", [("max", lambda z: z.max()), ("logsumexp", lambda z: torch.logsumexp(z, (0, 1)))])
def test_totals_that_are_no_sums(kind, loss, regions):
    g = torch.Generator().manual_seed(0)
    tensors = {"x": torch.randn(23, 4, generator=g), "w": torch.randn(41, 4, generator=g)}
    thunder.jit(lambda x, w: loss(F.linear(x, w)), executors=[], transforms=[ChunkLossHead(chunks=4)])(**tensors)
    (region,) = regions
    assert region.outputs[0].sharding.partial == kind
    check(region, tensors)


def contrastive(z):
    labels = torch.arange(z.shape[0])
    return (F.cross_entropy(z, labels, reduction="none") + F.cross_entropy(z.T, labels, reduction="none")) / 2


def batch_norm(z):
    return (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt()


REFUSED = {
    "contrastive": contrastive,
    "softmax over rows": lambda z: torch.softmax(z, 0).square().sum(-1),
    "pairs of rows": lambda z: F.relu(z.sum(-1)[:, None] - z.sum(-1)[None] + 1).sum(-1) + (z @ z.T).square().sum(-1),
    "batch norm": lambda z: F.cross_entropy(batch_norm(z), target, reduction="none"),
    "neighbours": lambda z: (torch.roll(z, 1, 0) - z).abs().sum(-1),
    "in the order of rows": lambda z: torch.cumsum(z, 0).abs().sum(-1),
}
N = 23
target = torch.arange(N) % 29


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_the_rows_one_by_one(name):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, 4, generator=g), torch.randn(N if name == "contrastive" else 29, 4, generator=g)
    fn = REFUSED[name]
    transform = ChunkLossHead(chunks=4)
    program = lambda x, w: fn(F.linear(x, w)).sum()  # noqa: E731
    torch.testing.assert_close(thunder.jit(program, executors=[], transforms=[transform])(x, w), program(x, w))
    assert not transform.record.loops and transform.record.refusals

    def row(z, t):
        if name == "contrastive":  # the class of row i is i
            return F.cross_entropy(z[None], t[None])
        if name == "batch norm":
            return F.cross_entropy(batch_norm(z[None]), t[None])
        return fn(z[None])[0]

    z = F.linear(x, w)
    labels = torch.arange(N) if name == "contrastive" else target
    alone = torch.func.vmap(row)(z, labels)
    assert not torch.allclose(alone, fn(z), rtol=1e-2), "it is independent by rows, and should not be refused"


def test_the_oracle_finds_a_wrong_rule(regions, monkeypatch):
    """One that claims that a running sum over rows goes row by row."""
    links = tuple(((0, d), (-1, d)) for d in range(2))
    monkeypatch.setitem(RULES, "torch.cumsum", lambda a, dim, **_: Relation(links=links))
    g = torch.Generator().manual_seed(0)
    tensors = {"x": torch.randn(23, 4, generator=g), "w": torch.randn(41, 4, generator=g)}
    fn = lambda x, w: torch.cumsum(F.linear(x, w), 0).abs().sum(-1).mean()  # noqa: E731
    thunder.jit(fn, executors=[], transforms=[ChunkLossHead(chunks=4)])(**tensors)
    (region,) = regions
    with pytest.raises(AssertionError, match="not close"):
        check(region, tensors)
