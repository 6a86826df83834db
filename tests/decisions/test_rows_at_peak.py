"""Fewer rows for the loops at a step's peak: what they save, what they cost, and that the prediction knows them."""

from dataclasses import replace
from math import inf

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs.chunk_tools import chunked, head
from tests.programs.chunk_tools import inputs as head_inputs
from thunder_mem import MemEfficient, Tiles, last_plan, predict, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.decisions import rows_at_peak
from thunder_mem.decisions.rows_at_peak import with_fewer_rows_at_peak
from thunder_mem.planning import tile_selection

TOKENS, WIDTH, WIDE, VOCABULARY = 16384, 2048, 8192, 65536


def mlp(x, up, down):
    return x + F.linear(F.relu(F.linear(x, up)), down)


def step(x, up, down):
    return checkpoint(mlp, x.sin(), up, down, use_reentrant=False).sum(dtype=torch.float32)


def with_loss(x, up, down, head, targets, norm=None):
    x = checkpoint(mlp, x.sin(), up, down, use_reentrant=False)
    x = x if norm is None else F.rms_norm(x, (WIDTH,), norm)
    return F.cross_entropy(F.linear(x, head), targets)


def inputs(*shapes):
    return [torch.empty(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]


def compiled(monkeypatch, fn, args, longer, tile=True):
    """The program whose loops at the peak get fewer rows, its prediction, and its plans' peaks.

    Args:
        longer: times the seconds that its plan takes, it may take.
    """
    peaks = []

    def fewer(planned, _):
        most_s = longer * planned.final_seconds
        found = with_fewer_rows_at_peak(planned, lambda new: new.final_seconds <= most_s)
        peaks[:] = planned.peak_bytes, found.peak_bytes
        return found

    monkeypatch.setattr(tile_selection, "with_fewer_rows_at_peak", fewer)
    jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True, tile=tile)])
    return jitted, predict(jitted, *args, keep_outputs=True), peaks


def rows_of(trace, name):
    """The rows of the chunks of all loops whose symbol's name begins so."""
    loops = [b for b in trace.bound_symbols if is_chunk_loop(b) and b.sym.name.startswith(name)]
    return [loop_of(b).plan.chunk_rows for b in loops]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("longer", "rows"), [(inf, 1024), (1.03, 1280), (0.0, 2048)])
def test_the_backward_of_a_stretch_at_the_peak_has_smaller_tiles_where_time_has_room(monkeypatch, longer, rows):
    with simulate("H100-80GB", fusion="nvfuser"):
        jitted, found, (before, after) = compiled(
            monkeypatch, step, inputs((TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)), longer
        )
    assert rows_of(thunder.last_backward_traces(jitted)[-1], "chunk_loop_backward") == [rows]
    assert rows_of(thunder.last_traces(jitted)[-1], "chunk_loop") == [2048]
    assert found.peak_bytes == after
    assert (before > after) == (rows < 2048)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "longer", "rows", "block_rows"),
    [(False, inf, 1280, 640), (True, inf, 1280, 640), (False, 1.0, 1536, 512)],
    ids=["any time", "any time, norm", "no time"],
)
def test_a_loss_head_at_the_peak_has_smaller_chunks(monkeypatch, norm, longer, rows, block_rows):
    """1,280 rows do not quite hide the sums of this narrow model, 1,536 do."""
    with simulate("H100-80GB", fusion="nvfuser"):
        args = inputs((TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE), (VOCABULARY, WIDTH))
        args.append(torch.zeros(TOKENS, dtype=torch.long, device="cuda"))
        args += inputs((WIDTH,)) if norm else []
        jitted, found, (before, after) = compiled(monkeypatch, with_loss, args, longer)
    (plan,) = {
        loop_of(b).plan for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "chunk_loop_with_grads"
    }
    assert (plan.chunk_rows, plan.block_rows) == (rows, block_rows)
    assert (plan.opening.block_rows if plan.opening else None) == (256 if norm else None)
    assert found.peak_bytes == after < before


@pytest.mark.slow
def test_chunks_may_have_fewer_rows_than_half_of_a_block(monkeypatch):
    """By default a chunk of this head is a block of 3,328 rows."""
    with simulate("H100-80GB", fusion="nvfuser"):
        args = inputs((65536, 1024), (4096, 1024), (1024, 4096), (32000, 1024))
        args.append(torch.zeros(65536, dtype=torch.long, device="cuda"))
        jitted, found, (before, after) = compiled(monkeypatch, with_loss, args, inf)
    assert rows_of(thunder.last_traces(jitted)[-1], "chunk_loop_with_grads") == [1280]
    assert found.peak_bytes == after < before


@pytest.mark.slow
def test_chunks_grow_again_where_narrower_sums_leave_room():
    with simulate("H100-80GB", fusion="nvfuser"):
        args = inputs((TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE), (VOCABULARY, WIDTH))
        args.append(torch.zeros(TOKENS, dtype=torch.long, device="cuda"))
        jitted = thunder.jit(with_loss, transforms=[MemEfficient(strict=True, budget=1_060_000_000)])
        found = predict(jitted, *args, keep_outputs=True)
    (head,) = (b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "chunk_loop_with_grads")
    plan = loop_of(head).plan
    assert plan.grad_dtypes[-1] is torch.bfloat16 and plan.chunk_rows > 768
    assert found.peak_bytes == last_plan(jitted).budget.peak_bytes <= 1_060_000_000
    assert found.peak_bytes + plan.block_rows * plan.row_bytes > 1_060_000_000  # no further block would fit


@pytest.mark.slow
def test_a_budget_is_met_by_fewer_rows_before_anything_is_bought(monkeypatch):
    args = (TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)
    with simulate("H100-80GB", fusion="nvfuser"):
        _, found, _ = compiled(monkeypatch, step, inputs(*args), 0.0)
        ours = MemEfficient(strict=True, budget=found.peak_bytes - 1)
        jitted = thunder.jit(step, transforms=[ours])
        within = predict(jitted, *inputs(*args), keep_outputs=True)
    assert rows_of(thunder.last_backward_traces(jitted)[-1], "chunk_loop_backward") == [1280]
    assert within.peak_bytes == last_plan(jitted).budget.peak_bytes < found.peak_bytes
    assert last_plan(jitted).budget.cost_ms == 0


def two_steps(x, up, down, up2, down2):
    x = checkpoint(mlp, x.sin(), up, down, use_reentrant=False)
    return checkpoint(mlp, x, up2, down2, use_reentrant=False).sum(dtype=torch.float32)


@pytest.mark.slow
def test_if_nothing_else_fits_only_the_loop_at_the_peak_gets_narrower_sums():
    shapes = (TOKENS, WIDTH), *2 * [(WIDE, WIDTH), (WIDTH, WIDE)]
    with simulate("H100-80GB", fusion="nvfuser"):
        default = thunder.jit(two_steps, transforms=[MemEfficient(strict=True)])
        peak_bytes = predict(default, *inputs(*shapes), keep_outputs=True).peak_bytes
        jitted = thunder.jit(two_steps, transforms=[MemEfficient(strict=True, budget=peak_bytes - 30_000_000)])
        found = predict(jitted, *inputs(*shapes), keep_outputs=True)
    loops = [loop_of(b).plan for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)]
    assert [loop.grad_dtypes[-1] for loop in loops] == [torch.float32, torch.bfloat16]
    bought = last_plan(jitted).budget
    assert found.peak_bytes == bought.peak_bytes <= bought.budget_bytes
    assert bought.cost_ms == 0 and bought.method != "smallest"


def test_rows_that_the_user_set_stay(monkeypatch):
    with simulate("H100-80GB", fusion="nvfuser"):
        args = inputs((TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE))
        jitted, *_ = compiled(monkeypatch, step, args, inf, tile=Tiles(rows=2048))
    assert rows_of(thunder.last_backward_traces(jitted)[-1], "chunk_loop_backward") == [2048]


@pytest.mark.slow
def test_a_budget_gives_chunks_the_rows_that_no_whole_block_would_fit():
    """By its own blocks this head has chunks of 512 or 1,024 rows."""
    budget_bytes = 1_150_000_000
    with simulate("H100-80GB", fusion="nvfuser"):
        args = inputs((TOKENS, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE), (VOCABULARY, WIDTH))
        args.append(torch.zeros(TOKENS, dtype=torch.long, device="cuda"))
        jitted = thunder.jit(with_loss, transforms=[MemEfficient(strict=True, budget=budget_bytes)])
        found = predict(jitted, *args, keep_outputs=True)
    assert rows_of(thunder.last_traces(jitted)[-1], "chunk_loop_with_grads") == [768]
    assert found.peak_bytes == last_plan(jitted).budget.peak_bytes <= budget_bytes


def test_chunks_of_a_head_get_fewer_rows_in_whole_blocks():
    jitted, _ = chunked(head, rows=16)
    jitted(*head_inputs())
    loop = loop_of(next(b for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)))
    many = replace(loop.plan, n=1 << 21, chunk_rows=1 << 20, sized="timeline")
    fewer = rows_at_peak._fewer_chunk_rows(many)
    assert fewer and fewer[-1] < many.chunk_rows
    assert not rows_at_peak._fewer_chunk_rows(replace(many, sized="asked"))
    assert rows_at_peak._chunks(loop, 3 * loop.plan.block_rows).plan.chunk_rows == 3 * loop.plan.block_rows
