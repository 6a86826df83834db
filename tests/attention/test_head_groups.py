"""Attention by groups of heads: values and gradients against float64 eager, peaks, and what stays whole."""

import copy
from dataclasses import replace

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.dynamo import thunderfx
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import thunder_mem.transforms.before_autograd as before_autograd
from tests.tiling.test_tiles import errors, gradients, made
from thunder_mem import MemEfficient, Tiles, last_plan, measure_peak, predict, simulate
from thunder_mem.attention import head_groups
from thunder_mem.attention.choice import plain_call
from thunder_mem.attention.kernels import ATTENTION_KERNELS
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.planning import tile_selection
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.semantics.kernel_scratch import flash_backward_bytes
from thunder_mem.tiling import heads as tiled_heads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "keys", "groups"), [(4, 4, 1), (4, 4, 3), (6, 3, 2), (6, 3, 3), (8, 2, 4), (6, 2, 6), (5, 1, 3)]
)
@pytest.mark.parametrize("over", [(), (0, 1, 2)])
def test_a_group_computes_what_all_heads_compute(heads, keys, groups, over, dtype):
    torch.manual_seed(0)
    rows, columns, causal, scale = 33, 33, True, 0.3
    q, k, v = (torch.randn(2, h, n, 8).to(dtype) for h, n in ((heads, rows), (keys, columns), (keys, columns)))
    grad = torch.randn(2, rows, heads, 8).to(dtype)
    out, log_sums = head_groups._forward(q, k, v, causal, scale, groups, "cpu")
    given = [t.clone() for t in (q, k, v)]
    found = head_groups._backward(grad, *given, out, log_sums, causal, scale, groups, "cpu", None, over)
    assert [g.data_ptr() == t.data_ptr() for g, t in zip(found, given, strict=True)] == [i in over for i in range(3)]
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    result = F.scaled_dot_product_attention(*exact, is_causal=causal, scale=scale, enable_gqa=True)
    result.transpose(1, 2).backward(grad.double())
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip((out.transpose(1, 2), *found), (result, *(t.grad for t in exact)), strict=True):
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


class _FlashCalls(TorchDispatchMode):
    """Counts calls of PyTorch's flash kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "flash" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keys", "groups", "forward"), [(16, 16, 2), (16, 4, 1), (4, 16, 2), (2, 16, 2)])
def test_a_gpu_runs_the_forward_in_fewer_groups_and_holds_one_at_a_time(keys, groups, forward):
    with simulate("H100-80GB"):
        q, k = (torch.zeros(1, h, 256, 64, dtype=torch.bfloat16, device="cuda") for h in (16, keys))
        with AllocationWatch() as watch, _FlashCalls() as calls:
            out, log_sums = head_groups._forward(q, k, k, True, None, groups, "flash")
        assert calls.count == forward
        results_bytes = out.nbytes + log_sums.nbytes
        assert watch.live_bytes() == results_bytes and watch.peak_bytes < results_bytes * (1 + 1.01 / forward)
        grad = torch.zeros_like(out)
        with AllocationWatch() as watch:
            found = head_groups._backward(grad, q, k, k, out, log_sums, True, None, groups, "flash", None, ())
        assert watch.live_bytes() == sum(t.nbytes for t in found)
        of_group = (
            sum(t.nbytes // groups for t in found) if groups <= keys else q.nbytes // groups + 6 * k.nbytes // keys
        )
        assert watch.peak_bytes - watch.live_bytes() < 1.01 * of_group


@pytest.mark.parametrize("projects", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "keys", "groups"), [(8, 8, 4), (8, 8, 3), (8, 2, 1), (8, 2, 2), (8, 2, 4)])
def test_a_gpus_scratch_is_what_the_kernel_and_its_copies_hold(heads, keys, groups, batch, projects, monkeypatch):
    """A fake kernel shows its results alone; PyTorch's makes its operands contiguous, as an H200 showed."""
    flash = ATTENTION_KERNELS["flash"]

    def with_its_own(grad_out, query, key, value, out, log_sums, *more):
        held = [t.transpose(1, 2).contiguous() for t in (grad_out, out)]
        nbytes = flash_backward_bytes(query.shape, key.shape, 2)
        held.append(torch.empty(nbytes, dtype=torch.uint8, device=query.device))
        return flash.backward(grad_out, query, key, value, out, log_sums, *more)

    watched = {**ATTENTION_KERNELS, "flash": replace(flash, backward=with_its_own)}
    monkeypatch.setattr(head_groups, "ATTENTION_KERNELS", watched)
    rows, size = 256, 64
    with simulate("H100-80GB"), tracectx(TraceCtx()):
        q, k = (torch.zeros(batch, h, rows, size, dtype=torch.bfloat16, device="cuda") for h in (heads, keys))
        out, log_sums = head_groups._forward(q, k, k, True, None, groups, "flash")
        weight = torch.zeros(96, heads * size, dtype=q.dtype, device="cuda") if projects else None
        grad = torch.zeros(batch * rows, 96, dtype=q.dtype, device="cuda") if projects else torch.zeros_like(out)
        with AllocationWatch() as watch:
            found = head_groups._backward(grad, q, k, k, out, log_sums, True, None, groups, "flash", weight, ())
        held_bytes = watch.peak_bytes - sum(t.nbytes for t in found)
        given = [None if t is None else _proxy(t) for t in (grad, q, k, k, out, log_sums, weight)]
        bsym = head_groups._backward_in_groups.bind(
            *given[:6], True, None, groups, "flash", given[6], (), output=tuple(given[1:4])
        )
        # Blocks of small tensors are larger than these.
        assert 0 <= head_groups._scratch_bytes(bsym) - held_bytes <= 2 * 512


def _proxy(t):
    return TensorProxy(
        shape=tuple(t.shape), device=Device("cuda:0"), dtype=dtypes.to_dtype(t.dtype), requires_grad=False
    )


@pytest.mark.parametrize(("heads", "keys", "groups"), [(4, 4, 3), (6, 2, 6), (8, 2, 2)])
def test_a_group_projects_its_own_gradient(heads, keys, groups):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8) for h in (heads, keys, keys))
    grad, weight = torch.randn(2 * 9, 20), torch.randn(20, heads * 8)
    out, log_sums = head_groups._forward(q, k, v, True, None, groups, "cpu")
    whole = (grad @ weight).view(2, 9, heads, 8)
    expected = head_groups._backward(whole, q, k, v, out, log_sums, True, None, groups, "cpu", None, ())
    found = head_groups._backward(grad, q, k, v, out, log_sums, True, None, groups, "cpu", weight, ())
    torch.testing.assert_close(found, expected)


def test_the_groups_hold_every_head_once():
    for heads, keys, groups in [(4, 4, 1), (8, 8, 3), (8, 4, 4), (8, 2, 4), (12, 3, 6), (5, 1, 3)]:
        q, k = torch.empty(1, heads, 2, 2), torch.empty(1, keys, 2, 2)
        parts = list(head_groups._parts(q, k, groups))
        assert len(parts) == groups
        assert [h for of_query, _ in parts for h in range(heads)[of_query]] == list(range(heads))
        for of_query, of_key in parts:
            shared = heads // keys
            assert {h // shared for h in range(heads)[of_query]} == set(range(keys)[of_key])


class Layer(nn.Module):
    """Attention with fewer heads of keys than of queries, and an MLP."""

    def __init__(self, heads=8, keys=2, size=8, wide=256, repeat="expand", **options):
        super().__init__()
        self.heads, self.keys, self.size, self.repeat, self.options = heads, keys, size, repeat, options
        width = heads * size
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, False), nn.Linear(width, 2 * keys * size, False)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, wide), nn.Linear(wide, width)

    def repeated(self, t):
        times = self.heads // self.keys
        batch, keys, rows, size = t.shape
        if self.repeat == "expand":
            return t[:, :, None].expand(batch, keys, times, rows, size).reshape(batch, keys * times, rows, size)
        return t[:, None].expand(batch, times, keys, rows, size).reshape(batch, keys * times, rows, size)

    def forward(self, x):
        batch, rows, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(batch, rows, self.heads, self.size).transpose(1, 2)
        kv = self.kv(h).view(batch, rows, 2, self.keys, self.size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, self.repeated(kv[0]), self.repeated(kv[1]), **self.options)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Layers(nn.Module):
    def __init__(self, checkpoints=True, **options):
        super().__init__()
        self.layers, self.checkpoints = nn.ModuleList(Layer(**options) for _ in range(2)), checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().mean()


def compiled(module, tile=True, **options):
    transform = MemEfficient(strict=True, verify=True, tile=tile, **options)
    return thunder.jit(module, executors=[mem_attention_ex], transforms=[transform])


def of_heads(jitted):
    return [d for d in last_plan(jitted).decisions if d.what == "heads"]


@pytest.fixture
def few_blocks(monkeypatch):
    """Small programs have groups too."""
    monkeypatch.setattr(tiled_heads, "_CPU_BLOCKS", 4)


def assert_right(module, x, tile, groups, factor=2.0):
    double = copy.deepcopy(module).double()
    exact = gradients(double, double, x.double())
    eager = errors(gradients(module, module, x), exact)
    jitted = compiled(module, tile)
    ours = errors(gradients(jitted, module, x), exact)
    assert [d.how.split(" in ")[1].split(",")[0] for d in of_heads(jitted)] == groups
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine <= factor * theirs + 2 * torch.finfo(x.dtype).eps
    return jitted


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [pytest.param(True, marks=pytest.mark.slow), False])
def test_gradients_of_a_model_are_as_exact_as_eagers(few_blocks, checkpoints):
    module, x = made(Layers(checkpoints, is_causal=True), (1, 512, 64))
    assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])


@pytest.mark.slow
def test_attention_stays_whole_where_tiles_fail(few_blocks, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(before_autograd, "tile_trace", fail)
    module, x = made(Layers(), (1, 512, 64))
    jitted = thunder.jit(module, executors=[mem_attention_ex], transforms=[MemEfficient(tile=Tiles(rows=100))])
    with pytest.warns(UserWarning, match="MemEfficient left stretches whole: RuntimeError: planted"):
        jitted(x)
    assert not of_heads(jitted)
    assert any(b.sym.name == "mem_attention_forward" for b in thunder.last_traces(jitted)[-1].bound_symbols)


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_eager(few_blocks):
    module, x = made(Layers(is_causal=True), (2, 256, 64), torch.bfloat16)
    assert_right(module, x, Tiles(rows=64), 2 * ["8 groups"])


@pytest.mark.slow
def test_gradients_lie_over_operands_that_the_backward_repeats(few_blocks):
    module, x = made(Layers(), (1, 512, 64))
    jitted = assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])
    over = [b.args[-1] for b in thunder.last_backward_traces(jitted)[-1].bound_symbols
            if b.sym.name == "mem_attention_groups_backward_over"]  # fmt: skip
    assert over == [(0,), (0,)]  # keys and values lie in one product's result
    module.zero_grad()
    loss = jitted(x.requires_grad_())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, module.parameters(), strict=True))


@pytest.mark.slow
def test_what_autograd_keeps_is_not_overwritten(few_blocks):
    module, x = made(Layers(checkpoints=False), (1, 512, 64))
    jitted = compiled(module, Tiles(rows=100))
    loss = jitted(x.requires_grad_())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss.backward()
    assert of_heads(jitted) and all(torch.equal(a, p.grad) for a, p in zip(first, module.parameters(), strict=True))


def measured(module, x, tile):
    """A compiled step's program and its measured peak."""
    jitted = compiled(module, tile)

    def step():
        jitted(x).backward()
        module.zero_grad(set_to_none=True)

    step()
    return jitted, measure_peak(step)


@pytest.mark.slow
def test_the_peak_is_predicted_to_the_byte(few_blocks):
    module, x = made(Layers(is_causal=True), (1, 512, 64))
    jitted, peak_bytes = measured(module, x, Tiles(rows=100))
    assert of_heads(jitted)
    assert 0 <= peak_bytes - predict(jitted, x).measured_bytes <= 8  # the loss


def projections(jitted):
    """Whether each backward of attention projects its gradient by groups."""
    bsyms = thunder.last_backward_traces(jitted)[-1].bound_symbols
    return [w is not None for w in (b.args[-2] for b in bsyms if head_groups.is_backward_in_groups(b))]


class Projected(Layer):
    """The result of attention is read twice, or its projection's gradient is no product's result, or neither."""

    def __init__(self, **options):
        super().__init__(**options)
        self.out = nn.Linear(self.heads * self.size, self.heads * self.size, False)
        del self.kv, self.norm

    def forward(self, x):
        batch, rows, _ = x.shape
        q, k, v = (self.q(x).view(batch, rows, self.heads, self.size).transpose(1, 2).add(i) for i in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        out = F.linear(mixed, self.out.weight)
        if self.repeat == "twice":
            out = out + mixed
        if self.repeat == "by hand":
            out = (mixed[..., None, :] * self.out.weight).sum(-1)
        return (out + self.down(F.gelu(self.up(self.norm2(out))))).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("how", "rows", "by_groups"), [("once", 80, True), ("once", 60, False), ("twice", 80, False),
                                                        ("by hand", 80, False)])  # fmt: skip
def test_a_projection_by_groups_saves_its_gradient(few_blocks, how, rows, by_groups):
    module, x = made(Projected(repeat=how), (1, rows, 64))
    jitted = assert_right(module, x, Tiles(rows=20), ["2 groups"])
    assert projections(jitted) == [by_groups]


@pytest.mark.slow
def test_the_peak_falls(few_blocks, monkeypatch):
    monkeypatch.setattr(tile_selection, "_FREE_TIME", float("inf"))  # small products on a CPU take longer in tiles
    module, x = made(Layers(is_causal=True), (1, 1024, 64))
    assert measured(module, x, True)[1] < measured(module, x, False)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"repeat": "tile"}, "attention of 8 heads in 8 groups"), ({"dropout_p": 0.1}, ""), ({"keys": 8}, "8 groups")],
)
@pytest.mark.slow
def test_only_repetitions_of_each_head_in_a_row_are_left_out(few_blocks, options, words):
    module, x = made(Layers(**options), (1, 512, 64))
    jitted = compiled(module, Tiles(rows=100))
    if not words:  # dropout: attention stays whole
        jitted(x).backward()
        assert not of_heads(jitted)
        return
    jitted = assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])
    assert all("not repeated" not in d.how and words in d.how for d in of_heads(jitted))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [pytest.param(True, marks=pytest.mark.slow), False])
def test_groups_of_heads_under_thunderfx(few_blocks, checkpoints):
    module, x = made(Layers(checkpoints, is_causal=True), (1, 64, 64))
    for layer in module.layers:  # ThunderFX leaves PyTorch's own RMSNorm to Inductor
        layer.norm, layer.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
    double = copy.deepcopy(module).double()
    exact = gradients(double, double, x.double())
    transform = MemEfficient(strict=True, verify=True, tile=Tiles(rows=20))
    ours = thunderfx(module, executors=[mem_attention_ex], transforms=[transform])
    assert max(errors(gradients(ours, module, x), exact)) < 1e-4
    assert [d.how for d in of_heads(ours)] == 2 * ["attention of 8 heads in 2 groups, 2 heads of keys not repeated"]


class WithoutKeys(Layer):
    """No gradient flows through the repetition of keys and values."""

    def repeated(self, t):
        with torch.no_grad():
            return super().repeated(t)


@pytest.mark.slow
def test_no_gradient_passes_a_repetition_without_one(few_blocks):
    module, x = made(WithoutKeys(), (1, 64, 64))
    x.requires_grad_()
    module(x).sum().backward()
    expected = [x.grad, *(p.grad for p in module.parameters() if p is not module.kv.weight)]
    assert module.kv.weight.grad is None
    x.grad = None
    module.zero_grad()
    jitted = compiled(module, Tiles(rows=20))
    jitted(x).sum().backward()
    assert [d.how for d in of_heads(jitted)] == ["attention of 8 heads in 2 groups"]
    assert module.kv.weight.grad is None or not module.kv.weight.grad.any()
    found = [x.grad, *(p.grad for p in module.parameters() if p is not module.kv.weight)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Reshaped(nn.Module):
    """Query, key and value are reshapes, which are views of an argument for some of its strides."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def block(self, *given):
        q, k, v = (t.transpose(1, 2).reshape(2, 24, 32).view(2, 24, 4, 8).transpose(1, 2) for t in given)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return mixed + self.down(F.gelu(self.up(mixed)))

    def forward(self, *given):
        return checkpoint(self.block, *given, use_reentrant=False)


def test_arguments_that_may_be_operands_are_not_overwritten(few_blocks):
    module = Reshaped()
    given = [torch.randn(2, 24, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    before = [t.detach().clone() for t in given]
    module(*given).sum().backward()
    expected = [t.grad.clone() for t in given]
    for t in given:
        t.grad = None
    jitted = compiled(module, Tiles(rows=10))
    jitted(*given).sum().backward()
    assert of_heads(jitted)
    torch.testing.assert_close([t.grad for t in given], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(t, b) for t, b in zip(given, before, strict=True))


@pytest.mark.slow
def test_without_tiles_attention_stays_whole(few_blocks):
    module, x = made(Layers(), (1, 512, 64))
    jitted = compiled(module, False)
    jitted(x).backward()
    assert not of_heads(jitted)
    assert not any("groups" in b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols)


def test_a_mask_leaves_attention_whole():
    q, k = torch.empty(1, 2, 4, 8), torch.empty(1, 2, 4, 8)
    jitted = thunder.jit(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), executors=[mem_attention_ex])
    jitted(q, k, torch.zeros(4, 4))
    calls = [b for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym == ltorch.scaled_dot_product_attention]
    assert calls and all(plain_call(b) is None for b in calls)


@pytest.mark.parametrize(("rows", "groups"), [(16384, 16), (131072, 32), (2048, 2), (1024, 1)])
def test_a_group_has_about_two_blocks_of_rows_for_each_multiprocessor(rows, groups):
    """Of an H100's 132; blocks have 128 rows, so two heads of 16,384 rows have 256 blocks."""
    with simulate("H100-80GB"), tracectx(TraceCtx(None)):
        q = TensorProxy(shape=(1, 32, rows, 128), device=Device("cuda"), dtype=dtypes.bfloat16)
        assert tiled_heads._groups(q, q) == groups
