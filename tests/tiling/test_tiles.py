"""Stretches in tiles: values and gradients against float64 eager, peaks, and what must not run in tiles."""

import copy
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.programs.chunk_cases import CASES, loss_and_grads, prepare
from thunder_mem import (
    BudgetError,
    ChunkLossHead,
    MemEfficient,
    Tiles,
    last_plan,
    measure_peak,
    memory_time_frontier,
    predict,
    tiled,
)
from thunder_mem.chunk_loop import gradient_sums
from thunder_mem.chunk_loop.gradient_sums import sole_owner
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.partition_choice import TooSlowError
from thunder_mem.decisions.program import Planned
from thunder_mem.decisions.refine import TILES_AGAIN
from thunder_mem.loop_body import block as blocks_of_rows
from thunder_mem.memory.plan import Decision
from thunder_mem.planning import tile_selection
from thunder_mem.tiling.tiles import TilingError

WIDTH, WIDE = 16, 64


class Block(nn.Module):
    """A gated MLP with its norm and its residual sum, as LLaMA has it."""

    def __init__(self, bias=False, width=WIDTH, wide=WIDE):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, wide, bias), nn.Linear(width, wide, bias)
        self.down = nn.Linear(wide, width, bias)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    """Blocks under checkpoints, and a loss."""

    def __init__(self, blocks=2, checkpoints=True, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.checkpoints = checkpoints

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()


def made(module, shape, dtype=torch.float32):
    torch.manual_seed(0)
    return module.to(dtype), torch.randn(shape, dtype=dtype)


def compiled(fn, tile, **options):
    return thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True, verify=True, tile=tile, **options)])


def tiles_of(jitted):
    return [d for d in last_plan(jitted).decisions if d.what == "tiles"]


def gradients(fn, module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    fn(x).backward()
    return [x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def errors(found, exact):
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(found, exact, strict=True)]


def assert_as_exact_as_eager(module, x, tile, count, factor=2.0):
    double = copy.deepcopy(module).double()
    exact = gradients(double, double, x.double())
    eager = errors(gradients(module, module, x), exact)
    jitted = compiled(module, tile)
    ours = errors(gradients(jitted, module, x), exact)
    assert len(tiles_of(jitted)) == count
    floor = torch.finfo(x.dtype).eps
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine <= factor * theirs + floor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 3, 7, 12, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_exact_as_eagers_in_any_number_of_tiles(rows, dtype):
    module, x = made(Stack(blocks=1), (2, 12, WIDTH), dtype)
    assert_as_exact_as_eager(module, x, Tiles(rows=rows), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_sums_of_gradients_in_either_dtype(accumulate):
    module, x = made(Stack(blocks=1), (2, 12, WIDTH), torch.bfloat16)
    assert_as_exact_as_eager(module, x, Tiles(rows=5, accumulate=accumulate), 1)


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.slow
def test_a_stretch_takes_in_norm_and_residual_sum(checkpoints, bias):
    module, x = made(Stack(blocks=2, checkpoints=checkpoints, bias=bias), (3, 8, WIDTH))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 2)
    jitted = compiled(module, Tiles(rows=5))
    jitted(x)
    forward = thunder.last_traces(jitted)[-1].bound_symbols
    loop = next(b.args[0] for b in forward if b.sym.name == "chunk_loop")
    split = [s for s in loop.plan.inputs if s.sharding.split]
    assert [s.shape for s in (*split, *loop.plan.outputs)] == [x.shape, x.shape]


def test_the_peak_falls_and_is_predicted_to_the_byte():
    module, x = made(Stack(blocks=2), (1, 512, WIDTH))
    peaks, loss_bytes = {}, 8  # the loss and its gradient
    for tile in (False, Tiles(rows=64)):
        jitted = compiled(module, tile)

        def step(jitted=jitted):
            jitted(x).backward()

        step()
        peaks[tile] = measure_peak(step)
        assert 0 <= peaks[tile] - predict(jitted, x).measured_bytes <= loss_bytes
    assert peaks[Tiles(rows=64)] < 0.7 * peaks[False]


class Projected(nn.Module):
    """A projection with a bias and an MLP under a checkpoint; a view of the sum with the bias is the projection."""

    def __init__(self):
        super().__init__()
        self.projection, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def block(self, x):
        return self.down(F.relu(self.up(self.projection(x))))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False).square().mean()


def test_gradients_lie_over_rows_that_are_a_view_of_what_nobody_holds():
    module, x = made(Projected(), (2, 256, WIDTH))
    jitted = compiled(module, Tiles(rows=8))

    def step():
        jitted(x).backward()

    step()
    assert "written over it" in str(thunder.last_backward_traces(jitted)[-1])
    assert 0 <= measure_peak(step) - predict(jitted, x).measured_bytes <= 8


class Tied(nn.Module):
    """An MLP after another one that has the same matrices."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE, False), nn.Linear(WIDE, WIDTH, False)
        self.up_again, self.down_again = nn.Linear(WIDTH, WIDE, False), nn.Linear(WIDE, WIDTH, False)
        self.up_again.weight, self.down_again.weight = self.up.weight, self.down.weight

    def forward(self, x):
        x = x + self.down(F.relu(self.up(x)))
        return (x + self.down_again(F.relu(self.up_again(x)))).square().mean()


def test_autograd_adds_in_place_to_a_gradient_that_tiles_summed():
    module, x = made(Tied(), (4, WIDTH))
    jitted = compiled(module, Tiles(rows=2))

    def step():
        module.zero_grad()
        jitted(x).backward()

    step()
    assert len(tiles_of(jitted)) == 2
    module.zero_grad()
    assert 0 <= measure_peak(step) - predict(jitted, x).measured_bytes <= 8


def test_asking_who_holds_memory_does_not_hold_it():
    summed, view = torch.zeros(6), torch.zeros(6).view(2, 3)
    for t, holders in (summed, 1), (view, 2):
        assert sole_owner(t)
        assert torch._C._storage_Use_Count(torch._C._storage_address(t)) == holders
        t.untyped_storage()
        assert sole_owner(t)


@pytest.mark.parametrize("fake_first", [False, True])
def test_views_without_numbers_are_counted_apart(fake_first):
    """A prediction may ask before a program runs. A fake view's base has one more holder than a real one's."""
    gradient_sums._held_by_a_view_alone.cache_clear()
    for fake in (fake_first, not fake_first):
        with FakeTensorMode() if fake else nullcontext():
            flat = torch.zeros(6, 4)
            view = flat.view(2, 3, 4)
            assert not sole_owner(view)
            kept = flat.detach()
            del flat
            assert not sole_owner(view)
            del kept
            assert sole_owner(view)


def test_who_holds_the_memory_of_a_view():
    with torch.no_grad():
        flat = torch.zeros(6, 4)
        view = flat.view(2, 3, 4)
        assert not sole_owner(view)  # a name
        kept = flat.detach()
        del flat
        assert not sole_owner(view)  # another tensor
        del kept
        assert sole_owner(view)
        other = view[:1]
        assert not sole_owner(view) and not sole_owner(other)
        del other
        assert sole_owner(view)
    taken = torch.zeros(6, 4, requires_grad=True) * 2
    kept = taken.exp()  # autograd keeps what it made
    view = kept.view(24)
    del kept
    assert not sole_owner(view.detach()) and not sole_owner(view)


@pytest.fixture
def time_is_free(monkeypatch):
    """Small products on a CPU take longer in tiles than the default allows."""
    monkeypatch.setattr(tile_selection, "_FREE_TIME", float("inf"))


@pytest.mark.slow
@pytest.mark.usefixtures("time_is_free")
def test_by_default_checkpoints_are_tiled_where_the_plan_has_a_lower_peak():
    module, x = made(Stack(blocks=2, width=64, wide=256), (1, 1024, 64))
    jitted, whole = compiled(module, True), compiled(module, False)
    for fn in (jitted, whole):
        fn(x).backward()
    assert len(tiles_of(jitted)) == 2
    assert not tiles_of(whole)
    assert last_plan(jitted).candidate.peak_bytes < last_plan(whole).candidate.peak_bytes


@pytest.mark.usefixtures("time_is_free")
@pytest.mark.parametrize(("most_rows", "count", "rows"), [(256, 4, 256), (255, 6, 192)])
def test_by_default_tiles_are_equal_unless_they_hold_too_much(monkeypatch, most_rows, count, rows):
    monkeypatch.setattr("thunder_mem.tiling.tiles.tile_gain_bytes", lambda plan: most_rows - plan.chunk_rows + 1)
    module, x = made(Stack(blocks=2, width=64, wide=256), (1, 1024, 64))
    jitted = compiled(module, True)
    jitted(x).backward()
    assert [f"in {count} tiles of {rows} rows" in decision.how for decision in tiles_of(jitted)] == [True, True]


@pytest.mark.slow
def test_a_frontier_begins_with_the_chosen_plan_and_has_the_tiles_that_were_too_slow(monkeypatch):
    module, x = made(Stack(blocks=1, width=64, wide=256), (1, 1024, 64))
    jitted, tiled = compiled(module, True), compiled(module, True)
    predict(jitted, x)
    with monkeypatch.context() as patched:
        patched.setattr(tile_selection, "_FREE_TIME", float("inf"))
        predict(tiled, x)
    assert tiles_of(tiled) and not tiles_of(jitted)
    first, *lower = memory_time_frontier(jitted, x, points=1).points
    assert first.peak_bytes == last_plan(jitted).candidate.peak_bytes
    assert last_plan(tiled).candidate.peak_bytes in [p.peak_bytes for p in lower if p.step_ms > first.step_ms]


class WithLogits(nn.Module):
    """Blocks under checkpoints, and logits, whose loss the caller computes."""

    def __init__(self, vocabulary):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=64, wide=256) for _ in range(2))
        self.head = nn.Linear(64, vocabulary)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("vocabulary, count", [(8, 2), (640, 0)])
@pytest.mark.usefixtures("time_is_free")
@pytest.mark.slow
def test_by_default_nothing_is_tiled_where_the_peak_is_in_a_loss_outside(vocabulary, count):
    """A cross entropy outside holds three times the logits: with many of them, tiles cost time and gain nothing."""
    module, x = made(WithLogits(vocabulary), (1, 1024, 64))
    jitted = compiled(module, True)
    jitted(x)
    assert len(tiles_of(jitted)) == count


def chosen_of(
    monkeypatch,
    tiled,
    whole,
    budget=None,
    again=None,
    cheaper=(),
    repeating=(),
    asked_with=None,
    checked=None,
    bought_s=0.0,
    arranged_s=1.0,
    options_of=None,
    on_infeasible="error",
    least_likely_bytes=0,
    device="cpu",
    tiles_s=0.0,
):
    """The plan that `lower_plan` takes of two, each given by its peak in bytes and its time.

    `again` is the same for a plan that runs some tiles once more, `cheaper` for others with cheaper tiles, and
    `repeating` for those with tiles that repeat work; what others were asked with goes into `asked_with`. The plans
    that are verified go into `checked`, and the options of all plans into `options_of`. Before refinement each took
    `arranged_s`, and `tiled` `tiles_s` more; all partitions of one that takes infinitely long are too slow. Of the
    seconds of `whole`, a budget bought `bought_s`. Without `tiled` no tiles are free. Refinement brings `whole` to
    `least_likely_bytes` at best.
    """
    checked = [] if checked is None else checked
    others = {"cheaper": cheaper, "repeating": repeating}
    figures = {f"{name}{k}": found for name, several in others.items() for k, found in enumerate(several)}
    figures |= {"tiled": tiled, "whole": whole, "again": again}

    def planned(trace, executors, options):
        if options_of is not None:
            options_of.append(options)
        decisions = ()
        if trace == "tiled" and options.repeat_tiles and again is not None:
            trace, decisions = "again", (Decision(TILES_AGAIN, "", "", 0, 0),)
        cost_ms = 1e3 * bought_s if trace == "whole" else 0
        outcome = None if budget is None else SimpleNamespace(budget_bytes=budget, cost_ms=cost_ms)
        candidate = SimpleNamespace(peak_bytes=figures[trace][0])
        if figures[trace][1] == inf:
            raise TooSlowError
        plan = SimpleNamespace(budget=outcome, candidate=candidate, decisions=decisions)
        return Planned(program=trace, plan=plan, source=trace, fuse=None, trace=trace, arranged_seconds=arranged_s)

    def drafted(*given):
        program = SimpleNamespace(source=given[0])
        seconds = arranged_s + tiles_s * (given[0] == "tiled")
        lowest = SimpleNamespace(seconds=seconds, least_likely_bytes=figures[given[0]][0])
        partitions = SimpleNamespace(
            program=program, lowest=lowest, least_likely_bytes=least_likely_bytes, least_seconds=seconds
        )
        return SimpleNamespace(partitions=partitions, made=lambda: planned(*given))

    monkeypatch.setattr(tile_selection, "made", planned)
    monkeypatch.setattr(tile_selection, "drafted", drafted)
    monkeypatch.setattr(tile_selection, "device_of", lambda source: torch.device(device))
    monkeypatch.setattr(tile_selection, "checked", lambda plan: checked.append(plan.trace) or plan)
    monkeypatch.setattr(Planned, "final_seconds", property(lambda plan: figures[plan.trace][1]))
    monkeypatch.setattr(tile_selection, "peak_with_loss_outside", lambda plan: plan.peak_bytes)
    monkeypatch.setattr(tile_selection, "_tidied", lambda trace, options: trace)

    def ask(name):
        def made(amount, *room):
            if asked_with is not None:
                asked_with.append((name, pytest.approx(amount)))
            return ((f"{name}{k}", ()) for k in range(len(others[name])))

        return made

    variants = SimpleNamespace(**{name: ask(name) for name in others})
    options = PlanningOptions(budget=budget, on_infeasible=on_infeasible)
    traces = ("whole", None) if tiled is None else ("tiled", lambda: "whole")
    return tile_selection.lower_plan(*traces, (), options, variants).trace


@pytest.mark.parametrize(
    ("tiled", "chosen"),
    [((999, 1.0), "tiled"), ((1000, 0.5), "whole"), ((500, 1.01), "tiled"), ((500, 1.011), "whole")],
)
def test_by_default_tiles_lower_the_peak_and_take_one_percent_of_time_at_most(monkeypatch, tiled, chosen):
    assert chosen_of(monkeypatch, tiled, (1000, 1.0)) == chosen


@pytest.mark.parametrize(
    ("tiled", "plans"), [((799, 1.0), 1), ((799, 1.01), 1), ((800, 1.0), 2), ((799, 1.011), 2), ((799, 1.2), 2)]
)
def test_a_program_whose_tiles_are_clearly_better_is_not_refined_without_them(monkeypatch, tiled, plans):
    made = []
    found = chosen_of(monkeypatch, tiled, (1000, 1.1), options_of=made, least_likely_bytes=800)
    assert (found, len(made)) == ("whole" if tiled == (799, 1.2) else "tiled", plans)


@pytest.mark.parametrize(
    ("device", "tiles_s", "found", "plans"),
    [
        ("cpu", 0.05, "whole", 1),  # a fifth of that time may stay, and gains a fifth of 9 %
        ("cpu", 0.04, "cheaper0", 3),
        ("cuda", 0.05, "cheaper0", 3),
    ],
)
def test_a_program_whose_tiles_are_too_slow_is_not_refined_with_them(monkeypatch, device, tiles_s, found, plans):
    made = []
    figures = (910, 1.04), (1000, 1.0)
    given = {"cheaper": [(920, 1.0)], "options_of": made, "device": device, "tiles_s": tiles_s}
    assert (chosen_of(monkeypatch, *figures, **given), len(made)) == (found, plans)


def test_on_a_gpu_tiles_are_compared_with_the_whole_plan_without_tiles(monkeypatch):
    made = []
    found = chosen_of(monkeypatch, (500, 1.0), (1000, 1.0), options_of=made, least_likely_bytes=800, device="cuda")
    assert (found, len(made)) == ("tiled", 2)


def test_tiles_that_run_once_more_are_compared_with_the_whole_plan_without_tiles(monkeypatch):
    made = []
    again, tiled = (400, 1.01), (500, 1.0)
    found = chosen_of(monkeypatch, tiled, (1000, 1.0), again=again, options_of=made, least_likely_bytes=800)
    assert (found, len(made)) == ("again", 2)


@pytest.mark.parametrize(
    ("again", "tiled", "chosen"),
    [((400, 1.01), (500, 1.0), "again"), ((400, 1.02), (500, 1.0), "tiled"), ((400, 1.03), (500, 1.02), "whole")],
)
def test_by_default_tiles_run_once_more_where_the_time_has_room(monkeypatch, again, tiled, chosen):
    assert chosen_of(monkeypatch, tiled, (1000, 1.0), again=again) == chosen


@pytest.mark.parametrize(
    ("cheaper", "chosen"),
    [
        ([(600, 1.01)], "cheaper0"),
        ([(600, 1.02), (700, 1.0), (600, 1.0)], "cheaper1"),  # the first that is in time
        ([(1000, 1.0), (700, 1.0)], "cheaper1"),  # and lower
        ([(600, 1.02)], "whole"),
        ([(400, inf), (700, 1.0)], "cheaper1"),  # all partitions of the first take too long
        ([], "whole"),
    ],
)
def test_by_default_tiles_that_take_too_long_become_cheaper(monkeypatch, cheaper, chosen):
    shares = []
    found = chosen_of(monkeypatch, (500, 1.05), (1000, 1.0), cheaper=cheaper, asked_with=shares)
    assert found == chosen
    assert shares == [("cheaper", 0.8)]  # of 0.05 s, all but 0.01


def test_partitions_of_cheaper_tiles_are_limited_by_the_time_of_the_arrangement_without_tiles(monkeypatch):
    made = []
    chosen_of(monkeypatch, (500, 1.05), (1000, 1.0), cheaper=[(600, 1.0)], options_of=made, arranged_s=0.99)
    assert [options.limits_s for options in made] == [(), (), pytest.approx((1.0, 1.01))]


@pytest.mark.parametrize(
    ("tiled", "budget"),
    [
        ((500, 1.0), None),
        ((1000, 1.5), None),
        ((981, 1.011), None),
        ((500, 1.5), None),  # nearly all of their time is to be saved
        ((500, 1.5), 2000),
        ((500, 1.5), 1000),
        ((9000, 1.5), 2000),
    ],
)
def test_no_cheaper_tiles_are_made_where_there_is_time_or_little_to_gain(monkeypatch, tiled, budget):
    asked = []
    chosen_of(monkeypatch, tiled, (1000, 1.0), budget=budget, cheaper=[(1, 0.1)], asked_with=asked)
    assert not asked


@pytest.mark.parametrize(
    ("tiled", "whole", "chosen"),
    [
        ((900, 1.2), (1000, 1.0), "whole"),  # both fit: the faster
        ((900, 0.9), (1000, 1.0), "tiled"),
        ((900, 1.0), (1000, 1.0), "whole"),
        ((900, 1.2), (1001, 1.0), "tiled"),  # one fits
        ((1010, 1.2), (1001, 1.0), "whole"),  # none: the smaller
        ((900, 1.2), (9000, 1.0), "tiled"),  # none at all for one of the two
        ((9000, 1.2), (900, 1.0), "whole"),
    ],
)
def test_under_a_budget_the_faster_plan_that_fits_runs(monkeypatch, tiled, whole, chosen):
    assert chosen_of(monkeypatch, tiled, whole, budget=1000) == chosen


@pytest.mark.parametrize(
    ("whole", "bought", "cheaper", "chosen"),
    [
        ((9000, 1.0), 0.0, [(990, 1.04)], "cheaper0"),  # without tiles nothing fits
        ((9000, 1.0), 0.0, [(990, 1.04), (1000, 1.02)], "cheaper1"),
        ((9000, 1.0), 0.0, [(990, 1.06), (1000, 1.02)], "cheaper1"),  # the first bought something
        ((9000, 1.0), 0.0, [(9000, 1.02), (1000, 1.01)], "cheaper1"),  # the first does not fit
        ((1000, 1.2), 0.2, [(990, 1.02)], "cheaper0"),  # faster than tiles and faster than recomputation
        ((1000, 1.03), 0.03, [(990, 1.04)], "whole"),
        ((1000, 1.03), 0.03, [(990, 1.01), (990, 0.9)], "cheaper0"),  # as good as no time: no other is planned
        ((1000, 1.01), 0.01, [(990, 1.0)], "whole"),
    ],
)
def test_under_a_budget_cheaper_tiles_run_where_they_are_faster(monkeypatch, whole, bought, cheaper, chosen):
    assert chosen_of(monkeypatch, (900, 1.05), whole, budget=1000, bought_s=bought, cheaper=cheaper) == chosen


@pytest.mark.parametrize(
    ("tiled_s", "whole", "share"),
    [
        (1.05, (9000, 1.0), (1.05 - 1.05 / 1.01) / (1.05 - 0.96)),
        (1.05, (1000, 1.04), (1.05 - 1.04 / 1.01) / (1.05 - 1.0)),
        (0.965, (9000, 1.0), 1.0),  # tiles take less than a percent longer than what buys nothing
    ],
)
def test_under_a_budget_cheaper_tiles_save_a_percent_of_the_best_plan(monkeypatch, tiled_s, whole, share):
    shares, tiled = [], (900, tiled_s)
    chosen_of(monkeypatch, tiled, whole, budget=1000, bought_s=0.04, cheaper=[(990, 1.1)], asked_with=shares)
    assert shares[0] == ("cheaper", share / 2)


@pytest.mark.parametrize(
    ("tiled", "chosen"), [((1000, 1.03), "tiled"), ((1000, 1.05), "again"), ((9000, 1.03), "again")]
)
def test_under_a_budget_tiles_run_once_more_only_where_it_needs_that(monkeypatch, tiled, chosen):
    assert chosen_of(monkeypatch, tiled, (9000, 1.0), budget=1000, again=(900, 1.04)) == chosen


@pytest.mark.parametrize(
    ("tiled", "whole", "bought_s", "room_s", "chosen"),
    [
        (None, (9000, 1.0), 0.0, inf, "repeating0"),
        (None, (1000, 1.3), 0.3, 0.3, "repeating0"),
        (None, (1000, 1.15), 0.15, 0.15, "whole"),
        ((9000, 1.0), (9000, 1.0), 0.0, inf, "repeating0"),
    ],
)
def test_under_a_budget_tiles_repeat_work_where_that_is_the_cheapest(
    monkeypatch, tiled, whole, bought_s, room_s, chosen
):
    asked = []
    others = {"repeating": [(900, 1.2)], "bought_s": bought_s, "asked_with": asked}
    assert chosen_of(monkeypatch, tiled, whole, budget=1000, **others) == chosen
    assert asked[-1] == ("repeating", room_s)


@pytest.mark.parametrize(("budget", "bought_s"), [(None, 0.0), (1000, 0.0), (1000, 0.009)])
def test_no_tiles_repeat_work_where_nothing_dear_is_bought(monkeypatch, budget, bought_s):
    asked = []
    chosen_of(monkeypatch, (1000, 1.1), (1000, 1.0), budget=budget, bought_s=bought_s, asked_with=asked)
    assert not asked


def test_no_tiles_repeat_work_where_the_others_buy_nothing(monkeypatch):
    asked = []
    chosen_of(monkeypatch, (900, 1.03), (9000, 1.0), budget=1000, asked_with=asked)
    assert [name for name, _ in asked] == ["cheaper"]


@pytest.mark.parametrize(
    ("tiled", "whole", "smaller_heads"),
    [
        ((1000, 1.1), (1000, 1.1), [True, True, False]),
        (None, (1000, 1.1), [True, False]),
        ((9000, 1.0), (9000, 1.0), [True, True, True]),
    ],
)
def test_only_where_nothing_else_fits_loss_heads_become_smaller_beside_other_tiles(
    monkeypatch, tiled, whole, smaller_heads
):
    """Those may cost digits."""
    options = []
    others = {"cheaper": [(990, 1.09)], "repeating": [(990, 1.08)], "bought_s": 0.1, "options_of": options}
    chosen_of(monkeypatch, tiled, whole, budget=1000, **others)
    assert [o.smaller_heads for o in options] == smaller_heads


@pytest.mark.parametrize("on_infeasible", ["error", "warn"])
@pytest.mark.parametrize(
    ("tiled", "whole", "repeating", "chosen"),
    [
        ((8000, 1.0), (9000, 1.0), [], "tiled"),
        ((9000, 1.0), (8000, 1.0), [(8500, 1.0)], "whole"),
        ((9000, 1.0), (8000, 1.0), [(7000, 1.0)], "repeating0"),
    ],
)
def test_under_a_budget_that_nothing_fits_the_smallest_peak_counts(
    monkeypatch, tiled, whole, repeating, chosen, on_infeasible
):
    others = {"repeating": repeating, "on_infeasible": on_infeasible}
    assert chosen_of(monkeypatch, tiled, whole, budget=1000, **others) == chosen


class Watched(nn.Module):
    """Averages a wide value, as of statistics for a log, without a gradient."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        h = self.up(x)
        with torch.no_grad():
            self.seen.add_(h.mean())
        return self.down(F.relu(h)).square().sum()


def test_a_total_under_no_grad_leaves_the_stretchs_gradients():
    module, x = made(Watched(), (37, WIDTH))
    reference = copy.deepcopy(module).double()
    jitted = compiled(module, Tiles(rows=16))
    found, exact = gradients(jitted, module, x), gradients(reference, reference, x.double())
    assert tiles_of(jitted) and max(errors(found, exact)) < 1e-5
    torch.testing.assert_close(module.seen, reference.seen.float())


@pytest.mark.parametrize("rows", [64, 300])
def test_by_default_too_few_rows_stay_whole(rows):
    module, x = made(Stack(blocks=1, width=64, wide=256), (1, rows, 64))
    jitted = compiled(module, True)
    jitted(x).backward()
    assert not tiles_of(jitted)


def test_by_default_nothing_is_computed_twice_that_was_not():
    module, x = made(Stack(blocks=1, checkpoints=False, width=64, wide=256), (1, 1024, 64))
    jitted = compiled(module, True)
    jitted(x).backward()
    assert not tiles_of(jitted)


class NormOutside(nn.Module):
    """An MLP under a checkpoint, whose norm and whose reader are outside of it."""

    def __init__(self, reads_rows_apart):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.reads_rows_apart = reads_rows_apart

    def forward(self, x):
        x = x.sin()
        y = checkpoint(lambda h: self.down(self.up(h).relu()), self.norm(x), use_reentrant=False)
        return (x + y if self.reads_rows_apart else x.cumsum(0) + y.cumsum(0)).square().mean()


@pytest.mark.parametrize("reads_rows_apart", [True, False])
@pytest.mark.usefixtures("time_is_free")
def test_by_default_no_norm_outside_of_a_checkpoint_is_computed_twice(reads_rows_apart):
    """And the product whose result the checkpoint keeps is the end of the stretch, for it would be repeated inside."""
    module, x = made(NormOutside(reads_rows_apart), (1024, 64), torch.float64)
    jitted = compiled(module, True)
    for got, want in zip(gradients(jitted, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(got, want)
    assert len(tiles_of(jitted)) == 1
    names = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    assert "rsqrt" in names[: names.index("chunk_loop")]


def softmax_after_a_checkpoint(x, w, v):
    h = checkpoint(lambda x: F.linear(x, w).relu(), x.sin(), use_reentrant=False)
    return (F.softmax(h, -1) @ v).sum()


def test_by_default_no_wide_value_outside_of_a_checkpoint_is_computed_twice():
    x, w, v = (torch.randn(*shape, requires_grad=True) for shape in ((1024, 64), (256, 64), (256, 64)))
    jitted = compiled(softmax_after_a_checkpoint, True)
    jitted(x, w, v).backward()
    assert not tiles_of(jitted)


class Columns(nn.Module):
    """A product with a weight whose columns the result has far more rows than."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x):
        return (x.sin() @ self.weight).relu().sum()


class Merged(nn.Module):
    """A product of two parameters, as a low-rank update has it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        return x.sum() * (self.a @ self.b).sin().sum(-1).mean()


class Transposed(nn.Module):
    """A product with its weight on the left: the columns of the right operand are tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        return (self.weight @ x.t()).relu().sum()


@pytest.mark.parametrize(("module", "count"), [(Columns(), 0), (Merged(), 0), (Transposed(), 1)])
def test_tiles_have_rows_of_activations(module, count):
    jitted = compiled(module, Tiles(rows=2))
    jitted(torch.randn(64, 8)).backward()
    assert len(tiles_of(jitted)) == count


@pytest.mark.parametrize(
    "right",
    [lambda w: w.view(8, 6), lambda w: w.t(), lambda w: w.t().float().to(torch.float64)],
    ids=["a view", "transposed", "cast"],
)
def test_in_a_function_a_right_operand_that_is_an_argument_is_a_weight(right):
    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((64, 8), (6, 8)))
    jitted = compiled(lambda x, w: (x @ right(w)).relu().sum(), Tiles(rows=2))
    jitted(x, w).backward()
    assert not tiles_of(jitted)


@pytest.mark.usefixtures("time_is_free")
@pytest.mark.slow
def test_a_forward_alone_runs_in_tiles():
    module, x = made(Stack(blocks=2, checkpoints=False, width=64, wide=256), (1, 1024, 64))
    peaks = []
    for tile in (True, False):
        jitted = compiled(module, tile)
        with torch.no_grad():
            torch.testing.assert_close(jitted(x), module(x))
            peaks.append(measure_peak(lambda jitted=jitted: jitted(x)))
        assert len(tiles_of(jitted)) == 2 * tile
    assert peaks[0] < 0.5 * peaks[1]


@pytest.mark.parametrize(
    ("n", "budget", "tiles"),
    [(512, None, "2 tiles of 256"), (512, "1GiB", "3 tiles of 192"), (250, None, "2 tiles of 192")],
)
def test_a_mark_demands_tiles(n, budget, tiles):
    module, x = made(Block(width=32, wide=128), (1, n, 32))

    def marked(x):
        with tiled():
            y = module(x)
        return y.sum()

    jitted = compiled(marked, True, budget=budget)
    found = torch.autograd.grad(jitted(x.requires_grad_()), x)[0]
    torch.testing.assert_close(found, torch.autograd.grad(marked(x), x)[0])
    (decision,) = tiles_of(jitted)
    assert f"in {tiles} rows" in decision.how
    assert "tiled_begin" not in str(thunder.last_traces(jitted)[-1])


def batch_normed(x, w):
    with tiled():
        wide = F.linear(x, w)
        return F.batch_norm(wide, None, None, training=True).relu().sum()


def summed_up(x, w):
    with tiled():
        return torch.cumsum(F.linear(x, w), 0).sum()


def scores(x, w):
    with tiled():
        wide = F.linear(x, w)
        return (wide @ wide.t()).relu().sum()


def without_products(x, w):
    with tiled():
        return torch.relu(x).sum() + w.sum()


@pytest.mark.parametrize("fn", [batch_normed, summed_up, scores, without_products])
@pytest.mark.parametrize("strict", [True, False])
def test_a_mark_around_what_cannot_be_is_an_error_with_its_line(fn, strict):
    x, w = torch.randn(32, 8).requires_grad_(), torch.randn(64, 8).requires_grad_()
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=strict)])
    line = fn.__code__.co_firstlineno + 2
    with pytest.raises(TilingError, match=rf"test_tiles.py:{line} stays whole: ."):
        jitted(x, w)
    fn(x, w)


def test_a_head_in_chunks_takes_no_marked_stretch():
    def fn(x, up, down, w, t):
        with tiled():
            x = x + F.linear(F.silu(F.linear(x, up)), down)
        return F.cross_entropy(F.linear(x, w), t)

    x, up, down, w = (
        torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((33, 16), (48, 16), (16, 48), (37, 16))
    )
    given = (x, up, down, w, torch.randint(0, 37, (33,)))
    options = MemEfficient(strict=True, chunk=ChunkLossHead(rows=3), tile=Tiles(rows=8))
    jitted = thunder.jit(fn, executors=[], transforms=[options])
    found, exact = ((loss := f(*given), *torch.autograd.grad(loss, given[:4])) for f in (jitted, fn))
    torch.testing.assert_close(found, exact)
    assert sum(d.what == "tiles" for d in last_plan(jitted).decisions) == 1


def test_a_mark_without_tiles_is_an_error():
    x, w = torch.randn(32, 8), torch.randn(64, 8)
    with pytest.raises(TilingError, match="stays whole: tile=False in MemEfficient"):
        compiled(summed_up, False)(x, w)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Tiles(rows=0), ValueError, "rows must be at least 1, but got 0"),
        (lambda: Tiles(rows=True), TypeError, 'rows is a positive int or "auto", but got True'),
        (lambda: Tiles(rows="many"), TypeError, 'rows is a positive int or "auto"'),
        (lambda: Tiles(accumulate="float16"), ValueError, "accumulate is one of 'float32', 'input'"),
        (lambda: MemEfficient(tile="yes"), TypeError, "tile is True or False, or a Tiles, not 'yes'"),
        (lambda: MemEfficient(tile=8), TypeError, "tile is True or False, or a Tiles, not 8"),
    ],
)
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


def with_wide_result(x, w, v):
    wide = F.linear(x, w).relu()
    return (wide @ v).sum(), wide


def with_another_reader(x, w, v):
    wide = F.linear(x, w).relu()
    return (wide @ v).sum() + wide.t().matmul(x).sum()


def with_narrow_readers(x, w, v):
    y = F.linear(x.sin(), w).relu() @ v
    return (y * x).sum() + y.cumsum(0).sum()


def written_before(x, w, v):
    y = x * 1
    y.mul_(2)
    return (F.linear(y, w).relu() @ v).sum() + y.sum()


def written_between(x, w, v):
    y = x * 1
    wide = F.linear(y, w.detach())
    y.add_(1)
    return (wide.relu() @ v).sum() + y.sum() + w.sum()


def of_a_view(x, w, v):
    y = x.t().contiguous().t()
    return (F.linear(y[::2], w).relu() @ v).sum() + y.sum()


def statistics(x, w, v):
    y = F.linear(x, w).relu()
    return (y.mean(-1) * (y @ v).sum(-1)).sum()


def total(x, w, v):
    y = F.linear(x, w).sigmoid() @ v
    return y.logsumexp(-1).mean()


def masked(x, w, v):
    mask = torch.arange(x.shape[0])[:, None] > 7
    return (F.linear(x, w).masked_fill(mask, 0.5).relu() @ v).sum()


def same_weight_twice(x, w, v):
    return (F.linear(F.linear(x, w).relu() @ v, w).relu() @ v).sum()


def frozen(x, w, v):
    return ((F.linear(x, w.detach()) + x @ v.t()).relu() @ v).sum()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (with_wide_result, 0),
        (with_another_reader, 0),
        (with_narrow_readers, 1),
        (written_before, 1),
        (written_between, None),
        (of_a_view, 1),
        (statistics, 1),
        (total, 1),
        (masked, 1),
        (same_weight_twice, 2),
        (frozen, 1),
    ],
)
@pytest.mark.parametrize("rows", [3, 5])
def test_programs_around_a_stretch(fn, count, rows):
    g = torch.Generator().manual_seed(0)
    shapes = (26, 8), (32, 8), (32, 8)
    x, w, v = (torch.randn(shape, generator=g).requires_grad_() for shape in shapes)
    jitted = compiled(fn, Tiles(rows=rows))
    found, expected = jitted(x, w, v), fn(x, w, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = (r if isinstance(r, torch.Tensor) else r[0] + r[1].sum() for r in (found, expected))
    given = (x, w, v)
    for a, b in zip(
        torch.autograd.grad(ours, given, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(theirs, given, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-5 * b.norm()
    if count is not None:
        assert len(tiles_of(jitted)) == count


def test_two_backwards_of_one_forward():
    module, x = made(Stack(blocks=1), (1, 24, WIDTH))
    jitted = compiled(module, Tiles(rows=5))
    x.requires_grad_()
    loss = jitted(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_with_and_without_tiles():
    module, x = made(Stack(blocks=1), (1, 24, WIDTH))

    def dropped(x):
        return F.dropout(module(x[0]).sum() + F.dropout(module.blocks[0](x), 0.5), 0.5).sum()

    found = []
    for tile in (False, Tiles(rows=5)):
        torch.manual_seed(3)
        jitted = compiled(dropped, tile)
        found.append(jitted(x))
        assert bool(tiles_of(jitted)) == bool(tile)
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_a_budget_keeps_tiles_that_fit():
    module, x = made(Stack(blocks=2, width=64, wide=256), (1, 1024, 64))
    whole = compiled(module, False)
    whole(x).backward()
    peak = last_plan(whole).candidate.peak_bytes
    jitted = compiled(module, True, budget=int(0.9 * peak))
    jitted(x).backward()
    assert last_plan(jitted).candidate.peak_bytes <= 0.9 * peak
    assert len(tiles_of(jitted)) == 1  # the other stretch fits as a whole, which is faster


def heads_as_stretches():
    """Loss heads end in totals over rows; a few are always run."""
    few = {"ce_sum", "ce_none", "mse_head", "grpo", "dpo"}
    return [pytest.param(c, id=str(c), marks=() if c.name in few else pytest.mark.slow) for c in CASES]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", heads_as_stretches())
def test_losses_as_stretches(case):
    jitted = compiled(case.fn, Tiles(rows=41), chunk=False)
    values, found = loss_and_grads(jitted, prepare(case, torch.float32), case.grads)
    exact_values, exact = loss_and_grads(case.fn, prepare(case, torch.float64), case.grads)
    for value, wanted in zip(values, exact_values, strict=True):
        torch.testing.assert_close(value.double(), wanted.double(), rtol=2e-5, atol=1e-6)
    assert max(errors(found, exact)) < 2e-5


def looked_up_in_a_table_of_its_own(x, w, v):
    h = F.linear(x, w)
    table = h.sin().cos()
    return F.linear(h * F.embedding((torch.arange(x.shape[0]) > 7).long(), table), v.t()).sum()


def indexed_by_itself(x, w, v):
    h = F.linear(x, w)
    return (h + h.cos().index_select(0, torch.zeros(x.shape[0], dtype=torch.long))).matmul(v).sum()


def added_to_its_own_sums(x, w, v):
    h = F.linear(x, w)  # as many rows as numbers in a row
    return ((h + h.sum(-1)) @ v).sum()


def gated_by_its_own_means(x, w, v):
    h = F.linear(x, w).relu()
    return ((h * (h.mean(-1) + 1)) @ v).sum()


@pytest.mark.parametrize(
    "fn", [looked_up_in_a_table_of_its_own, indexed_by_itself, added_to_its_own_sums, gated_by_its_own_means]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_other_tiles_compute_are_not_read(fn, rows):
    g = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(shape, generator=g).requires_grad_() for shape in ((32, 8), (32, 8), (32, 8)))
    jitted = compiled(fn, Tiles(rows=rows))
    found, expected = jitted(x, w, v), fn(x, w, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    exact = torch.autograd.grad(expected, (x, w, v))
    assert max(errors(torch.autograd.grad(found, (x, w, v)), [e.double() for e in exact])) < 1e-5


def test_a_mark_is_kept_where_the_peak_is_elsewhere():
    module, x = made(Block(width=32, wide=128), (1, 512, 32))

    def marked(x):
        with tiled():
            y = module(x)
        return (y.sum() + torch.zeros(4000, 1000)).sin().sum()

    jitted = compiled(marked, True)
    jitted(x)
    assert len(tiles_of(jitted)) == 1


def test_each_marked_product_needs_tiles():
    w, u = torch.randn(32, 8), torch.randn(8, 8)

    def marked(x):
        y = F.linear(F.linear(x, w).relu(), w.t())
        with tiled():
            z = F.linear(y + x, u)
        return z.cumsum(0).sum()

    with pytest.raises(TilingError, match="there is no matrix product in it whose result is wider than its input"):
        compiled(marked, Tiles(rows=5))(torch.randn(32, 8))


@pytest.mark.parametrize("tile", [True, Tiles(rows=5)])
def test_symbolic_sizes_stay_whole_without_a_word(tile, recwarn):
    def fn(x, w):
        return (F.linear(x, w).relu() @ w).sum()

    x, w = torch.randn(24, 8), torch.randn(32, 8)
    jitted = thunder.jit(fn, executors=[], cache="symbolic values", transforms=[MemEfficient(strict=True, tile=tile)])
    torch.testing.assert_close(jitted(x, w), fn(x, w))
    assert not [w for w in recwarn if "MemEfficient" in str(w.message)]


@pytest.mark.slow
def test_a_budget_that_nothing_fits_names_the_smallest_peak_of_all_plans():
    module, x = made(Stack(blocks=2, width=64, wide=256), (1, 1024, 64))
    with pytest.raises(BudgetError) as caught:
        compiled(module, True, budget=1000)(x)
    with pytest.warns(UserWarning, match="no plan keeps the peak"):
        jitted = compiled(module, True, budget=1000, on_infeasible="warn")
        jitted(x)
    assert last_plan(jitted).candidate.peak_bytes == caught.value.smallest_peak_bytes


@pytest.mark.parametrize("activation", [F.silu, lambda a: F.gelu(a, approximate="tanh")], ids=["silu", "gelu"])
def test_activations_in_16_bits_have_the_gradients_of_the_same_kernels(activation):
    """Rows of a gradient are no sums over tiles, so they are as exact as without tiles."""

    def loss(x, w, v):
        return F.linear(activation(F.linear(x, w)), v).square().sum()

    def run(fn, dtype):
        given = [t.to(dtype).requires_grad_() for t in tensors]
        return torch.autograd.grad(fn(*given), given)

    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=g).bfloat16() for shape in ((200, 16), (64, 16), (16, 64))]
    exact = run(loss, torch.float64)
    jitted = compiled(loss, Tiles(rows=7))
    rows, *weights = errors(run(jitted, torch.bfloat16), exact)
    eager_rows, *eager_weights = errors(run(loss, torch.bfloat16), exact)
    assert len(tiles_of(jitted)) == 1
    assert rows <= 1.01 * eager_rows
    assert all(ours <= 2 * theirs for ours, theirs in zip(weights, eager_weights, strict=True))


@pytest.fixture
def built(monkeypatch):
    """The tiles that are compiled."""
    tiles, build = [], blocks_of_rows._build
    monkeypatch.setattr(blocks_of_rows, "_build", lambda *args: tiles.append(args) or build(*args))
    return tiles


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [3, 5])
def test_tiles_of_equal_layers_are_compiled_once(built, layers):
    module, x = made(Stack(blocks=layers), (2, 12, WIDTH))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), layers)
    assert len(built) == 2 * 2 * 2  # of 5 and of 4 rows, forward and backward, and the last layer's with the loss


@pytest.mark.slow
def test_tiles_of_layers_that_differ_are_not_shared(built):
    module, x = made(Stack(blocks=3), (2, 12, WIDTH))
    module.blocks[1].norm.eps = 0.5  # a number in the trace is all that differs
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 3)
    assert len(built) == 2 * 2 * 3


def test_only_the_plan_that_runs_is_verified(monkeypatch):
    checked = []
    assert chosen_of(monkeypatch, (500, 1.0), (1000, 1.0), checked=checked) == "tiled"
    assert chosen_of(monkeypatch, (1000, 1.0), (500, 1.0), checked=checked) == "whole"
    assert checked == ["tiled", "whole"]
