"""The rules: what they derive, against row independence itself, and what users may add."""

import re

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from thunder.core.prims import PrimIDs

import thunder_mem.sharding.op_rules  # noqa: F401  (fills the registry)
from thunder_mem.chunk_loop.row_blocks import block_sizes, row_views
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, scratch_bytes
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.sharding.propagation import RULES, Relation, RowDim, RuleError, Sharding, propagate, register_rule
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead

# --- reshape ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(2, 5), st.randoms(use_true_random=False))
def test_reshape_follows_the_row_numbers(lead, width, random):
    """Push the row numbers through a real reshape, and read the derived dims against them."""
    n = torch.tensor(lead).prod().item()
    dims, stride = [], n
    for size in lead:
        stride //= size
        dims.append(RowDim(size, stride) if size > 1 or n == 1 else None)
    target = _refactored(n, random)
    numbers = torch.arange(n).reshape(*lead, 1).expand(*lead, width)
    relation = RULES[PrimIDs.RESHAPE](numbers, (*target, width))
    shapes = [tuple(numbers.shape)], [(*target, width)]
    out = propagate(relation, *shapes, {0: Sharding((*dims, None))}, n)[-1]
    result = numbers.reshape(*target, width)
    expected = torch.zeros_like(result)
    for d, row in enumerate(out.dims):
        if row is not None:
            assert row.extent == result.shape[d]
            shape = [-1 if i == d else 1 for i in range(result.ndim)]
            expected = expected + (torch.arange(row.extent) * row.stride).reshape(shape)
    assert torch.equal(expected, result)


def _refactored(n, random):
    """Another way to write n as a product, with ones thrown in."""
    out = []
    while n > 1:
        factors = [f for f in range(2, n + 1) if n % f == 0]
        out.append(random.choice(factors))
        n //= out[-1]
        if random.random() < 0.3:
            out.append(1)
    return out or [1]


def test_rows_merged_with_classes_are_refused():
    z = torch.empty(6, 10)
    with pytest.raises(RuleError, match="merges rows"):
        propagate(RULES[PrimIDs.RESHAPE](z, (60,)), [(6, 10)], [(60,)], {0: Sharding((RowDim(6, 1), None))}, 6)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_block_sizes_are_those_that_occur(n, chunk, block):
    chunk = min(chunk, n)
    block = min(block, chunk)
    seen = set()
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        seen.update(min(block, rows - at) for at in range(0, rows, block))
    assert set(block_sizes(n, chunk, block)) == seen


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["plain", "sliced", "transposed"]), st.data())
def test_row_views_are_the_rows_in_order(b, t, layout, data):
    n = b * t
    assume(n > 1)
    base = torch.arange(2 * n * 6).reshape(b, 2 * t, 6)
    x = base[:, :t] if layout == "sliced" else base[:, :t].contiguous()
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    dims = tuple(RowDim(*d) if d[0] > 1 else None for d in ((b, t), (t, 1)))
    views = row_views(x, Sharding((*dims, None)), start, stop)
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views)
    assert torch.equal(torch.cat([v.reshape(-1, 6) for v in views]), x.reshape(n, 6)[start:stop])
    if layout == "plain":
        assert len(views) == 1


# --- the rules against row independence ---------------------------------------------------------------

ROW_WISE = {
    "softmax": lambda z: torch.softmax(z, -1),
    "logsumexp": lambda z: torch.logsumexp(z, -1),
    "argmax": lambda z: z.argmax(-1).float(),
    "topk": lambda z: torch.topk(z, 3, dim=-1)[0].sum(-1),
    "sort": lambda z: torch.sort(z, dim=-1)[0][:, :2].sum(-1),
    "var": lambda z: z.var(-1),
    "where": lambda z: torch.where(z > 0, z, 0.1 * z).sum(-1),
    "pad": lambda z: F.pad(z, (1, 2)).sum(-1),
    "cat": lambda z: torch.cat([z, z * 2], -1).sum(-1),
    "slice": lambda z: z[:, 3:9].sum(-1),
    "flip": lambda z: (torch.flip(z, (1,)) * z).sum(-1),
    "cumsum": lambda z: torch.cumsum(z, -1).sum(-1),
    "prod": lambda z: torch.prod(torch.tanh(z), -1),
    "gelu": lambda z: F.gelu(z).sum(-1),
    "clamp": lambda z: z.clamp(-0.5, 0.5).sum(-1),
}
COUPLED = {
    "softmax": lambda z: torch.softmax(z, 0).sum(-1),
    "cumsum": lambda z: torch.cumsum(z, 0).sum(-1),
    "sort": lambda z: torch.sort(z, dim=0)[0].sum(-1),
    "flip": lambda z: torch.flip(z, (0,)).sum(-1),
    "centre": lambda z: (z - z.mean(0, keepdim=True)).abs().sum(-1),
    "std": lambda z: z / z.std(),
    "cat": lambda z: torch.cat([z, z], 0).sum(-1),
    "shift": lambda z: (z[1:] - z[:-1]).abs().sum(-1),
}


def captured(fn):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(23, 4, generator=g), torch.randn(41, 4, generator=g)
    transform = ChunkLossHead(chunks=4)
    compiled = thunder.jit(lambda x, w: fn(F.linear(x, w)).sum(), transforms=[transform])
    got = compiled(x, w)
    return got, fn(F.linear(x, w)).sum(), fn, x, w, transform.record


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_ops_pass(name):
    got, want, fn, x, w, record = captured(ROW_WISE[name])
    alone = torch.cat([fn(F.linear(row[None], w)) for row in x]).sum()  # rows one by one: the oracle
    torch.testing.assert_close(alone, want, rtol=1e-4, atol=1e-4)
    assert len(record.loops) == 1, record.refusals
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", COUPLED)
def test_ops_that_couple_rows_are_refused_and_right(name):
    got, want, _, _, _, record = captured(COUPLED[name])
    assert not record.loops
    assert record.refusals and record.refusals[0].reason
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_sum_over_rows_may_not_be_added_to():
    """x + 1 once per chunk would count the 1 as often as there are chunks."""
    got, want, *_, record = captured(lambda z: (z.sum() + 1.0) * 2.0)
    assert len(record.loops) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_maximum_over_all_rows_is_a_partial_maximum():
    got, want, *_, record = captured(lambda z: z.max())
    assert record.loops[0].outputs[0].sharding.partial == "max"
    torch.testing.assert_close(got, want)


# --- the registry ------------------------------------------------------------------------------------


def test_users_add_rules_for_their_own_ops():
    ex = thunder.extend.OperatorExecutor("test_chunk_rules")
    double = ex.register_operator("chunk_test_double", like=lambda a: ltorch.mul(a, 2.0), fn=lambda a: a * 2.0)
    thunder.extend.register_executor(ex)
    ex._lookasides[_double] = double

    def fn(x, w):
        return _double(F.linear(x, w)).square().sum(-1).mean()

    x, w = torch.randn(23, 4), torch.randn(41, 4)

    def run():
        transform = ChunkLossHead(chunks=4)
        executors = [ex, *thunder.get_default_executors()]
        return thunder.jit(fn, transforms=[transform], executors=executors)(x, w), transform.record

    try:
        loss, record = run()
        assert not record.loops and "register_rule" in record.refusals[0].reason
        register_rule(double, lambda a: Relation(links=(((0, 0), (-1, 0)), ((0, 1), (-1, 1)))))
        loss, record = run()
        assert len(record.loops) == 1
        torch.testing.assert_close(loss, fn(x, w))
    finally:
        RULES.pop(double.id, None)
        thunder.extend.deregister_executor(ex)
    with pytest.raises(TypeError, match="a rule is a function"):
        register_rule(double, "sum")


def _double(a):
    return a * 2.0


@pytest.fixture
def double():
    """An op of the user's, and how to run a head through it."""
    ex = thunder.extend.OperatorExecutor("test_chunk_rules_wrong")
    symbol = ex.register_operator("chunk_test_wrong", like=lambda a: ltorch.mul(a, 2.0), fn=lambda a: a * 2.0)
    thunder.extend.register_executor(ex)
    ex._lookasides[_double] = symbol
    yield ex, symbol
    RULES.pop(symbol.id, None)
    thunder.extend.deregister_executor(ex)


WRONG = {
    "classes as rows": (lambda a: Relation(links=(((0, 0), (-1, 1)),)), "only a part|it gives"),
    "a result without rows": (lambda a: Relation(links=(((0, 0),), ((0, 1), (-1, 1)))), "does not depend on rows"),
    "a sum that is none": (lambda a: Relation(reduced=(((0, 0), "sum"),)), "it gives"),
    "an axis too many": (lambda a: Relation(links=(((0, 2), (-1, 2)),)), r"the axis \(\d|-1, 2\)"),
    "a slot too many": (lambda a: Relation(links=(((1, 0), (-1, 0)),)), r"the axis \(1, 0\), which it does not have"),
    "an exception": (lambda a: Relation(links=a.no_such_thing), "the rule of chunk_test_wrong fails: "),
    "nothing": (lambda a: None, "gives None, which is no Relation"),
    "arguments that do not run": (
        lambda a: Relation(
            links=(((0, 0), (-1, 0)), ((0, 1), (-1, 1))), localise=lambda args, kwargs, shapes: ((*args, 1), kwargs)
        ),
        "split as its rule says, it fails",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_named_and_changes_nothing(name, double):
    ex, symbol = double
    rule, reason = WRONG[name]
    register_rule(symbol, rule)

    def fn(x, w):
        z = F.linear(x, w)
        return _double(z).sum()

    x, w = torch.randn(23, 4), torch.randn(41, 4)
    transform = ChunkLossHead(chunks=4)
    compiled = thunder.jit(fn, transforms=[transform], executors=[ex, *thunder.get_default_executors()])
    torch.testing.assert_close(compiled(x, w), fn(x, w))
    (refusal,) = transform.record.refusals
    assert refusal.op == "chunk_test_wrong" and re.search(reason, refusal.reason), refusal
    assert "test_chunk_rules.py:" in refusal.source


# --- the bound symbol ----------------------------------------------------------------------------------


def test_the_bound_symbol_prints_its_body_and_prices_its_scratch():
    def fn(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    x, w = torch.randn(256, 8).requires_grad_(), torch.randn(4096, 8).requires_grad_()
    t = torch.randint(0, 4096, (256,))
    transform = ChunkLossHead(chunks=4)
    compiled = thunder.jit(fn, transforms=[transform])
    compiled(x, w, t)
    trace = thunder.last_traces(compiled)[-1]
    text = str(trace)
    assert "256 rows of linear in 4 chunks of 64" in text
    assert "log_softmax" in text and "summed over chunks in float32" in text
    (bsym,) = (b for b in trace.bound_symbols if is_chunk_loop(b))
    plan = loop_of(bsym).plan
    assert plan == transform.record.loops[0]
    assert plan.to_json()["mode"] == "grads-in-forward"
    with pytest.raises(ValueError, match="not part of a chunk loop"):
        scratch_bytes(trace.bound_symbols[0])

    results = (256 * 8 + 4096 * 8) * 4 + 4
    measured = measure_peak(compiled, x, w, t)
    assert plan.logits_bytes < measured - results <= scratch_bytes(bsym) + 4096


def test_the_plan_is_the_same_every_time_and_idempotent():
    def fn(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    args = torch.randn(64, 8).requires_grad_(), torch.randn(512, 8), torch.randint(0, 512, (64,))
    plans = []
    for count in (1, 1, 2):
        transforms = [ChunkLossHead(chunks=4) for _ in range(count)]
        thunder.jit(fn, transforms=transforms)(*args)
        plans.append(transforms[0].record.to_json())
        assert not any(t.record.loops for t in transforms[1:])
    assert plans[0] == plans[1] == plans[2]
