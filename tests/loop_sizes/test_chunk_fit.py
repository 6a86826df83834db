"""How many rows a chunk has: from the head alone, from the program's timeline, under a budget; and dead rows."""

import re
from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import packed_bytes
from thunder_mem import BudgetError, ChunkLossHead, MemEfficient, chunked, last_plan, measure_peak, simulate
from thunder_mem.chunk_loop.plan import Head
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, scratch_bytes
from thunder_mem.loop_sizes.rows_per_chunk import default_rows, even_rows, floor_rows, lean_rows, leanest_rows
from thunder_mem.memory.units import parse_bytes
from thunder_mem.prediction.predict import predict

N, D, V = 1024, 16, 2048
MIB = 2**20
FLOOR = floor_rows("cpu", torch.float32)
LOSS_BYTES = 16  # the loss and its tangent, which `step` holds


def inputs(n=N, d=D, v=V, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g) * 0.3).to(dtype).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=g)


def head(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def wide_before_head(x, w, t):
    """A layer whose intermediate values are `WIDE` bytes, alive at the program's peak and not beside the head."""
    h = torch.tanh(x.repeat(1, 256))  # (N, 256 D)
    h = torch.sin(torch.cos(h)).reshape(N, 256, D).sum(1)
    return head(h, w, t)


def compiled_with(fn, transform, *args):
    compiled = thunder.jit(fn, executors=[], transforms=[transform])
    step = lambda: torch.autograd.grad(compiled(*args), args[:2])  # noqa: E731
    step()
    return compiled, step


def loops_of(compiled):
    return [loop_of(b).plan for b in thunder.last_traces(compiled)[-1].bound_symbols if is_chunk_loop(b)]


# --- from the head alone ------------------------------------------------------------------------------


def some_head(n, d, v, device="cuda:0", size=2):
    return Head("linear", "", n, v * size, size * n * d + 4 * v * d, size * (n + v) * d, device, torch.bfloat16)


@pytest.fixture
def h100():
    with simulate("H100-80GB"):
        yield


def test_rows_are_what_keeps_the_products_efficient(h100):
    gemma = some_head(8192, 2304, 256000)
    assert floor_rows("cuda:0", torch.bfloat16) == 2048
    assert lean_rows(gemma) == default_rows(gemma) == 2048
    assert leanest_rows(gemma) == 512
    assert floor_rows("xpu", torch.bfloat16) == 1024


@pytest.mark.parametrize("words", [24, 64])
def test_a_budget_of_the_default_peak_never_needs_more(words: int):
    """A head of 96 rows in a single chunk took 600,064 bytes, and whole 516,096."""
    embedding, head = torch.randn(500, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)

    def loss(i, embedding, head):
        return F.cross_entropy((embedding[i] @ head.t()).flatten(0, 1), i.flatten())

    with simulate("H100-80GB", fusion=None), torch.device("cuda"):
        given = torch.zeros(4, words, dtype=torch.long), *(x.to("cuda") for x in (embedding, head))
        free = predict(thunder.jit(loss, transforms=[MemEfficient()]), *given).peak_bytes
        jitted = thunder.jit(loss, transforms=[MemEfficient(budget=free, strict=True)])
        assert predict(jitted, *given).peak_bytes <= free
    assert bool(re.search("loss head", str(last_plan(jitted)))) == (words == 64)


def test_products_of_float32_are_efficient_with_fewer_rows(h100):
    """They compute a fifteenth as fast as bfloat16's, and their sums move as many bytes."""
    nano = replace(some_head(512, 128, 5000, size=4), dtype=torch.float32)
    assert lean_rows(nano) == leanest_rows(nano) == 128  # a tile of the product
    try:
        torch.set_float32_matmul_precision("high")  # TF32: half as fast as bfloat16
        assert floor_rows("cuda:0", torch.float32) == 1024
    finally:
        torch.set_float32_matmul_precision("highest")


def test_few_rows_run_at_once_where_a_float32_sum_takes_more_than_they_save(h100):
    llama = some_head(4096, 4096, 128256)  # 1002 MiB of logits, 1002 MiB of float32 beyond bfloat16
    assert lean_rows(llama) == default_rows(llama) == 4096
    assert lean_rows(some_head(8192, 4096, 128256)) == 2048
    in_float32 = replace(llama, row_bytes=4 * 128256, fixed_bytes=4 * 132352 * 4096, single_bytes=4 * 132352 * 4096)
    assert lean_rows(in_float32) == 2048  # no sum is wider than another


class Tied(torch.nn.Module):
    """An embedding that is the output layer's weight too, as in nanoGPT: 2.44 MiB."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5000, 128), torch.nn.Linear(128, 5000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        return head(torch.tanh(self.embedding(tokens)), self.head.weight, targets)


def planned_on_h100(tied=False, rows=512, dtype=None, **options):
    """The plan, the prediction and the loop of a head, whose logits over 512 rows take 9.77 MiB in float32."""
    with simulate("H100-80GB"), torch.device("cuda"):
        first = torch.zeros(rows, dtype=torch.long) if tied else torch.zeros(rows, 128, dtype=dtype, requires_grad=True)
        weights = [] if tied else [torch.zeros(5000, 128, dtype=dtype, requires_grad=True)]
        jitted = thunder.jit(Tied() if tied else head, transforms=[MemEfficient(strict=True, **options)])
        predicted = predict(jitted, first, *weights, torch.zeros(rows, dtype=torch.long), keep_outputs=True)
    return last_plan(jitted), predicted, loops_of(jitted)[0]


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.slow
def test_a_small_head_on_a_gpu_is_chunked_and_a_plan_says_what_the_device_will_hold(tied):
    plan, predicted, loop = planned_on_h100(tied)
    assert (loop.chunks, loop.chunk_rows) == (4, 128)
    asked, _, _ = planned_on_h100(tied, chunk=ChunkLossHead(rows=128))
    assert plan.candidate.peak_bytes <= asked.candidate.peak_bytes
    assert plan.candidate.peak_bytes == predicted.peak_bytes == predicted.phase("forward").peak_bytes
    assert predicted.scratch_bytes > 2 * MIB  # of the loop, and a part of the peak


@pytest.mark.slow
def test_a_budget_tries_the_smallest_chunks():
    """A quarter of the rows that a program without a budget gets, and no fewer than a tile has."""
    shape = {"rows": 8192, "dtype": torch.bfloat16}
    plan, _, free = planned_on_h100(**shape)
    budget = plan.candidate.peak_bytes - 8 * MIB
    tight, predicted, loop = planned_on_h100(**shape, budget=budget)
    assert 128 <= loop.chunk_rows < free.chunk_rows and loop.chunk_rows % loop.block_rows == 0
    assert tight.budget.peak_bytes == tight.candidate.peak_bytes == predicted.peak_bytes <= budget
    assert tight.budget.method == "free"
    with pytest.raises(BudgetError) as caught:
        planned_on_h100(**shape, budget=1)
    smallest = caught.value.smallest_peak_bytes
    assert planned_on_h100(**shape, budget=smallest)[1].peak_bytes == smallest


def test_what_a_budget_error_names_adds_up():
    x, w, t = inputs()
    with pytest.raises(BudgetError) as caught:
        compiled_with(head, MemEfficient(budget=1, chunk=ChunkLossHead(rows=512)), x, w, t)
    pattern = "held by (.*) of arguments and results, (.*) of computed values .* and (.*) of scratch inside Chunk"
    parts = re.search(pattern, str(caught.value))
    assert abs(sum(map(parse_bytes, parts.groups())) - caught.value.smallest_peak_bytes) < 3 * MIB // 200
    assert parse_bytes(parts[3]) >= 512 * V * 4  # the chunk's logits


@pytest.mark.slow
def test_a_single_chunk_adds_up_in_the_weights_own_dtype():
    x, w, t = inputs(300, 512, 3000, torch.bfloat16)
    compiled, step = compiled_with(head, ChunkLossHead(), x, w, t)
    (plan,) = loops_of(compiled)
    assert plan.chunks == 1 and plan.grad_dtypes == (torch.bfloat16, torch.bfloat16)
    packed = packed_bytes(300, 512, 3000, torch.bfloat16)
    assert measure_peak(step) <= 2 * (300 + 3000) * 512 + plan.forward_scratch_bytes + packed + 4096
    xd, wd = (a.detach().double().requires_grad_() for a in (x, w))
    exact, eager = torch.autograd.grad(head(xd, wd, t), (xd, wd)), torch.autograd.grad(head(x, w, t), (x, w))
    for got, want, peer in zip(step(), exact, eager, strict=True):
        assert (got.double() - want).norm() < 1.05 * (peer.double() - want).norm()


def test_temporaries_between_products_stay_within_half_a_mebibyte_on_a_cpu():
    x, w, t = inputs(1024, 8, 4096)
    compiled, _ = compiled_with(head, MemEfficient(), x, w, t)
    (plan,) = loops_of(compiled)
    assert 0 < plan.backward_block_bytes <= (MIB // 2) * 1.01


# --- from the timeline --------------------------------------------------------------------------------


@pytest.mark.slow
def test_chunks_grow_below_the_rest_of_the_programs_peak():
    args = inputs()
    compiled, step = compiled_with(wide_before_head, MemEfficient(), *args)
    lean, lean_step = compiled_with(wide_before_head, MemEfficient(chunk=ChunkLossHead(rows=FLOOR)), *args)
    (grown,), (fixed,) = loops_of(compiled), loops_of(lean)
    assert (fixed.chunk_rows, fixed.sized) == (FLOOR, "asked")
    assert grown.sized == "timeline" and grown.chunk_rows > FLOOR
    assert measure_peak(step) == measure_peak(lean_step)
    assert last_plan(compiled).candidate.peak_bytes == last_plan(lean).candidate.peak_bytes
    for got, want in zip(step(), lean_step(), strict=True):
        torch.testing.assert_close(got, want)


def test_no_smaller_than_that():
    """One block of rows more would raise the peak."""
    args = inputs()
    compiled, step = compiled_with(wide_before_head, MemEfficient(), *args)
    (plan,) = loops_of(compiled)
    peak = measure_peak(step)
    assert plan.chunk_rows == N or plan.chunks > 1
    fewer = -(-N // max(1, plan.chunks - 1))
    if plan.chunks > 1:
        _, larger = compiled_with(wide_before_head, MemEfficient(chunk=ChunkLossHead(rows=fewer)), *args)
        assert measure_peak(larger) > peak


def test_a_head_that_is_the_peak_keeps_the_floor():
    compiled, _ = compiled_with(head, MemEfficient(), *inputs())
    (plan,) = loops_of(compiled)
    assert plan.chunk_rows == even_rows(N, FLOOR) and plan.sized == "head"


def mlp(x, w, t):
    """The second product stands inside a block, and the gradient of its weight is one for each block."""
    with chunked():
        y = x + F.linear(F.gelu(F.linear(x, w)), w.t())
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1)


def test_products_inside_a_block_get_the_rows_that_they_need():
    x, w, t = inputs()
    compiled = thunder.jit(mlp, executors=[], transforms=[MemEfficient()])
    torch.autograd.grad(compiled(x, w, t).sum(), (x, w))
    (plan,) = loops_of(compiled)
    assert even_rows(N, FLOOR) <= plan.block_rows <= plan.chunk_rows


@pytest.mark.parametrize("fn", [head, wide_before_head])
def test_the_plan_the_prediction_and_the_measurement_agree(fn):
    args = inputs()
    compiled, step = compiled_with(fn, MemEfficient(), *args)
    predicted = predict(compiled)
    assert 0 <= measure_peak(step) - predicted.measured_bytes <= LOSS_BYTES
    (bsym,) = (b for b in thunder.last_traces(compiled)[-1].bound_symbols if is_chunk_loop(b))
    planned = last_plan(compiled).candidate
    assert planned.forward_peak_bytes >= predicted.phase("forward").peak_bytes - 4096
    event = next(e for e in predicted.timeline if e.name == "chunk_loop_with_grads")
    assert event.scratch_bytes <= scratch_bytes(bsym) + 4096


def test_under_a_budget_chunks_are_as_lean_as_it_takes():
    args = inputs(dtype=torch.float32)
    free, _ = compiled_with(head, MemEfficient(), *args)
    peak = last_plan(free).candidate.peak_bytes
    compiled, _ = compiled_with(head, MemEfficient(budget=peak - MIB), *args)
    (plan,) = loops_of(compiled)
    assert plan.chunk_rows < FLOOR - FLOOR % plan.block_rows
    assert last_plan(compiled).candidate.peak_bytes <= peak - MIB
    ample, _ = compiled_with(head, MemEfficient(budget=peak), *args)
    assert loops_of(ample)[0].chunk_rows >= plan.chunk_rows


@pytest.mark.slow
def test_a_tight_budget_takes_smaller_chunks_before_it_is_refused():
    args = inputs()
    free, _ = compiled_with(head, MemEfficient(), *args)
    rows_bytes = 4 * V
    peak_bytes = last_plan(free).candidate.peak_bytes
    # The first try takes a quarter of the floor's rows, which does not save as many.
    budget = peak_bytes - int(0.9 * FLOOR) * rows_bytes
    compiled, step = compiled_with(head, MemEfficient(budget=budget), *args)
    (plan,) = loops_of(compiled)
    assert plan.chunk_rows < FLOOR // 4
    assert last_plan(compiled).candidate.peak_bytes <= budget
    warned, _ = compiled_with(head, MemEfficient(budget=budget, on_infeasible="warn"), *args)
    assert last_plan(warned).candidate.peak_bytes <= budget
    for got, want in zip(step(), compiled_with(head, ChunkLossHead(chunks=4), *args)[1](), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(BudgetError) as refused:
        compiled_with(head, MemEfficient(budget=1), *args)
    # A block of a few rows is left, and the packed operands of a product.
    assert peak_bytes - 1.25 * FLOOR * rows_bytes < refused.value.smallest_peak_bytes <= budget


@pytest.mark.slow
def test_a_budget_without_room_for_float32_sums_takes_the_weights_own():
    x, w, t = inputs(1024, 256, 4096, torch.bfloat16)
    free, _ = compiled_with(head, MemEfficient(), x, w, t)
    assert loops_of(free)[0].grad_dtypes == (torch.bfloat16, torch.float32)
    weight_bytes = 2 * 4096 * 256
    budget = last_plan(free).candidate.peak_bytes - weight_bytes + 4096
    compiled, step = compiled_with(head, MemEfficient(budget=budget), x, w, t)
    (plan,) = loops_of(compiled)
    assert plan.grad_dtypes == (torch.bfloat16, torch.bfloat16) and "no room for float32" in plan.why
    assert "no room for float32" in next(d for d in last_plan(compiled).decisions if d.what == "loss head").how
    assert last_plan(compiled).candidate.peak_bytes <= budget
    held = sum(a.nbytes for a in (x, w, t))
    packed = packed_bytes(plan.chunk_rows, 256, 4096, torch.bfloat16)
    assert measure_peak(step) + held <= budget + packed + LOSS_BYTES
    assert 0 <= measure_peak(step) - predict(compiled).measured_bytes <= LOSS_BYTES
    xd, wd = (a.detach().double().requires_grad_() for a in (x, w))
    exact = torch.autograd.grad(head(xd, wd, t), (xd, wd))
    for got, want in zip(step(), exact, strict=True):
        assert got.dtype == torch.bfloat16 and (got.double() - want).norm() < 2e-2 * want.norm()
    # What the user asks for stays, and what fits as well.
    with pytest.raises(BudgetError):
        compiled_with(head, MemEfficient(budget=budget, chunk=ChunkLossHead(accumulate="float32")), x, w, t)
    ample, _ = compiled_with(head, MemEfficient(budget=budget + weight_bytes), x, w, t)
    assert loops_of(ample)[0].grad_dtypes == (torch.bfloat16, torch.float32)


@pytest.mark.slow
def test_sums_of_a_recomputing_head_are_priced_and_narrowed_too():
    def vector(x, w, t):
        return torch.logsumexp(F.linear(x, w), 0).square().mean()

    x, w, t = inputs(1024, 256, 4096, torch.bfloat16)
    free, step = compiled_with(vector, MemEfficient(), x, w, t)
    (plan,) = loops_of(free)[-1:]
    assert plan.mode == "recompute-in-backward" and plan.wider_sums_bytes == 2 * 4096 * 256
    held = sum(a.nbytes for a in (x, w, t))
    peak_bytes = last_plan(free).candidate.peak_bytes
    packed = (
        packed_bytes(plan.chunk_rows, 256, 4096, torch.bfloat16) + 2 * 4096
    )  # and the gradient of the vector, in 16 bits
    assert measure_peak(step) + held <= peak_bytes + packed + 4096
    budget = peak_bytes - plan.wider_sums_bytes + 16384
    compiled, step = compiled_with(vector, MemEfficient(budget=budget), x, w, t)
    assert all(p.wider_sums_bytes == 0 for p in loops_of(compiled))
    assert measure_peak(step) + held <= budget + packed + 4096
    xd, wd = (a.detach().double().requires_grad_() for a in (x, w))
    theirs, exact = (torch.autograd.grad(vector(*args, t), args) for args in ((x, w), (xd, wd)))
    for got, eager, want in zip(step(), theirs, exact, strict=True):
        assert (got.double() - want).norm() < 1.1 * (eager.double() - want).norm()


def early(x, w, t, u):
    """A head that much of the forward follows, and whose gradients are larger than its logits."""
    h = torch.tanh(x)
    aux = F.cross_entropy(F.linear(h, w), t)
    y = h.repeat(1, 4)
    for _ in range(4):
        y = torch.sin(y @ u)
    return aux + y.square().mean()


def test_a_head_early_in_the_forward_does_not_hold_its_gradients_there():
    generator = torch.Generator().manual_seed(0)
    x, w, u = (torch.randn(shape, generator=generator) / 16 for shape in ((128, 256), (2048, 256), (1024, 1024)))
    t = torch.randint(0, 2048, (128,), generator=generator)
    peaks = []
    for chunk in (False, True):
        args = [p.clone().requires_grad_() for p in (x, w)]
        jitted = thunder.jit(early, executors=[], transforms=[MemEfficient(chunk=chunk, strict=True)])
        jitted(*args, t, u.clone().requires_grad_())
        peaks.append(last_plan(jitted).candidate.peak_bytes)
        (loop,) = loops_of(jitted) if chunk else (None,)
    assert loop.mode == "recompute-in-backward"
    assert peaks[1] < peaks[0]


def few_rows(x, w, t):
    return F.cross_entropy(F.linear(torch.tanh(x), w), t)


def few_rows_marked(x, w, t):
    with chunked():
        return F.cross_entropy(F.linear(torch.tanh(x), w), t)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("fn", (few_rows, few_rows_marked))
def test_few_rows_before_a_wide_weight_stay_whole_unless_the_weight_is_frozen_or_the_user_asks(fn, frozen):
    """In one chunk the logits are no smaller, and the weight's gradient, many times larger, waits for the backward."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) / 16 for shape in ((96, 512), (4096, 512)))
    t = torch.randint(0, 4096, (96,), generator=generator)
    peaks = {}
    for chunk in (False, True):
        args = (x.clone().requires_grad_(), w.clone().requires_grad_(not frozen))
        jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(chunk=chunk, strict=True)])
        jitted(*args, t)
        peaks[chunk] = last_plan(jitted).candidate.peak_bytes
    stays = fn is few_rows and not frozen
    assert bool(loops_of(jitted)) == (not stays)
    refused = [r for r in last_plan(jitted).refused if "one chunk would save nothing" in r.reason]
    assert len(refused) == stays
    if fn is few_rows:
        assert peaks[True] <= peaks[False]


def test_chunk_takes_the_options_of_the_transform_or_a_bool():
    with pytest.raises(TypeError, match="chunk is True or False, or a ChunkLossHead"):
        MemEfficient(chunk=16)
    compiled, _ = compiled_with(head, MemEfficient(chunk=ChunkLossHead(chunks=3)), *inputs())
    assert loops_of(compiled)[0].chunks == 3
    compiled, _ = compiled_with(head, MemEfficient(chunk=False), *inputs())
    assert not loops_of(compiled)


# --- dead rows ------------------------------------------------------------------------------------------


def hidden(x, w, t):
    return head(F.linear(x, w[: x.shape[1]]), w, t)


def hidden_used_again(x, w, t):
    h = torch.tanh(x) * 2
    return head(h, w, t) + h.square().mean()


def rows_of_the_caller(x, w, t):
    """Its copy is one only for some strides: given the transpose of a contiguous tensor it is the caller's memory."""
    return head(x.t().contiguous(), w, t)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transform", [ChunkLossHead(rows=64), MemEfficient(chunk=ChunkLossHead(rows=64))], ids=str)
def test_the_gradient_of_dead_rows_takes_their_place(transform):
    x, w, t = inputs(N, 256, V)
    compiled, step = compiled_with(hidden, transform, x, w, t)
    (plan,) = loops_of(compiled)
    assert plan.over == (0,) and "written over it" in str(thunder.last_traces(compiled)[-1])
    # Beside the loop: the gradients of its rows and of w; a chunk. Without reuse there would be the rows as well.
    assert 0 <= measure_peak(step) - predict(compiled).measured_bytes <= LOSS_BYTES
    (event,) = (e for e in predict(compiled).timeline if e.name == "chunk_loop_with_grads")
    grads = (N * 256 + V * 256) * 4
    assert event.live_bytes - predict(compiled).held_bytes <= grads + 64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", [hidden, hidden_used_again, rows_of_the_caller])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_somebody_needs_stay(fn, dtype):
    x, w, t = inputs(dtype=dtype)
    if fn is rows_of_the_caller:
        x = x.detach().t().requires_grad_()
        assert x.t().is_contiguous()
    before = x.detach().clone()
    compiled = thunder.jit(fn, executors=[], transforms=[ChunkLossHead(chunks=4)])
    loss = compiled(x, w, t)
    grads = torch.autograd.grad(loss, (x, w), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w))
    assert torch.equal(x, before)
    xd, wd = (a.detach().double().requires_grad_() for a in (x, w))
    exact = torch.autograd.grad(fn(xd, wd, t), (xd, wd))
    for got, repeated, want in zip(grads, again, exact, strict=True):
        assert torch.equal(got, repeated)
        assert (got.double() - want).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * want.norm()
    (plan,) = loops_of(compiled)
    # In bfloat16 the second reader reads a float32 copy, made before.
    assert bool(plan.over) == (fn is hidden or (fn is hidden_used_again and dtype == torch.bfloat16))
