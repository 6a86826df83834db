"""What a benchmark on a GPU reports, with an allocator's statistics that only pretend."""

import pytest
import torch

from benchmarks.litgpt import command, harness
from benchmarks.litgpt.device_peaks import DevicePeaks, attention_backend


class Statistics:
    """As PyTorch keeps them: a peak is at least what is there."""

    def __init__(self, monkeypatch):
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reach(self, nbytes, left=0):
        self.peak, self.now = max(self.peak, nbytes), left

    def reset(self):
        self.peak = self.now

    def stats(self):
        figures = {"allocated": self.peak, "requested": self.peak - 1, "reserved": self.peak + 1}
        return {f"{name}_bytes.all.peak": nbytes for name, nbytes in figures.items()}


@pytest.fixture
def statistics(monkeypatch):
    return Statistics(monkeypatch)


def test_the_warm_ups_peak_stands_beside_the_one_after_it(statistics):
    peaks = DevicePeaks()
    statistics.reach(900, left=100)
    peaks.end_warm_up()
    statistics.reach(500)
    assert peaks.found() == {
        "peak_bytes": 500,
        "requested_peak_bytes": 499,
        "reserved_peak_bytes": 501,
        "warmup_peak_bytes": 900,
        "warmup_requested_peak_bytes": 899,
        "warmup_reserved_peak_bytes": 901,
    }


def test_without_a_warm_up_there_is_one_peak(statistics):
    statistics.reach(900)
    assert DevicePeaks().found() == {"peak_bytes": 900, "requested_peak_bytes": 899, "reserved_peak_bytes": 901}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_benchmark_resets_when_its_warm_up_is_over(statistics, monkeypatch, tmp_path, warmup):
    """The benchmark itself, on a CPU that it takes for a GPU; iteration i reaches 10,000 - 1,000 i bytes."""
    arguments = ["--model_name", "pythia-14m", "--n_layers", "1", "--block_size", "32", "--scale", "0.25"]
    arguments += ["--device", "cpu", "--max_iters", "4", "--warmup_iters", str(warmup)]
    options, given = command.parse(arguments)
    make = harness._subclass

    def subclass(module):
        benchmark = make(module)

        class Pretending(benchmark):
            def _note_step(self, *args):
                object.__setattr__(self.options, "device", "cuda")
                statistics.reach(10_000 - 1_000 * len(self.step_ms), left=10)
                super()._note_step(*args)

        return Pretending

    monkeypatch.setattr(harness, "_subclass", subclass)
    monkeypatch.setattr(harness, "machine_kind", lambda device: device)
    given |= {"return_metrics_as_json": True, "json_path": str(tmp_path / "metrics.json")}
    found = harness.run(options, **given).perf_metrics
    assert found["peak_bytes"] == 10_000 - 1_000 * warmup
    assert found.get("warmup_peak_bytes") == (10_000 if warmup else None)
    assert found["memory_used_GB"] == found["peak_bytes"] / 1e9
    assert found["eager_attention"] == "FLASH_ATTENTION"


@pytest.mark.slow
def test_attention_falls_back_where_no_kernel_fits():
    assert attention_backend((1, 4, 128, 64), torch.bfloat16, "cpu") == "FLASH_ATTENTION"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_backend((1, 4, 128, 64), torch.bfloat16, "cpu") == "MATH"
