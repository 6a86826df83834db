"""Steps that need all gradients before the first update: clipping by their norm, and gradient scalers."""

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, measure_peak, predict_step
from thunder_mem.optimizer.all_gradients import AllGradients
from thunder_mem.prediction.training_step import training_step


def made(dtype=torch.float32, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8)).to(dtype)
    wrapped = optimizer(model.parameters(), lr=1e-2)
    ours = StepInBackward(wrapped, **options)
    return model, wrapped, ours, compiled(model, ours)


def compiled(model, ours):
    return thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def trained(way, dtype, scaled, clipped, inf_at=None):
    """Parameters after five steps, the second and fourth of two microbatches, and the scaler's scale.

    Args:
        way: "after" for PyTorch's clipping and scaler behind the backward, with the same gradients; else "one" or
            "two" passes.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    inside = {"max_norm": 1e-3 if clipped else None, "scaler": scaler if scaled else None, "two_pass": way == "two"}
    model, wrapped, ours, step = made(dtype, **({} if way == "after" else inside))
    for i in range(5):
        torch.manual_seed(i)
        x = torch.randn(4, 8).to(dtype)
        x[0, 0] = float("inf") if i == inf_at else x[0, 0]
        if i % 2:
            with ours.accumulate():
                scaler.scale(step(2 * x).square().mean()).backward()
        loss = scaler.scale(step(x).square().mean())
        if way == "after":
            with ours.accumulate():
                loss.backward()
            scaler.unscale_(wrapped)
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(wrapped)
            ours._forget()
        else:
            if way == "two":
                with ours.first_pass():
                    loss.backward(retain_graph=True)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            scaler.step(ours)
        scaler.update()
        ours.zero_grad()
    return values(model), scaler.get_scale()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scaled, clipped, inf_at", [(False, True, None), (True, True, None), (True, True, 2), (True, False, 3)]
)
def test_the_numbers_are_those_of_clipping_and_scaling_behind_the_backward(way, dtype, scaled, clipped, inf_at):
    expected, scale = trained("after", dtype, scaled, clipped, inf_at)
    found, our_scale = trained(way, dtype, scaled, clipped, inf_at)
    assert all(map(torch.equal, found, expected))
    assert our_scale == scale == (1.0 if not scaled else 1024.0 if inf_at is None else 512.0)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.filterwarnings("ignore:gradients wait")
def test_gradients_that_wait_for_step_are_scaled_back(unscale):
    """Two forwards of the same parameters before their backwards; the last step's gradients are not finite."""
    seen = []
    for scaled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        model, _, ours, step = made(optimizer=torch.optim.SGD, scaler=scaler if scaled else None)
        for i in range(3 if scaled else 2):
            torch.manual_seed(i)
            x = torch.randn(4, 8) if i < 2 else torch.full((4, 8), torch.inf)
            scaler.scale(step(x).square().mean() + step(3 * x).square().mean()).backward()
            if unscale:
                scaler.unscale_(ours)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
        seen.append(values(model))
    assert all(map(torch.equal, *seen)) and scaler.get_scale() == 128.0


def test_clip_value_comes_after_the_scaler():
    seen = []
    for scaled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        model, _, ours, step = made(optimizer=torch.optim.SGD, scaler=scaler if scaled else None, clip_value=1e-3)
        torch.manual_seed(5)
        scaler.scale(step(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(ours)
        seen.append(values(model))
    assert all(map(torch.equal, *seen))


def test_the_update_without_a_first_pass_of_its_forward():
    model, _, ours, step = made(max_norm=1.0, two_pass=True)
    before, x = values(model), torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="needs a first backward of the same forward"):
        step(x).sum().backward()
    ours._forget()
    loss = step(x).sum()
    with ours.first_pass():
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no backward gave a gradient"):
        ours.step()
    with torch.no_grad():
        step(x)  # an evaluation changes nothing
    later = step(x).sum()
    with pytest.raises(RuntimeError, match="needs a first backward of the same forward"):
        later.backward()
    assert all(map(torch.equal, values(model), before)) and ours.consistent


def test_a_first_pass_that_does_not_see_all_gradients():
    model, _, ours, step = made(optimizer=torch.optim.SGD, max_norm=1.0, two_pass=True)
    before, x = values(model), torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="saw no whole backward"), ours.first_pass():
        pass
    with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) asks for some alone"), ours.first_pass():
        step(x).sum().backward(inputs=[model[0].bias], retain_graph=True)
    ours._forget()
    with pytest.raises(RuntimeError, match="another forward of the same parameters"), ours.first_pass():
        (step(x).sum() + step(x).sum()).backward(retain_graph=True)
    ours._forget()
    loss = step(x).sum()
    with ours.accumulate(), pytest.raises(RuntimeError, match="inside accumulate"), ours.first_pass():
        pass
    with pytest.raises(RuntimeError, match="a second backward inside"), ours.first_pass():
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    assert all(map(torch.equal, values(model), before)) and ours.consistent
    with ours.first_pass():
        loss.backward(retain_graph=True)
    loss.backward()
    ours.step()
    assert not torch.equal(model[0].bias, before[1])


def other_loss(out, ours):
    (100 * out).sum().backward()


def loss_of_other_places(out, ours):
    (out * torch.arange(8.0).sub(3.5)).sum().backward()


def accumulated(out, ours):
    with ours.accumulate():
        out.sum().backward(retain_graph=True)
    out.sum().backward()


def cleared(out, ours):
    ours.zero_grad()
    out.sum().backward()


def some_alone(out, ours):
    out.sum().backward(inputs=[ours.param_groups[0]["params"][0]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "second, words",
    [
        (other_loss, "of another loss"),
        (loss_of_other_places, "of another loss"),
        (accumulated, "added up or cleared since"),
        (cleared, "added up or cleared since"),
        (some_alone, "asks for some gradients alone"),
    ],
)
def test_a_second_backward_with_other_gradients(second, words):
    """The norm that is known is not theirs, so nothing is updated."""
    model, _, ours, step = made(optimizer=torch.optim.SGD, max_norm=0.1, two_pass=True)
    before, x = values(model), torch.ones(2, 8)
    if second is cleared:
        with ours.accumulate():
            step(x).sum().backward()
    out = step(x)
    with ours.first_pass():
        out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=words):
        second(out, ours)
    assert all(map(torch.equal, values(model), before)) and ours.consistent


def test_a_result_that_the_loss_of_one_pass_leaves_out():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x)
            return h, self.second(h).sum()

    model = Two()
    ours = StepInBackward(torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.1, two_pass=True)
    before = values(model)
    h, loss = compiled(model, ours)(torch.ones(2, 4))
    with ours.first_pass():
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="of another loss"):
        (loss + h.sum()).backward(retain_graph=True)
    assert all(map(torch.equal, values(model), before))
    loss.backward()
    ours.step()
    moved = torch.cat([(p - q).flatten() for p, q in zip(values(model), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.1)


def test_both_passes_run_the_same_programs():
    """Two programs have one norm, in one backward or in two."""
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    parameters = [p for part in parts for p in part.parameters()]
    ours = StepInBackward(torch.optim.SGD(parameters, lr=1.0), max_norm=0.1, two_pass=True)
    steps, before = [compiled(part, ours) for part in parts], [p.detach().clone() for p in parameters]
    few, many = (step(torch.ones(2, 4)).sum() for step in steps)
    with ours.first_pass():
        many.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="reaches parameters that the one in first_pass"):
        (few + many).backward(retain_graph=True)
    assert all(map(torch.equal, parameters, before))
    with ours.first_pass():
        (few + 3 * many).backward(retain_graph=True)
    few.backward()
    with pytest.raises(RuntimeError, match="1 compiled programs had a backward in first_pass"):
        ours.step()
    (3 * many).backward()
    ours.step()
    moved = torch.cat([(p - q).flatten() for p, q in zip(parameters, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.1)


def test_a_first_pass_is_not_inside_another_and_forgets_a_forward_without_backward():
    model, _, ours, step = made(optimizer=torch.optim.SGD, max_norm=0.1, two_pass=True)
    before, x = values(model), torch.ones(2, 8)
    step(x)
    loss = step(x).sum()
    with pytest.raises(RuntimeError, match="another forward of the same parameters"), ours.first_pass():
        loss.backward(retain_graph=True)
    loss = step(x).sum()
    with pytest.raises(RuntimeError, match="inside first_pass"), ours.first_pass(), ours.first_pass():
        pass
    with ours.first_pass():
        loss.backward(retain_graph=True)
    assert all(map(torch.equal, values(model), before))
    loss.backward()
    ours.step()
    assert not torch.equal(model[0].bias, before[1])


def test_parameters_outside_of_the_program_cannot_take_two_passes():
    inside, outside = nn.Linear(5, 5), nn.Linear(5, 5)
    parameters = [*inside.parameters(), *outside.parameters()]
    ours = StepInBackward(torch.optim.SGD(parameters, lr=1.0), max_norm=0.1, two_pass=True)
    loss = outside(compiled(inside, ours)(torch.ones(2, 5))).sum()
    with pytest.raises(RuntimeError, match=r"2 parameters.* get their gradients from outside"), ours.first_pass():
        loss.backward(retain_graph=True)
    ours.zero_grad()
    loss = compiled(inside, ours)(torch.ones(2, 5)).sum() + inside.bias.sum()  # which is read beside the program
    with pytest.raises(RuntimeError, match=r"1 parameters.* get their gradients from outside"), ours.first_pass():
        loss.backward(retain_graph=True)


@pytest.mark.slow
def test_two_passes_hold_one_gradient_at_a_time():
    torch.manual_seed(0)
    x, peaks = torch.randn(4, 128), []
    for two_pass in (False, True):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
        ours = StepInBackward(torch.optim.SGD(model.parameters(), lr=1e-2), max_norm=0.1, two_pass=two_pass)
        step = compiled(model, ours)
        training_step(step, ours, lambda out: out.square().mean(), x)
        peaks.append(measure_peak(lambda s=step, o=ours: training_step(s, o, lambda out: out.square().mean(), x)))
        assert predict_step(step, ours, lambda out: out.square().mean(), x).measured_bytes == peaks[-1]
    assert peaks[1] < peaks[0] / 3


def test_infinities_are_found_without_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    for last, skips in ((3e38, False), (float("inf"), True), (float("nan"), True)):
        gradients = AllGradients(None, scaler)
        gradients.add_all([torch.full((9,), 3e38), torch.empty(0), torch.tensor([1.0, last])])
        assert gradients.verdict() == (0.5, skips)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"two_pass": True}, ValueError, "two_pass=True is for max_norm= or scaler="),
        ({"scaler": 2.0}, TypeError, "scaler is a torch.amp.GradScaler"),
    ],
)
def test_bad_input(options, error, words):
    with pytest.raises(error, match=words):
        made(**options)


def test_first_pass_of_an_optimizer_without_two():
    with pytest.raises(RuntimeError, match="two_pass=True"), made(max_norm=1.0)[2].first_pass():
        pass


def test_a_scaler_that_is_off():
    """A first pass then finds nothing, and the steps are those without a scaler."""
    seen = []
    for options in ({}, {"scaler": torch.amp.GradScaler("cpu", enabled=False), "two_pass": True}):
        model, _, ours, step = made(optimizer=torch.optim.SGD, **options)
        torch.manual_seed(1)
        training_step(step, ours, lambda out: out.square().mean(), torch.randn(4, 8))
        seen.append(values(model))
    assert all(map(torch.equal, *seen))


def test_a_scaler_refuses_float16_parameters():
    scaler = torch.amp.GradScaler("cpu")
    model, *_, step = made(torch.float16, scaler=scaler)
    before = values(model)
    with pytest.raises(ValueError, match="keep the parameters in float32"):
        scaler.scale(step(torch.ones(4, 8, dtype=torch.float16)).sum()).backward()
    assert all(map(torch.equal, values(model), before))
