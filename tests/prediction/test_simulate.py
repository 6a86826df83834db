"""A GPU that is not there: what it answers, what it refuses, and that its numbers follow from shapes."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.executors.sdpaex import sdpa_ex
from torch import nn

from thunder_mem import MemEfficient, explain, last_plan, memory_time_frontier
from thunder_mem.analysis.capacity import fits, largest_batch, largest_sequence
from thunder_mem.fake_execution.scratch import KERNELS, PRODUCTS, REGIONS
from thunder_mem.memory.device_specs import DEVICES, device_spec
from thunder_mem.prediction.caching_allocator import CachingAllocator, allocate, rounded
from thunder_mem.prediction.predict import PredictionError, predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.runtime.simulated_device import simulated_device

MIB = 2**20


def test_the_device_answers_and_is_gone_afterwards():
    before = torch.cuda.is_available()
    with simulate("A100-80GB") as device:
        assert simulated_device() is device
        assert (device.name, device.memory_bytes) == ("A100-80GB", DEVICES["A100-80GB"].memory_bytes)
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties(0).total_memory == device.memory_bytes
        assert torch.cuda.mem_get_info()[0] == device.spec.usable_bytes < device.memory_bytes
        assert torch.empty(3, device="cuda").device.type == "cuda"
    assert simulated_device() is None and torch.cuda.is_available() == before


def test_it_is_gone_after_an_error_too():
    executors = thunder.get_default_executors()
    with pytest.raises(ZeroDivisionError), simulate("T4"):
        1 / 0  # noqa: B018
    assert simulated_device() is None and thunder.get_default_executors() == executors


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"unknown device 'H1000'.*H100-80GB"), simulate("H1000"):
        pass
    with (
        pytest.raises(ValueError, match=r"unknown fusion 'xla'.*'mem_pointwise', 'nvfuser', 'torchcompile'"),
        simulate("T4", fusion="xla"),
    ):
        pass
    with pytest.raises(ValueError, match="by its name"):
        device_spec(3)
    with simulate("T4"), pytest.raises(ValueError, match="T4 is being simulated already"), simulate("L4"):
        pass


def test_modules_move_and_stay_tied():
    with simulate("T4"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        model.to("cuda").to(torch.bfloat16)
        assert model[0].weight is model[1].weight
        assert (model[0].weight.dtype, model[0].weight.device.type) == (torch.bfloat16, "cuda")
        assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize("ask", [predict, memory_time_frontier, lambda f, x: explain(thunder.jit(f), x)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_on_the_cpu_is_no_answer_about_the_gpu(ask, inside):
    made = None if inside else nn.Linear(4, 4)
    with simulate("A100-80GB"):
        model, x = nn.Linear(4, 4) if made is None else made, torch.ones(2, 4)
        with pytest.raises(ValueError, match="on the CPU while the A100-80GB is simulated: make the model"):
            ask(thunder.jit(model) if ask is predict else model, x)
        with pytest.raises(ValueError, match="on the CPU"):
            predict_step(thunder.jit(model), None, lambda out: out.sum(), x)
        if ask is predict:  # what the message says helps
            assert predict(thunder.jit(model.to("cuda")), x.to("cuda")).device_type == "cuda"


def test_autograd_says_what_to_use_instead():
    with simulate("T4"), pytest.raises(RuntimeError, match=r"use thunder_mem\.predict"):
        torch.ones(2, device="cuda", requires_grad=True).sum().backward()


def attention(device, dtype, size=64, mask=False, **kwargs):
    with simulate(device):
        q, k, v = (torch.empty(1, 2, 128, size, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
        args = (q, k, v) + ((torch.empty(1, 2, 128, 128, dtype=dtype, device="cuda"),) if mask else ())
        jitted = thunder.jit(lambda *args: F.scaled_dot_product_attention(*args, **kwargs), executors=[sdpa_ex])
        names = [e.name for e in predict(jitted, *args).phase("forward").timeline]
    return {"flash": any("sdpafx" in n for n in names), "efficient": any("sdpaex" in n for n in names)}


@pytest.mark.parametrize(
    "device, dtype, size, mask, kernel",
    [
        ("H100-80GB", torch.bfloat16, 64, False, "flash"),
        ("H100-80GB", torch.float32, 64, False, "efficient"),
        ("H100-80GB", torch.bfloat16, 64, True, "efficient"),
        ("RTX4090", torch.float16, 256, False, "efficient"),
        ("H100-80GB", torch.float16, 256, False, "flash"),
        ("T4", torch.float16, 64, False, "efficient"),
        ("V100-16GB", torch.bfloat16, 64, False, None),
        ("H100-80GB", torch.float64, 64, False, None),
    ],
)
def test_the_attention_kernel_is_the_devices(device, dtype, size, mask, kernel):
    assert attention(device, dtype, size, mask) == {"flash": kernel == "flash", "efficient": kernel == "efficient"}


def test_causal_attention_over_a_cache_is_not_for_flash():
    with simulate("H100-80GB"):
        q = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
        jitted = thunder.jit(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), executors=[sdpa_ex])
        assert [e.name for e in predict(jitted, q, k).timeline if "sdpafx" in e.name] == []


def upcast(x):
    return (x.float().sin() * 2).to(torch.bfloat16)


@pytest.mark.parametrize("fusion", [None, "mem_pointwise", "nvfuser", "torchcompile"])
def test_a_region_is_its_outputs_and_nothing_inside(fusion):
    with simulate("H100-80GB", fusion=fusion):
        x = torch.empty(MIB, dtype=torch.bfloat16, device="cuda")
        jitted = thunder.jit(upcast)
        prediction = predict(jitted, x)
        result = jitted(x)
    assert prediction.held_bytes == 2 * MIB
    said = {None: set(), "mem_pointwise": {KERNELS}}.get(fusion, {REGIONS})
    assert said == {KERNELS, REGIONS} & set(prediction.assumptions)
    # unfused, the float32 product and one of its factors are there together, and no output yet
    assert prediction.peak_bytes == (10 * MIB if fusion is None else 4 * MIB)
    assert (result.dtype, tuple(result.shape), result.device.type) == (torch.bfloat16, (MIB,), "cuda")


def test_kernels_are_written_where_the_simulated_gpu_is_the_default_device(monkeypatch):
    """Inductor makes a tensor of its own, for which there is no driver."""
    monkeypatch.setattr(scratch_cache, "kernel_table", lambda machine, codec: scratch_cache.Table(None, machine, codec))
    with simulate("H100-80GB", fusion="mem_pointwise"), torch.device("cuda"):
        prediction = predict(thunder.jit(upcast), torch.empty(MIB + 3, dtype=torch.bfloat16))
    assert {KERNELS} == {a for a in prediction.assumptions if "kernels" in a and "own kernels" not in a}


def test_without_fusion_there_is_none_of_ours_either():
    with simulate("H100-80GB", fusion=None):
        jitted = thunder.jit(upcast, transforms=[MemEfficient(strict=True)])
        predict(jitted, torch.empty(64, dtype=torch.bfloat16, device="cuda"))
    assert {r.executor for r in last_plan(jitted).regions} == {None}


@pytest.mark.parametrize(
    "fusion, said",
    [("mem_pointwise", {KERNELS}), ("nvfuser", {REGIONS}), ("torchcompile", {REGIONS, PRODUCTS})],
    ids=["mem_pointwise", "nvfuser", "torchcompile"],
)
def test_regions_with_products_inside_are_named_as_assumptions(fusion, said):
    with simulate("T4", fusion=fusion):
        x = torch.empty(64, 64, device="cuda")
        prediction = predict(thunder.jit(lambda x: ((x.sin() @ x) + 1).cos()), x)
    assert {KERNELS, REGIONS, PRODUCTS} & set(prediction.assumptions) == said


@pytest.mark.parametrize("fusion", ["mem_pointwise", "nvfuser", "torchcompile"])
def test_views_that_leave_a_region_cost_nothing(fusion):
    with simulate("H100-80GB", fusion=fusion):
        x = torch.empty(1024, 1024, device="cuda")

        def f(x):
            y = x * 2
            return y, y.t(), x.t(), y[:512] + 1

        prediction = predict(thunder.jit(f), x)
    assert prediction.measured_bytes == 4 * MIB + 2 * MIB


def mixed(model, x):
    q, k, v = model(x).view(-1, 3, 32).unbind(1)
    return (q.softmax(-1) * k.t().contiguous().t() + v.float().exp()).sum(0), q * 2, k[::2] + 1


def rotary(model, x):
    """As litgpt once had it: the rotated heads keep the strides of their projection, so that nothing is copied."""
    q, k, v = model(x).view(16, 3, 4, 8).permute(1, 2, 0, 3)
    turn = torch.arange(16, device=x.device).outer(torch.arange(8, device=x.device)).cos()
    return ((q * turn + k * turn) * v.relu()).transpose(0, 1).reshape(16, 32) @ x.t()


@pytest.mark.slow
@pytest.mark.parametrize("program", [mixed, rotary])
def test_modelled_regions_are_what_inductor_makes_of_them(program):
    """Event by event, the model of a region on a GPU agrees with the regions that ran on the CPU."""

    def run(device):
        with torch.device(device):
            model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU())
            x = torch.ones(16, 32)
        jitted = thunder.jit(lambda x: program(model, x), executors=[mem_pointwise_ex])
        prediction = predict(jitted, x)
        if device == "cpu":
            assert prediction.phase("forward").measured_bytes == measure_peak(jitted, x)
        return prediction

    on_cpu = run("cpu")
    with simulate("H100-80GB", fusion=None):
        on_cuda = run("cuda")
    assert any(e.bsym.sym.is_fusion for e in on_cpu.timeline)
    assert [(e.name, e.live_bytes) for e in on_cpu.timeline] == [(e.name, e.live_bytes) for e in on_cuda.timeline]


def test_a_plan_counts_on_the_strides_that_regions_keep():
    """Heads that are rotated as views of their projection: attention's result is reshaped without a copy."""

    def attend(w, x, turn):
        q, k, v = (x @ w).view(1, 1024, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * turn + q, k * turn + k, v, is_causal=True)
        return y.transpose(1, 2).reshape(1024, 256) @ x.t()

    with simulate("H100-80GB"):
        w, x, turn = (torch.empty(shape, device="cuda") for shape in ((256, 768), (1024, 256), (1024, 64)))
        half = [t.bfloat16() for t in (w, x, turn)]
        jitted = thunder.jit(attend, transforms=[MemEfficient(strict=True, chunk=False)])
        prediction = predict(jitted, *half)
    assert any(e.bsym.sym.is_fusion for e in prediction.timeline)
    assert last_plan(jitted).candidate.forward_peak_bytes == prediction.peak_bytes


def test_flash_attention_backward_has_its_scratch():
    with simulate("H100-80GB"):
        shape = (1, 4, 1000, 80)
        args = [torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
        prediction = predict(thunder.jit(F.scaled_dot_product_attention), *args)
    (event,) = [e for e in prediction.phase("backward").timeline if "sdpafx" in e.name]
    copies_bytes = 2 * args[0].nbytes  # of the output and its gradient, which the kernel reads as (B, T, H, D)
    assert event.scratch_bytes == 4 * 4 * 1024 * (96 + 1) + copies_bytes


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(torch.bfloat16)


@pytest.mark.slow
def test_a_step_holds_parameters_gradients_and_state():
    with simulate("H100-80GB"):
        with torch.device("cuda"):
            model, x = mlp(), torch.empty(8, 64, dtype=torch.bfloat16)
        y = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        prediction = predict_step(thunder.jit(model), optimizer, lambda out: F.mse_loss(out, y), x)
        assert optimizer.state == {} and all(p.grad is None for p in model.parameters())
    weights_bytes = sum(2 * n for n in (64 * 256, 256, 256 * 64, 64))
    assert prediction.held_bytes == 3 * weights_bytes + 8 * 64 * 2
    # all gradients are there, and the optimizer, one call for all parameters, makes as much again
    assert prediction.phase("optimizer").peak_bytes >= prediction.held_bytes + 2 * weights_bytes
    assert prediction.phases == ("forward", "loss", "backward", "optimizer")


def test_the_same_program_needs_the_same_on_a_simulated_gpu_and_on_a_cpu():
    def step(device):
        torch.manual_seed(0)
        with torch.device(device):
            model, x = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)), torch.ones(4, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        jitted = thunder.jit(model, executors=[])
        return predict_step(jitted, optimizer, lambda out: out.sum(), x)

    on_cpu = step("cpu")
    with simulate("H100-80GB"):
        on_cuda = step("cuda")
    assert (on_cuda.measured_bytes, on_cuda.held_bytes) == (on_cpu.measured_bytes, on_cpu.held_bytes)


OPTIONS = {"loss_fn": lambda out: out.float().mean(), "device": "T4"}


@pytest.mark.slow
def test_fits_and_its_headroom():
    answer = fits(mlp, torch.optim.AdamW, [(("B", 64), torch.bfloat16)], sizes={"B": 8}, **OPTIONS)
    assert answer and answer.headroom_bytes == answer.usable_bytes - answer.allocation.allocated_peak_bytes
    assert answer.allocation.library_bytes == answer.prediction.library_bytes > 0
    assert answer.allocation.allocated_peak_bytes == answer.prediction.peak_bytes + answer.allocation.library_bytes
    assert answer.allocation.fragmentation_bytes >= 0
    assert not fits(mlp, torch.optim.AdamW, [((10**9, 64), torch.bfloat16)], **OPTIONS)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    shapes = [(("B", 64), torch.bfloat16)]
    largest = largest_batch(mlp, torch.optim.AdamW, shapes, multiple=1000, limit=2**30, **OPTIONS)
    tried = dict(largest.tried)
    assert largest.fit and not largest.limited and largest.size % 1000 == 0
    assert tried[largest.size] <= largest.fit.usable_bytes < tried[largest.size + 1000]
    assert len(tried) <= 8


@pytest.mark.slow
def test_the_search_stops_at_its_limit_and_at_nothing():
    shapes = [(("B", "T", 64), torch.bfloat16)]
    limited = largest_sequence(mlp, None, shapes, sizes={"B": 1}, multiple=2, limit=9, device="T4")
    assert (limited.size, limited.limited) == (8, True)
    none = largest_sequence(mlp, None, shapes, sizes={"B": 10**9}, device="T4")
    assert (none.size, none.fit, bool(none.tried)) == (0, None, True)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fits(mlp, None, [("B", 64)]), "names 'B', but sizes has only"),
        (lambda: fits(mlp, None, [(1, 64)], targets=2), "targets=2, but the batch has 1"),
        (lambda: fits(mlp, None, [(1, 64)], targets=1), "there is none"),
        (lambda: fits(mlp, None, [(1, 64)], device="TPU"), "unknown device 'TPU'"),
        (lambda: largest_batch(mlp, None, [(1, 64)]), "no shape of the batch has the size 'B'"),
        (lambda: largest_batch(mlp, None, [("B", 64)], multiple=0), "no multiple of 0"),
    ],
)
def test_wrong_arguments_of_fits(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_that_cannot_be_traced_is_named_with_its_size():
    with pytest.raises(PredictionError, match="with B=1: the function cannot be traced"):
        largest_batch(lambda: nn.Linear(3, 3), None, [("B", 64)], device="T4")


def test_the_allocator_rounds_splits_merges_and_gives_back():
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    allocator = CachingAllocator()
    chunks = [allocator.take(300 * 1024) for _ in range(6)]
    assert allocator.reserved_bytes == 2 * MIB  # six small blocks share one segment
    for chunk in chunks:
        allocator.give_back(chunk)
    assert allocator.allocated_bytes == 0
    allocator.give_back(allocator.take(MIB))
    assert allocator.reserved_bytes == 2 * MIB  # the freed neighbours are one block again
    allocator.take(11 * MIB)
    assert allocator.reserved_bytes == (2 + 12) * MIB  # from 10 MiB a segment of its own
    tight = CachingAllocator(limit_bytes=30 * MIB)
    tight.give_back(tight.take(20 * MIB))
    tight.take(24 * MIB)
    assert tight.reserved_bytes == 24 * MIB  # the cached segment went back first


def test_rounding_counts_every_block():
    with simulate("H100-80GB", fusion=None):
        x = torch.empty(3, device="cuda")
        prediction = predict(thunder.jit(lambda x: (x + 1, x + 2, x * x)), x)
    assert prediction.measured_bytes + prediction.held_bytes == 4 * 12
    assert prediction.peak_bytes == allocate(prediction).allocated_peak_bytes == 4 * 512
    assert allocate(prediction).reserved_peak_bytes == 2 * MIB
