"""The figures of updates and the predictions of steps, against what the same steps hold on this CPU."""

from functools import partial

import pytest
import thunder
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from thunder_mem import MemEfficient, StepInBackward, measure_peak, predict_step, simulate
from thunder_mem.optimizer import one_parameter
from thunder_mem.optimizer.elementwise import BY_ELEMENT
from thunder_mem.optimizer.figures import step_figures
from thunder_mem.optimizer.host_states import step_with
from thunder_mem.optimizer.one_parameter import first_state
from thunder_mem.prediction.training_step import training_step
from thunder_mem.runtime.measure import record_curve

ELEMENTWISE = {kind.__name__: kind for kind in BY_ELEMENT}
OPTIMIZERS = {
    **ELEMENTWISE,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "fused": partial(torch.optim.AdamW, fused=True),
    "fused momentum": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "Adafactor": torch.optim.Adafactor,
}
NUMBERS_BYTES = 64  # such as counts of steps, which are not on a GPU
LATE = 8  # steps, after which RAdam's arithmetic is another


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(one_parameter, "_SLICE_BYTES", {"cpu": 16384})


@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.1}])
@pytest.mark.parametrize("shape", [(30, 50), (125, 64), (250, 64)], ids=["part", "two", "four"])
@pytest.mark.parametrize("states", ["device", "host"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_figures_are_what_a_step_holds(name, states, shape, clip):
    p = nn.Parameter(torch.ones(shape))
    optimizer, grad, kept = OPTIMIZERS[name]([p], lr=1e-2), torch.ones(shape), []
    (group,) = optimizer.param_groups
    found = step_figures(optimizer, group, shape, p.dtype, "cpu", states=states, **clip)
    run = partial(step_with(states), optimizer, group, p, grad, **clip)

    def first():
        kept.append(optimizer.state)
        optimizer.state = first_state(optimizer, group, p)
        run()

    first()
    began = record_curve(first)
    for _ in range(LATE):
        run()
    later = record_curve(run)
    # What a first step makes and leaves on the device are the states.
    assert found.first_bytes == pytest.approx(began.peak_bytes - began.end_bytes, abs=NUMBERS_BYTES)
    assert found.temporary_bytes == pytest.approx(later.peak_bytes - later.end_bytes, abs=NUMBERS_BYTES)


def loss_of(y):
    return y.square().mean()


def step_of(make, *, head=None, **options):
    """A compiled model with its optimizer, which also has the parameters of a `head` that Thunder does not compile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 250), nn.Tanh(), nn.Linear(250, 64))
    ours = StepInBackward(make([*model.parameters(), *(() if head is None else head.parameters())]), **options)
    return thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)]), ours


def assert_each_step_is_predicted(step, ours, loss_fn, steps):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        step(x)
    for i in range(steps):
        predicted = predict_step(step, ours, loss_fn, x, first=i == 0)
        assert predicted.measured_bytes == measure_peak(lambda: training_step(step, ours, loss_fn, x)), i


@pytest.mark.sampled(2)
@pytest.mark.parametrize("states", ["device", "host"])
@pytest.mark.parametrize("name", ["RAdam", "ASGD"])
def test_steps_whose_arithmetic_changes(name, states):
    assert_each_step_is_predicted(*step_of(OPTIMIZERS[name], states=states), loss_of, LATE)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:gradients wait for optimizer.step")
@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.1}, {"max_norm": 0.1}])
@pytest.mark.parametrize("states", ["device", "host"])
@pytest.mark.parametrize("name", ["AdamW", "fused", "RAdam", "ASGD"])
def test_parameters_that_the_backward_does_not_update(name, states, clip):
    """With a norm over all, the backward's own gradients wait for the head's."""
    head = nn.Linear(64, 300)
    step, ours = step_of(OPTIMIZERS[name], head=head, states=states, **clip)
    assert_each_step_is_predicted(step, ours, lambda y: loss_of(head(y)), LATE if name == "RAdam" else 2)


class Branches(torch.optim.Optimizer):
    """A user's own optimizer: from its third step on it holds two more tensors, as its count in the state says."""

    def __init__(self, parameters, lr=1e-2, number=int):
        super().__init__(parameters, {"lr": lr, "number": number})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(n=group["number"](0), m=torch.zeros_like(p))
                state["n"] += 1
                late = float(state["n"]) > 2
                state["m"].add_(p.grad + (p.grad * 2) * (p.grad * 3) if late else p.grad)
                p.sub_(group["lr"] * state["m"])


class SubRAdam(torch.optim.RAdam):
    """Another class, with the same arithmetic."""


OWN = {"int": Branches, "tensor": partial(Branches, number=torch.tensor), "subclass": SubRAdam}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("name", sorted(OWN))
def test_optimizers_of_a_users_own_that_branch(name, with_head):
    head = nn.Linear(64, 300) if with_head else None
    step, ours = step_of(OWN[name], head=head)
    loss_fn = loss_of if head is None else (lambda y: loss_of(head(y)))
    assert_each_step_is_predicted(step, ours, loss_fn, LATE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"clip_value": 0.1}, {"max_norm": 0.1, "two_pass": True}])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("states", ["device", "host"])
def test_gradients_that_the_backward_uses_are_gone_though_others_are_filled_with_zeros(states, count, options):
    head = nn.Linear(64, 300)
    step, ours = step_of(OPTIMIZERS["AdamW"], head=None if options.get("two_pass") else head, states=states, **options)
    loss_fn = loss_of if options.get("two_pass") else (lambda y: loss_of(head(y)))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    how = {"accumulate": count, "set_to_none": False}
    training_step(step, ours, loss_fn, x, **how)
    for _ in range(2):
        predicted = predict_step(step, ours, loss_fn, x, **how)
        assert predicted.measured_bytes == measure_peak(lambda: training_step(step, ours, loss_fn, x, **how))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wrap", [StepInBackward, lambda o: o])
@pytest.mark.parametrize("name", ["AdamW", "RAdam"])
def test_steps_for_graphs_of_a_gpu_are_simulated(name, wrap, first):
    peaks = []
    for capturable in (False, True):
        with simulate("H100-80GB"), torch.device("cuda"):
            model = nn.Linear(1024, 1024, bias=False)
            optimizer = wrap(OPTIMIZERS[name](model.parameters(), capturable=capturable))
            ours = optimizer if isinstance(optimizer, StepInBackward) else None
            step = thunder.jit(model, transforms=[MemEfficient(strict=True, optimizer=ours)])
            peaks.append(predict_step(step, optimizer, loss_of, torch.zeros(8, 1024), first=first).peak_bytes)
    # The count of steps is on the device. A first step() makes it within the step, where either kind counts.
    assert peaks[1] - peaks[0] == (512 if wrap is StepInBackward or not first else 0)


def test_a_first_step_is_predicted_from_one_slice_of_a_parameter(monkeypatch):
    parts, inner = [], one_parameter.step_part
    monkeypatch.setattr(one_parameter, "step_part", lambda *args, **how: parts.append(args[2]) or inner(*args, **how))
    model = nn.Linear(64, 256, bias=False)
    optimizer = StepInBackward(torch.optim.AdamW(model.parameters()))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=optimizer)])
    x = torch.zeros(8, 64)
    predicted = predict_step(step, optimizer, loss_of, x, first=True)
    assert [part.numel() for part in parts if isinstance(part, FakeTensor)] == [4096]
    measured = measure_peak(lambda: training_step(step, optimizer, loss_of, x))
    assert predicted.measured_bytes == measured and [part.numel() for part in parts[-4:]] == [4096] * 4
