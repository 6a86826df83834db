"""Once the chunks of a loss head on a CPU are counted, they are equal and run in few blocks, at no higher peak."""

from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from thunder_mem import BudgetError, ChunkLossHead, MemEfficient, last_plan, measure_peak
from thunder_mem.chunk_loop.body import BodiesByRows, Body
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.decisions import pipeline
from thunder_mem.loop_sizes import even_chunks
from thunder_mem.loop_sizes.rows_per_chunk import even_rows
from thunder_mem.prediction.predict import predict
from thunder_mem.tiling import opening

D, V = 16, 2048


@pytest.fixture(autouse=True, scope="module")
def small_rows_count():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "_MIN_BYTES", 1)
        yield


def model(x, scale, w, t):
    """Wide values at the program's peak, and a head, whose chunks grow below it."""
    x = x + torch.cumsum(x.repeat(1, 64), 1).view(len(x), 64, D).mean(1)
    return F.cross_entropy(F.linear(F.rms_norm(x, (D,), scale), w), t)


def inputs(n):
    g = torch.Generator().manual_seed(0)
    shapes = (n, D), (D,), (V, D)
    given = [(torch.randn(*s, generator=g) / 4).requires_grad_() for s in shapes]
    return *given, torch.randint(0, V, (n,), generator=g)


def planned(n, **options):
    """The program, planned and not run, and its loop."""
    jitted = thunder.jit(model, transforms=[MemEfficient(strict=True, **options)])
    predict(jitted, *inputs(n))
    (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    return jitted, loop


@pytest.fixture
def as_fitted(monkeypatch):
    """Plans end before chunks are evened out."""

    def planned_so(n):
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "with_even_loops", lambda planned: planned)
            return planned(n)

    return planned_so


@pytest.mark.parametrize("n", [1024, pytest.param(1021, marks=pytest.mark.slow)])
def test_chunks_are_equal_in_one_block_each_at_no_higher_peak(n, as_fitted):
    before, old = as_fitted(n)
    jitted, loop = planned(n)
    plan = loop.plan
    assert old.plan.chunk_rows > old.plan.block_rows and plan.opening is not None
    assert plan.chunks == old.plan.chunks and plan.chunk_rows <= old.plan.chunk_rows
    assert plan.n % plan.chunk_rows == 0 or plan.chunk_rows % 16 == 0
    assert plan.block_rows == plan.opening.block_rows == plan.chunk_rows
    assert last_plan(jitted).candidate.peak_bytes <= last_plan(before).candidate.peak_bytes
    for bodies in (loop.backward, loop.opening, loop.closing):
        assert tuple(bodies) == block_sizes(plan.n, plan.chunk_rows, plan.chunk_rows)
    assert plan.backward_block_bytes == max(body.peak_bytes for body in loop.backward.values())


def test_chunks_that_the_user_set_stay():
    _, loop = planned(1021, chunk=ChunkLossHead(rows=200))
    assert loop.plan.chunk_rows == 200 and set(loop.backward) == set(block_sizes(1021, 200, loop.plan.block_rows))


@pytest.fixture(scope="module")
def some_plan():
    return planned(1024)[1].plan


@given(n=st.integers(1, 5000), chunk_rows=st.integers(1, 5000))
def test_as_many_chunks_as_before(some_plan, n, chunk_rows):
    plan = replace(some_plan, n=n, chunk_rows=min(n, chunk_rows))
    rows = even_rows(n, plan.chunk_rows)
    assert rows <= plan.chunk_rows and replace(plan, chunk_rows=rows).chunks == plan.chunks


@pytest.mark.slow
def test_gradients_and_bytes_of_uneven_rows():
    args = inputs(1021)
    jitted, _ = planned(1021)
    step = lambda fn, args: torch.autograd.grad(fn(*args), args[:3])  # noqa: E731
    exact = [a.detach().double().requires_grad_() for a in args[:3]]
    for got, want in zip(step(jitted, args), step(model, (*exact, args[3])), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    assert measure_peak(lambda: step(jitted, args)) - predict(jitted).measured_bytes in range(17)


def test_a_missing_block_is_built_like_the_others():
    asked = []
    other = Body(len, None, 3, 1, ())
    resize = lambda rows: asked.append(rows) or other  # noqa: E731
    bodies = BodiesByRows({8: Body(len, None, 8, 1, (), resized=resize)})
    assert bodies[3] is bodies[3] is other and asked == [3] and set(bodies) == {8, 3}


def test_blocks_that_hold_more_than_was_estimated_are_not_taken(monkeypatch):
    """Without temporaries a chunk would be one block; with them the peak, which is in the head, would rise."""

    def head(x, w, t):
        return F.cross_entropy(F.linear(torch.tanh(x), w), t)

    x, _, w, t = inputs(1024)
    peaks = []
    for believed in (even_chunks.row_scratch_bytes, lambda plan, body: 0):
        monkeypatch.setattr(even_chunks, "row_scratch_bytes", believed)
        jitted = thunder.jit(head, executors=[], transforms=[MemEfficient(strict=True)])
        predict(jitted, x, w, t)
        peaks.append(last_plan(jitted).candidate.peak_bytes)
    assert peaks[0] == peaks[1]


def test_the_smallest_plan_of_a_budget_has_the_bytes_that_the_error_names():
    """A chunk of half a block is one block, and its bytes are those of its rows."""

    def head(x, scale, w, t):
        return F.cross_entropy(F.linear(x * scale, w), t)

    x, scale, w, t = inputs(2400)
    args = x, scale, w[:900].detach().requires_grad_(), t % 900

    def within(budget):
        jitted = thunder.jit(head, executors=[], transforms=[MemEfficient(strict=True, budget=budget)])
        predict(jitted, *args)
        return last_plan(jitted).candidate.peak_bytes

    with pytest.raises(BudgetError) as refused:
        within(1)
    smallest = refused.value.smallest_peak_bytes
    assert within(smallest) == smallest < 800_000


@pytest.mark.slow
def test_one_block_of_an_opening_exists_at_a_time():
    def head(x, scale, w, t):
        return F.cross_entropy(F.linear(F.rms_norm(x, (512,), scale), w), t)

    g = torch.Generator().manual_seed(0)
    x, scale, w = (torch.randn(*s, generator=g).requires_grad_() for s in ((1024, 512), (512,), (V, 512)))
    t = torch.randint(0, V, (1024,), generator=g)
    jitted = thunder.jit(head, transforms=[MemEfficient(strict=True, chunk=ChunkLossHead(rows=512))])
    step = lambda: torch.autograd.grad(jitted(x, scale, w, t), (x, scale, w))  # noqa: E731
    step()
    (plan,) = {loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    assert plan.opening is not None and plan.opening.block_rows < plan.chunk_rows
    held = sum(a.nbytes for a in (x, scale, w, t))
    partial_sums = 16 * 4 * 512  # of the scale's gradient, which Inductor splits, and the gradient itself
    assert measure_peak(step) <= last_plan(jitted).candidate.peak_bytes - held + partial_sums + 4096
