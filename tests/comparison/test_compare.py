"""`compare`: figures as measured by themselves, differences as they are, and a caller who notices nothing."""

import random
from dataclasses import replace

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, compare, measure_peak, simulate
from thunder_mem.comparison.differences import largest_difference
from thunder_mem.comparison.kept_state import kept, storage_bytes
from thunder_mem.comparison.result import Comparison, Row
from thunder_mem.prediction.training_step import training_step


class Odd(nn.Module):
    """Changes all that a forward may change: buffers in place and anew, an attribute, generators, its argument."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("steps", torch.zeros(()))
        self.last = None

    def forward(self, x):
        x.mul_(2)
        self.steps = self.steps + 1
        self.last = self.norm(self.linear(x))
        return self.last.square().mean() + random.random() * torch.rand(())


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def state_of(model, optimizer, x):
    return (
        {name: t.clone() for name, t in model.state_dict().items()},
        {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()},
        [p.grad.clone() for p in model.parameters()],
        x.clone(),
        torch.get_rng_state(),
    )


@pytest.mark.slow
def test_nothing_of_the_caller_changes():
    model, x = Odd(), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    training_step(model, optimizer, None, x)
    training_step(model, None, None, x)  # leaves gradients
    gradients, group = [p.grad for p in model.parameters()], dict(optimizer.param_groups[0])
    last, drawn = model.last, random.getstate()
    before = state_of(model, optimizer, x)
    found = compare(model, x, optimizer=optimizer, executors=[], repeats=1)
    assert found["eager"].peak_bytes and found.trains and found.draws
    torch.testing.assert_close(state_of(model, optimizer, x), before, rtol=0, atol=0)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.last is last and random.getstate() == drawn
    assert optimizer.param_groups[0].items() == group.items()


@pytest.mark.slow
def test_a_graph_of_the_callers_stays_valid():
    """Autograd refuses a backward if the version of a saved tensor has changed."""
    model, x = mlp(), torch.randn(4, 64)
    loss = model(x).sum()
    compare(model, x, optimizer=torch.optim.SGD(model.parameters()), executors=[], repeats=1)
    loss.backward()


def test_state_comes_back_from_storages():
    whole = torch.arange(6.0)
    wide, part = whole[:1].expand(3, 4), whole[2:4]
    with kept([], [], [wide, part]) as put_back:
        whole.zero_()
        put_back()
        assert whole.tolist() == [0, 1, 2, 3, 4, 5]
        whole.fill_(7)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert storage_bytes([wide, part, torch.ones(2)], "cpu") == 24 + 8


def test_figures_are_those_of_separate_measurements():
    model, x = mlp(), torch.randn(32, 64)
    found = compare(model, x, executors=[], repeats=1)
    assert found.held_bytes == sum(t.nbytes for t in (x, *model.parameters()))
    jitted = thunder.jit(model, executors=[])
    for name, compiled in (("eager", model), ("Thunder", jitted)):
        training_step(compiled, None, torch.sum, x)
        model.zero_grad()
        above_bytes = measure_peak(lambda compiled=compiled: training_step(compiled, None, torch.sum, x))
        model.zero_grad()
        assert found[name].peak_bytes == found.held_bytes + above_bytes
    assert found.best is found["MemEfficient"] and found.why == ""
    assert "below Thunder, at " in found.verdict and found.verdict.startswith("MemEfficient needs the least memory")
    assert all(row.step_s > 0 for row in found.rows)
    assert [row.result_difference is None for row in found.rows] == [True, False, False]
    assert found["Thunder"].result_difference < 1e-6 and found["MemEfficient"].gradient_difference < 1e-4


def test_differences_are_those_of_the_compiled_program(monkeypatch):
    """Compilers that err by known amounts."""
    w, x = nn.Parameter(torch.ones(4)), torch.arange(4.0)
    jit = thunder.jit

    def wrong(fn, **options):
        jitted = jit(fn, **options)
        return jitted if "transforms" in options else (lambda x: jitted(x) + w.sum() * 0.5)

    monkeypatch.setattr(thunder, "jit", wrong)
    found = compare(lambda x: (w * x).sum(), x, executors=[], repeats=1)
    assert (found["Thunder"].result_difference, found["Thunder"].gradient_difference) == (2.0, 0.5)
    assert (found["MemEfficient"].result_difference, found["MemEfficient"].gradient_difference) == (0.0, 0.0)


@pytest.mark.parametrize(
    "ours, eagers, difference",
    [
        ([1.0, 2.0], [1.0, -2.0], 4.0),
        ([float("inf"), float("nan")], [float("inf"), float("nan")], 0.0),
        ([float("inf")], [-float("inf")], float("inf")),
        ([float("nan")], [1.0], float("inf")),
        ([3, 5], [3, 9], 4.0),
        ([3 + 4j], [0j], 5.0),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference(ours, eagers, difference):
    assert largest_difference([torch.tensor(ours)], [torch.tensor(eagers)]) == difference


def test_a_missing_gradient_is_zeros_and_a_missing_result_an_error():
    assert largest_difference([None, None], [torch.tensor([0.0, -2.0]), None]) == 2.0
    with pytest.raises(ValueError, match="2 values where eager has 1"):
        largest_difference([None, None], [None])
    with pytest.raises(ValueError, match=r"shape \(2,\) where eager has one of shape \(3,\)"):
        largest_difference([torch.ones(2)], [torch.ones(3)])


def test_a_compiler_that_fails_says_so_and_the_others_go_on(monkeypatch):
    jit = thunder.jit

    def failing(fn, **options):
        if not options.get("transforms"):
            raise RuntimeError("no\n  way")
        return jit(fn, **options)

    monkeypatch.setattr(thunder, "jit", failing)
    monkeypatch.setattr(torch, "compile", lambda fn: lambda x: fn(x)[:1])
    found = compare(lambda x: (x * 2).sin(), torch.randn(3), executors=[], torch_compile=True, repeats=1)
    assert found["Thunder"] == Row("Thunder", failure="RuntimeError: no way")
    assert "shape (1,) where eager has one of shape (3,)" in found["torch.compile"].failure
    assert found["MemEfficient"].peak_bytes and not found.trains
    assert "  Thunder       RuntimeError: no way\n" in str(found)


def test_what_fails_in_eager_is_raised_and_memory_that_is_short_is_a_row(monkeypatch):
    model, x = mlp(), torch.randn(4, 64)

    def short(x):
        raise torch.OutOfMemoryError("2 GiB are missing") if eager else KeyError("nothing here")

    eager, before = True, model[0].weight.clone()
    monkeypatch.setattr(thunder, "jit", lambda fn, **options: model)
    found = compare(short, x, repeats=1)
    assert found["eager"].failure == "OutOfMemoryError: 2 GiB are missing" and found["Thunder"].peak_bytes
    assert found["Thunder"].result_difference is None
    assert "times eager's" not in found.verdict
    eager = False
    with pytest.raises(KeyError):
        compare(short, x)
    assert torch.equal(model[0].weight, before)


@pytest.mark.slow
def test_why_another_needs_less():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
    found = compare(model, torch.randn(32, 64), executors=[], repeats=1)
    assert found.best is found["eager"] and found.draws
    assert (
        found.verdict.startswith("eager needs the least memory") and "Why not MemEfficient: the back" in found.verdict
    )
    assert str(found).endswith("differences are no errors.")


@pytest.mark.slow
def test_why_torch_compile_needs_less(monkeypatch):
    """A stand-in that writes over its own values, as fused code would."""
    monkeypatch.setattr(torch, "compile", lambda fn: lambda x: (x * 2).sin_())
    found = compare(lambda x: (x * 2).sin(), torch.randn(64), executors=[], torch_compile=True, repeats=1)
    assert found.best is found["torch.compile"] and found.why.startswith("no executor here fuses operations")


@pytest.mark.slow
def test_why_another_needs_as_little(monkeypatch):
    model, x = mlp(), torch.ones(2, 64)
    sgd = torch.optim.SGD(model.parameters(), foreach=True, weight_decay=0.1)
    assert "in the optimizer's step, which no" in compare(model, x, optimizer=sgd, executors=[], repeats=1).why
    monkeypatch.setattr("thunder_mem.planning.executor.lower_plan", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.warns(UserWarning, match="left this program as Thunder compiles it"):
        assert compare(model, x, executors=[], repeats=1).why.startswith("planning failed")


ROWS = (Row("eager", 100, 1.0), Row("Thunder", 120, 2.0, 0.0, 0.5), Row("MemEfficient", 50, 1.5, 1e-7, 2e-6))


def compared(*peaks, why=""):
    rows = tuple(replace(row, peak_bytes=peak) for row, peak in zip(ROWS, peaks, strict=True))
    return Comparison(rows, "cpu", 10, True, False, why)


@pytest.mark.parametrize(
    "found, verdict",
    [
        (
            compared(100, 125, 50),
            "MemEfficient needs the least memory, 50.0% below eager, 60.0% below Thunder, at 1.50 times eager's time.",
        ),
        (
            compared(50, 100, 100, why="so it is"),
            "eager needs the least memory, 50.0% below Thunder, 50.0% below MemEfficient. "
            "Why not MemEfficient: so it is.",
        ),
        (compared(50, 100, 50, why="so it is"), "MemEfficient needs as much as eager: so it is."),
        (
            Comparison((ROWS[0], Row("MemEfficient", failure="no")), "cpu", 0, False, False),
            "Only eager ran. MemEfficient failed: its line says why.",
        ),
        (
            Comparison((ROWS[0], ROWS[1], Row("MemEfficient", failure="no")), "cpu", 0, False, False),
            "eager needs the least memory, 16.7% below Thunder. MemEfficient failed: its line says why.",
        ),
        (
            Comparison((Row("eager", failure="no"), Row("MemEfficient", failure="no")), "cpu", 0, False, False),
            "Nothing ran: each line says why.",
        ),
    ],
)
def test_the_verdict(found, verdict):
    assert found.verdict == verdict
    assert found.to_json()["verdict"] == verdict


def test_it_is_five_lines():
    assert str(compared(100, 125, 50)).splitlines() == [
        "A training step on cpu; peaks include the caller's 10 B; differences are from eager",
        "  eager               100 B  1,000.00 ms",
        "  Thunder             125 B  2,000.00 ms   2.00 x  results within 0, gradients within 0.5",
        "  MemEfficient         50 B  1,500.00 ms   1.50 x  results within 1e-07, gradients within 2e-06",
        "MemEfficient needs the least memory, 50.0% below eager, 60.0% below Thunder, at 1.50 times eager's time.",
    ]
    assert repr(compared(1, 2, 3)) == str(compared(1, 2, 3))
    with pytest.raises(KeyError, match="'nvfuser' is none of eager, Thunder, MemEfficient"):
        compared(1, 2, 3)["nvfuser"]


def test_whatever_is_wrong_is_said():
    model, x = mlp(), torch.randn(4, 64)
    adamw = torch.optim.AdamW(model.parameters())
    for error, message, call in (
        (TypeError, "takes a module or a function, not int", lambda: compare(3)),
        (TypeError, "is compiled already", lambda: compare(thunder.jit(model), x)),
        (TypeError, "is compiled already", lambda: compare(torch.compile(model), x)),
        (TypeError, "AdamW is the class", lambda: compare(model, x, optimizer=torch.optim.AdamW)),
        (TypeError, "loss_fn is a function .* not str", lambda: compare(model, x, loss_fn="mean")),
        (TypeError, "write executors=..mem_pointwise..", lambda: compare(model, x, executors="mem_pointwise")),
        (TypeError, "LBFGS", lambda: compare(model, x, optimizer=torch.optim.LBFGS(model.parameters()))),
        (TypeError, r"a MemEfficient\(...\), not <class", lambda: compare(model, x, mem_efficient=MemEfficient)),
        (ValueError, "from 1 up, not 0", lambda: compare(model, x, repeats=0)),
        (ValueError, "only a part of one", lambda: compare(model, x.requires_grad_() * 2)),
        (ValueError, "scalar tensor, but it is a tensor of shape", lambda: compare(model, x, loss_fn=lambda out: out)),
        (ValueError, "leave the optimizer out", lambda: compare(lambda x: x.detach(), x, optimizer=adamw)),
    ):
        with pytest.raises(error, match=message):
            call()
    with simulate("T4"), pytest.raises(ValueError, match="fake tensors have no data"):
        compare(model, torch.ones(4, 64, device="cuda"))
