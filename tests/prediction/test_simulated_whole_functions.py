"""Functions that PyTorch differentiates whole are predicted for a simulated GPU, although its engine does not run."""

from contextlib import nullcontext

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

from thunder_mem import MemEfficient, predict, predict_step, simulate

N = 32
FUNCTIONS = {
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x * 2, 3).sum(), (2, 3, N, N)),
    "cdist": (lambda x: torch.cdist(x * 2, x * 3).sum(), (N, N)),
    "fft": (lambda x: torch.fft.rfft(x * 2).abs().sum(), (N, N)),
    "inv": (lambda x: torch.linalg.inv(x * 2).sum(), (4, N, N)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x * 2, 0).sum(), (N, N)),
}


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x * 2)[0].square().mean()


def on(device, make, **options):
    with simulate("H100-80GB") if device == "cuda" else nullcontext(), torch.device(device):
        fn, *args = make()
        return predict(thunder.jit(fn, transforms=[MemEfficient()], **options), *args)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_their_peaks_are_those_of_a_cpu(name: str):
    fn, shape = FUNCTIONS[name]

    def make():
        return fn, torch.randn(shape, requires_grad=True)

    here, there = (on(device, make, executors=[]) for device in ("cpu", "cuda"))
    # Sizes are rounded up to 512 bytes there, and kernels may hold scratch here.
    assert 0 <= there.peak_bytes - here.peak_bytes <= 2048
    assert any("as a CPU runs them" in a for a in there.assumptions)


def test_a_segmentation_head_is_predicted():
    def make():
        enlarged = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), enlarged), torch.randn(2, 3, N, N)

    found = on("cuda", make, executors=[])
    assert found.phases == ("forward", "backward")
    held = 2 * 8 * (2 * N) ** 2 * 4
    assert held < found.peak_bytes < 4 * held


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU])
def test_layers_without_kernels_of_their_own_peak_as_on_a_cpu(layer):
    def make():
        return Recurrent(layer(16, 16, 2)), torch.randn(3, 4, 16)

    here, there = (on(device, make, executors=[]) for device in ("cpu", "cuda"))
    assert here.peak_bytes <= there.peak_bytes <= 2 * here.peak_bytes  # 512 bytes for each small value of a step
    assert any("recurrent" in a for a in there.assumptions)


def test_a_step_with_an_lstm_is_predicted_and_runs_nothing():
    with simulate("A100-80GB"), torch.device("cuda"):
        model, x = Recurrent(nn.LSTM(16, 16, bidirectional=True)), torch.randn(2, 4, 16)
        jitted = thunder.jit(model, transforms=[MemEfficient()])
        step = predict_step(jitted, torch.optim.AdamW(model.parameters()), None, x)
        with torch.no_grad():
            inference = predict(jitted, x)
    parameters = sum(p.nbytes for p in model.parameters())
    assert 4 * parameters <= step.peak_bytes < 8 * parameters
    assert "optimizer" in step.phases and inference.phases == ("forward",)


@pytest.mark.parametrize("name", ["ctc_loss", "quantile"])
def test_a_function_that_needs_values_counts_by_its_results(name: str):
    def make():
        lengths = torch.full((4,), 3)
        if name == "ctc_loss":
            fn = lambda x, labels: F.ctc_loss((x * 2).log_softmax(-1), labels, lengths * 2, lengths)  # noqa: E731
        else:
            fn = lambda x, labels: torch.quantile(x * 2, 0.5, dim=1).sum()  # noqa: E731
        return fn, torch.randn(N, 4, 64, requires_grad=True), torch.ones(4, 3, dtype=torch.int64)

    found = on("cuda", make, executors=[])
    nbytes = N * 4 * 64 * 4
    assert 2 * nbytes <= found.peak_bytes <= 4 * nbytes + 2048


def test_values_of_the_cpu_stay_there():
    with simulate("H100-80GB"):
        jitted = thunder.jit(lambda x, y: torch.cdist(x, x).sum().to("cuda") + y, transforms=[MemEfficient()])
        found = predict(jitted, torch.randn(N, N, requires_grad=True), torch.randn(N, device="cuda"))
    assert found.peak_bytes < 4096  # of the GPU
