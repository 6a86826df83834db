"""8-bit optimizers inside the backward, where they are installed: `make test-eight-bit`."""

import copy

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, measure_peak, predict_step
from thunder_mem.optimizer.trial_steps import bare_copy
from thunder_mem.prediction.training_step import training_step


@pytest.mark.filterwarnings("ignore")  # of the other packages
@pytest.mark.parametrize("package", ["bitsandbytes", pytest.param("torchao", marks=pytest.mark.slow)])
def test_eight_bit_states(package):
    """The numbers of the same optimizer behind eager PyTorch's backward; torchao compiles its step, in 15 seconds."""
    kind = pytest.importorskip(f"{package}.optim").AdamW8bit
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    eager = copy.deepcopy(model)
    theirs, ours = kind(eager.parameters(), lr=1e-2), StepInBackward(kind(model.parameters(), lr=1e-2))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    for _ in range(3):
        x = torch.randn(4, 256)
        for run, optimizer in ((step, ours), (eager, theirs)):
            run(x).square().mean().backward()
            assert run is eager or all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "states"),
    [("bitsandbytes", "device"), ("bitsandbytes", "host"), pytest.param("torchao", "device", marks=pytest.mark.slow)],
)
def test_predicted_steps_are_the_measured_ones(package, states):
    kind = pytest.importorskip(f"{package}.optim").AdamW8bit
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    ours = StepInBackward(kind(model.parameters(), lr=1e-3), states=states)
    step, x = (
        thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)]),
        torch.ones(16, 256),
    )
    with torch.no_grad():
        step(x)
    for first in (True, False, False):
        predicted = predict_step(step, ours, loss_of, x, first=first)
        measured = measure_peak(lambda: training_step(step, ours, loss_of, x))
        if not (first and package == "torchao"):  # which compiles in its first step
            assert predicted.measured_bytes == measured


def loss_of(y):
    return y.square().mean()


def test_a_trial_step_leaves_an_optimizers_tables_alone():
    class Table(torch.optim.SGD):
        """Moves a table to the device of the step, as bitsandbytes does."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.table = {"map": torch.ones(4)}

    optimizer = Table([nn.Parameter(torch.ones(2))])
    bare_copy(optimizer).table["map"] = torch.ones(4, device="meta")
    assert optimizer.table["map"].device.type == "cpu"
