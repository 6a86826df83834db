"""Reports say first where eager PyTorch would need less, and why."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, explain, measure_peak
from thunder_mem.report.above_eager import Eager, _saved_bytes, follow_eager, why_above


class Mixed(nn.Module):
    """Views, a norm, a write in place, and numbers that are made of nothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = F.relu(self.up(self.norm(x)), inplace=True) + torch.arange(64, device=x.device)
        q, k = self.down(F.gelu(y)).reshape(8, 2, 32).transpose(0, 1).unbind(0)
        return (q * k).softmax(-1).square().mean()


def first_trace(jitted):
    return thunder.compile_stats(jitted).interpreter_cache[-1].computation_traces[0]


@pytest.mark.slow
def test_what_eager_holds_is_what_it_is_measured_to_hold():
    model, x = Mixed(), torch.randn(32, 16)
    jitted = thunder.jit(model, executors=[])
    jitted(x)
    held_bytes = sum(t.nbytes for t in (x, *model.parameters()))

    def step():
        model(x).backward()
        for p in model.parameters():
            p.grad = None

    step()
    loss_bytes = 4  # which the frame of `backward` holds here
    peak_bytes = follow_eager(first_trace(jitted), backward=True).peak_bytes
    assert peak_bytes + loss_bytes == held_bytes + measure_peak(step)


PICKED = torch.arange(40) % 32


def set_items(x):
    y = x * 1
    y[PICKED] = 0.5
    return y.square().sum()


@pytest.mark.parametrize(
    "function",
    [
        set_items,
        lambda x: x.T.square().sum(),
        lambda x: x.mT.sin().sum(),
        lambda x: x.double().float().square().sum(),
        lambda x: torch.topk(x, 4)[0].square().sum(),
        lambda x: torch.sort(x, -1)[0][:, :4].square().sum(),
        lambda x: x.max(-1)[0].square().sum(),
        lambda x: x[PICKED].square().sum(),
        lambda x: torch.index_select(x, 0, PICKED).square().sum(),
        lambda x: x.gather(0, PICKED[:, None].expand(40, 64)).square().sum(),
    ],
    ids=["setitem", "T", "mT", "float", "topk", "sort", "max", "index", "index_select", "gather"],
)
def test_eager_is_followed_through_methods_and_scattered_gradients(function):
    x, tangent = torch.randn(32, 64, requires_grad=True), torch.ones(())
    jitted = thunder.jit(function, executors=[])
    jitted(x)
    trace = first_trace(jitted)
    outside_bytes = sum(p.numel * p.dtype.bytes for p in trace.args)
    eager_bytes = measure_peak(lambda: torch.autograd.grad(function(x), x, tangent))
    told_bytes = follow_eager(trace, backward=True).peak_bytes - outside_bytes
    assert abs(told_bytes - eager_bytes) <= 8  # the tangent and the loss


def test_two_figures_that_look_alike_are_told_in_bytes():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    report = explain(thunder.jit(model, executors=[]), torch.randn(64, 64), bounds=False)
    prediction = report.prediction
    saved_bytes = _saved_bytes(prediction)
    eager = Eager(prediction.peak_bytes - 1, saved_bytes - 1)
    told = f"the backward receives {saved_bytes:,} bytes here and {saved_bytes - 1:,} in eager"
    assert why_above(eager, prediction) == told


def test_bytes_that_are_a_small_part_of_the_gap_are_no_reason():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    report = explain(thunder.jit(model, executors=[]), torch.randn(64, 64), bounds=False)
    prediction, event = report.prediction, report.prediction.peak_event
    saved_bytes = _saved_bytes(prediction)
    for more_bytes, little in ((4, "little more"), (0, "no more")):
        eager = Eager(prediction.peak_bytes - 1024, saved_bytes - more_bytes)
        told = f"{little} is saved for the backward, but {event.name} #{event.index} works with more at once"
        assert why_above(eager, prediction) == told


def test_a_program_above_eager_hears_it_first_with_the_reason():
    def alone(fn, x):
        report = explain(thunder.jit(fn, executors=[]), x, bounds=False, detail=True)
        return " ".join(str(report).split()), report

    x = torch.randn(64, 64)
    line, report = alone(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), x)
    assert "above eager PyTorch, which needs" in line and "the backward receives" in line
    assert report.to_json()["above_eager"] == list(report.above_eager) != []
    line, report = alone(torch.sigmoid, x)
    assert f"by {report.peak_bytes - 2 * x.nbytes:,} bytes: no more is saved for the backward, but" in line


@pytest.mark.slow
def test_a_program_at_or_below_eager_hears_nothing():
    for fn in (Mixed(), lambda x: F.gelu(x)):
        jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
        assert explain(jitted, torch.randn(32, 16), bounds=False).above_eager == ()


def test_what_is_not_followed_is_refused():
    jitted = thunder.jit(lambda x: checkpoint(lambda y: y.sin().exp().cos(), x * 2, use_reentrant=False), executors=[])
    jitted(torch.randn(3, requires_grad=True))
    with pytest.raises(NotImplementedError, match="a checkpoint"):
        follow_eager(first_trace(jitted), backward=True)


def test_a_function_is_called_before_the_method_of_its_name(caplog):
    """`Tensor.where` takes its arguments in another order."""
    jitted = thunder.jit(lambda x: torch.where(x > 0, x, 0.0).sum(), executors=[])
    x = torch.randn(32, 16, requires_grad=True)
    jitted(x)
    assert follow_eager(first_trace(jitted), backward=True).peak_bytes >= 2 * x.nbytes
    assert not caplog.records
