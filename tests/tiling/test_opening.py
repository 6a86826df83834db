"""The final norm inside a head's loop: gradients against float64, what is taken in, and what exists whole."""

from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.checking.traces import unfused
from tests.programs.chunk_cases import CASES, loss_and_grads, prepare
from tests.programs.chunk_tools import relative
from thunder_mem import MemEfficient, last_plan, measure_peak, predict, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_body.leaves import read_program
from thunder_mem.tiling import opening
from thunder_mem.tiling.opening_build import with_smaller_opening
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead

N, D, V = 411, 16, 101


@pytest.fixture(autouse=True)
def small_rows_count(monkeypatch):
    monkeypatch.setattr(opening, "_MIN_BYTES", 1)


def inputs(dtype=torch.float32, n=N, d=D, v=V):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    a = torch.randn(d, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g) * 0.3).to(dtype).requires_grad_()
    return h, a, w, torch.randint(0, v, (n,), generator=g)


def rms(h, a):
    wide = h.float() if h.dtype != torch.float64 else h
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (normed * a.to(wide.dtype)).to(h.dtype)


def rms_head(h, a, w, t):
    return F.cross_entropy(F.linear(rms(h, a), w), t)


def layer_norm_head(h, a, w, t):
    return F.cross_entropy(F.linear(F.layer_norm(h, (D,), a, a), w), t)


def two_dims(h, a, w, t):
    return F.cross_entropy(F.linear(rms(h[: 2 * 205].view(2, 205, D), a), w).view(-1, V), t[: 2 * 205])


def residual(h, a, w, t):
    x = F.linear(h, w[: h.shape[1]])
    return F.cross_entropy(F.linear(rms(x + h, a), w), t)


def two_heads(h, a, w, t):
    x = rms(h, a)
    return F.cross_entropy(F.linear(x, w) + F.linear(x, w * w), t)


def vector_loss(h, a, w, t):
    losses = F.cross_entropy(F.linear(rms(h, a), w), t, reduction="none")
    return (losses * torch.arange(N).to(losses.dtype)).sum()


def frozen_norm(h, a, w, t):
    return rms_head(h, a.detach(), w, t)


def gelu_and_norm(h, a, w, t):
    return F.cross_entropy(F.linear(rms(F.gelu(F.linear(h, w[: h.shape[1]])), a), w), t)


def over_rows(h, a, w, t):
    """The total over rows is a whole value for the loop."""
    return F.cross_entropy(F.linear(a * h * torch.rsqrt(h.square().mean(0, keepdim=True) + 1), w), t)


def loop_of_head(compiled):
    trace = thunder.last_traces(compiled)[-1]
    (plan,) = {loop_of(b).plan.name: loop_of(b).plan for b in trace.bound_symbols if is_chunk_loop(b)}.values()
    return plan


PROGRAMS = (
    rms_head,
    layer_norm_head,
    two_dims,
    residual,
    two_heads,
    vector_loss,
    frozen_norm,
    gelu_and_norm,
    over_rows,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [rms_head, layer_norm_head, two_heads])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_weight_is_repeated_for_its_rows_inside(fn, dtype):
    args = inputs(dtype)
    compiled = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(rows=100)])
    compiled(*args)
    plan = loop_of_head(compiled)
    by_rows = [plan.inputs[i].shape for i in plan.opening.sides if plan.inputs[i].sharding.split]
    whole = [plan.inputs[i].shape for i in plan.opening.sides if not plan.inputs[i].sharding.split]
    assert by_rows == [(N, D)] and all(D in shape and N not in shape for shape in whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64(fn, dtype):
    args = inputs(dtype)
    compiled = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(rows=100)])
    wanted = [x for x in args[:3] if not (fn is frozen_norm and x is args[1])]
    loss = -2.5 * compiled(*args)
    found = torch.autograd.grad(loss, wanted, retain_graph=True)
    again = torch.autograd.grad(loss, wanted)
    exact_args = [x.detach().double().requires_grad_() for x in args[:3]]
    exact_wanted = [e for x, e in zip(args[:3], exact_args, strict=True) if any(x is y for y in wanted)]
    exact = torch.autograd.grad(-2.5 * fn(*exact_args, args[3]), exact_wanted)
    eager = torch.autograd.grad(-2.5 * fn(*args), wanted)
    for got, repeated, plain, want in zip(found, again, eager, exact, strict=True):
        assert torch.equal(got, repeated)
        assert relative(got, want) <= 1.5 * relative(plain, want) + 1e-6
    plan = loop_of_head(compiled)
    assert plan.opening is not None and plan.gemms[0].x is None
    # Only what the norm reads exists whole, never its result.
    assert sum(spec.sharding.split and spec.shape[-1] == D for spec in plan.inputs) == 1


SEVERAL_ROWS = {"kl_distill", "kl_and_ce", "jsd", "two_heads", "multi_token", "lora"}
"""Losses whose products have different rows, or whose rows something else reads."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [c for c in CASES if "x" in c.grads], ids=str)
def test_every_loss_behind_a_norm(case):
    def behind_a_norm(**tensors):
        x = tensors["x"]
        return case.fn(**{**tensors, "x": x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)})

    transform = ChunkLossHead(chunks=5)
    compiled = thunder.jit(behind_a_norm, executors=[], transforms=[transform])
    values, grads = loss_and_grads(compiled, prepare(case, torch.float32), case.grads)
    exact_values, exact_grads = loss_and_grads(behind_a_norm, prepare(case, torch.float64), case.grads)
    for value, exact in zip(values, exact_values, strict=True):
        torch.testing.assert_close(value.double(), exact.double(), rtol=2e-5, atol=1e-6)
    for name, grad, exact in zip(case.grads, grads, exact_grads, strict=True):
        assert relative(grad, exact) < 2e-5, name
    picked_first = case.name == "hf_shift"
    assert (transform.record.loops[0].opening is None) == (picked_first or case.name in SEVERAL_ROWS)


def returned(h, a, w, t):
    x = rms(h, a)
    return F.cross_entropy(F.linear(x, w), t), x


def read_by_the_head(h, a, w, t):
    x = rms(h, a)
    return F.cross_entropy(F.linear(x, w), t, reduction="none").mul(x.sum(-1)).sum()


def operand_read_by_the_head(h, a, w, t):
    losses = F.cross_entropy(F.linear(rms(h, a), w), t, reduction="none")
    return (losses * h.sum(-1)).sum()


def plain(h, a, w, t):
    return F.cross_entropy(F.linear(h + 0 * a, w), t)


@pytest.mark.parametrize("fn", [returned, read_by_the_head, plain])
def test_what_others_need_stays_outside(fn):
    args = inputs()
    compiled = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(rows=100)])
    out = compiled(*args)
    loss = out[0] if isinstance(out, tuple) else out
    found = torch.autograd.grad(loss, (args[0], args[2]))
    exact_args = [x.detach().double().requires_grad_() for x in args[:3]]
    out = fn(*exact_args, args[3])
    exact = torch.autograd.grad(out[0] if isinstance(out, tuple) else out, (exact_args[0], exact_args[2]))
    for got, want in zip(found, exact, strict=True):
        assert (got.double() - want).norm() <= 1e-5 * want.norm() + 1e-9
    assert loop_of_head(compiled).opening is None


def test_rows_that_the_head_reads_itself_get_one_gradient():
    args = inputs()
    compiled = thunder.jit(operand_read_by_the_head, executors=[], transforms=[ChunkLossHead(rows=100)])
    found = torch.autograd.grad(compiled(*args), args[:3])
    exact_args = [x.detach().double().requires_grad_() for x in args[:3]]
    exact = torch.autograd.grad(operand_read_by_the_head(*exact_args, args[3]), exact_args)
    assert all(relative(got, want) < 1e-5 for got, want in zip(found, exact, strict=True))


def test_rows_that_the_head_reads_beside_its_product_stay_outside_of_an_opening():
    """Their gradient would be two sums."""

    def fn(h, a, w, t):
        logits = F.linear(rms(h, a), w).view(-1, D, 4) * h.unsqueeze(-1)
        return F.cross_entropy(logits.reshape(-1, 4 * D), t)

    args = inputs(v=4 * D)
    compiled = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(rows=100)])
    found = torch.autograd.grad(compiled(*args), args[:3])
    exact_args = [x.detach().double().requires_grad_() for x in args[:3]]
    exact = torch.autograd.grad(fn(*exact_args, args[3]), exact_args)
    assert all(relative(got, want) < 1e-5 for got, want in zip(found, exact, strict=True))
    assert loop_of_head(compiled).opening is None


def hidden(h, a, w, t):
    return rms_head(F.linear(h, w[: h.shape[1]]), a, w, t)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transform", [ChunkLossHead(rows=64), MemEfficient(chunk=ChunkLossHead(rows=64))], ids=str)
def test_the_norms_result_never_exists_whole_and_its_operand_takes_its_gradient(transform, monkeypatch):
    args = inputs(n=2048, d=64, v=256)
    compiled = thunder.jit(hidden, executors=[], transforms=[transform])

    def step():
        torch.autograd.grad(compiled(*args), args[:3])

    step(), step()
    found = predict(compiled)
    assert measure_peak(step) == pytest.approx(found.measured_bytes, abs=64)
    plan = loop_of_head(compiled)
    assert plan.opening is not None and plan.over == (0,)
    (event,) = (e for e in found.timeline if e.name == "chunk_loop_with_grads")
    rows = 2048 * 64 * 4
    assert event.live_bytes - found.held_bytes <= rows + 256 * 64 * 4 + 1024
    (bsym,) = (b for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name == "chunk_loop_with_grads")
    assert event.scratch_bytes <= plan.backward_scratch_bytes + 4096, bsym


def of_a_product(h, u, a, w, t):
    return rms_head(F.linear(h, u), a, w, t)


def of_a_residual_sum(h, u, a, w, t):
    return rms_head(h + F.linear(h, u), a, w, t)


def on_h100(fn=of_a_product, **options):
    """Plan, prediction and loop of a norm and a head of 16,384 rows in bfloat16."""
    with simulate("H100-80GB"), torch.device("cuda"):
        shapes = (16384, 512), (512, 512), (512,), (16384, 512)
        args = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True, **options)])
        predicted = predict(jitted, *args, torch.zeros(16384, dtype=torch.long), keep_outputs=True)
    return last_plan(jitted), predicted, loop_of_head(jitted)


@pytest.mark.slow
def test_a_plan_says_what_a_gpu_will_hold_and_it_is_less_than_without(monkeypatch):
    plan, predicted, loop = on_h100()
    assert loop.opening is not None and loop.opening.block_rows < loop.block_rows
    assert plan.candidate.peak_bytes == predicted.peak_bytes
    monkeypatch.setattr(opening, "_MIN_BYTES", 1 << 60)
    without, _, whole = on_h100()
    assert whole.opening is None
    assert predicted.peak_bytes <= without.candidate.peak_bytes - (16384 - loop.chunk_rows) * 512 * 2 + (1 << 20)


@pytest.mark.slow
def test_a_budget_narrows_the_sums_of_an_opening_too():
    plan, _, _ = on_h100()
    tight, predicted, loop = on_h100(budget=plan.candidate.peak_bytes - (8 << 20))
    assert loop.opening is not None and loop.chunks > 1
    assert tight.candidate.peak_bytes == predicted.peak_bytes < plan.candidate.peak_bytes


@pytest.mark.slow
def test_the_gradient_of_a_sum_before_the_norm_is_not_cast_to_float32_and_back():
    """The norm's own gradient stood between the two casts; now they would make a wide copy of all rows."""
    plan, predicted, loop = on_h100(of_a_residual_sum)
    assert loop.opening is not None
    assert plan.candidate.peak_bytes == predicted.peak_bytes
    narrow = 16384 * 512 * 2
    # Whole rows: the argument, the gradient of the sum, and that of the product's operand; with the casts, five.
    weights_and_gradients = 2 * (512 * 512 + 16384 * 512 + 512) * 2
    assert plan.candidate.backward_peak_bytes - weights_and_gradients <= 3.5 * narrow


def test_an_opening_may_see_fewer_rows_and_has_a_price_for_each():
    compiled = thunder.jit(rms_head, executors=[], transforms=[ChunkLossHead(rows=64)])
    compiled(*inputs())
    loop = loop_of(next(b for b in thunder.last_traces(compiled)[-1].bound_symbols if is_chunk_loop(b)))
    fewer = with_smaller_opening(loop, 16)
    assert fewer.plan.opening.block_rows == 16 and 16 in fewer.opening and 16 in fewer.closing
    for made in (loop.plan.opening, fewer.plan.opening):
        assert made.forward_row_s > 0 and made.backward_row_s > 0


def test_chunks_on_a_gpu_grow_by_whole_blocks_of_the_head_and_of_the_norm():
    """A head's loop at the peak gets blocks of 640 rows, and its norm keeps those of 256. On a CPU blocks come last."""
    compiled = thunder.jit(rms_head, executors=[], transforms=[ChunkLossHead(rows=64)])
    compiled(*inputs())
    plan = loop_of_head(compiled)
    assert plan.opening is not None
    fewer = replace(plan, chunk_rows=1280, block_rows=640, opening=replace(plan.opening, block_rows=256))
    on_gpu = tuple(replace(spec, device="cuda:0") for spec in plan.outputs)
    assert replace(fewer, outputs=on_gpu).step_rows == 1280
    assert fewer.step_rows == 640 and replace(fewer, chunk_rows=640).step_rows == 320


def test_a_write_is_not_done_in_vain():
    """Nobody reads the written value in the program, and it does not go with the operations that make it."""

    def fn(x, y):
        y.copy_(x.sin())
        return x * 2

    program = read_program(unfused(fn, torch.ones(3), torch.ones(3)))
    assert "copy_" in [leaf.name for leaf in program.leaves]
    assert opening._unread(program) == []
