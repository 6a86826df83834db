"""The runtime model: operations and bytes by hand, rooflines, and the measured mode's cache."""

import warnings
from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import dtypes, prims
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch.utils.flop_counter import FlopCounterMode

from tests.programs.models import stack
from thunder_mem import MemEfficient, last_plan, predict, simulate
from thunder_mem.attention import head_groups
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.costs import measured as cost_measure
from thunder_mem.costs.plan_time import bound_symbol_seconds, overlapped_seconds, trace_seconds
from thunder_mem.costs.roofline import (
    bound_symbol_bytes,
    bound_symbol_flops,
    cost_s,
    extra_region_cost_s,
    is_free,
    region_cost_s,
)
from thunder_mem.memory.device_models import DEVICE_MODELS, DeviceModel, device_model
from thunder_mem.memory.device_specs import DEVICES
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.trace.reading import read_trace

TOY = DeviceModel("toy", 0, 1e3, {"float32": 1e6, "bfloat16": 1e7}, vector_flops=1e4, launch_s=0.5)


def traces(fn, *args, executors=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitted = thunder.jit(fn, executors=executors or [])
        out = jitted(*args)
        backward = thunder.last_backward_traces(jitted) if out.requires_grad else []
    return thunder.last_traces(jitted)[-1], backward[-1] if backward else None


def only(trace, name):
    (found,) = (b for b in trace.bound_symbols if name in b.sym.name)
    return found


def t(*shape, dtype=torch.float32, grad=False):
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize(
    "fn, args, name, flops, nbytes",
    [
        (torch.matmul, (t(3, 4, 5), t(5, 6)), "matmul", 2 * 3 * 4 * 5 * 6, 4 * (60 + 30 + 72)),
        (torch.matmul, (t(5), t(5)), "matmul", 2 * 5, 4 * (5 + 5 + 1)),
        (F.linear, (t(7, 5), t(6, 5), t(6)), "linear", 2 * 7 * 5 * 6, 4 * (35 + 30 + 6 + 42)),
        (torch.conv2d, (t(2, 4, 9, 9), t(6, 2, 3, 3), None, 1, 0, 1, 2), "conv", 2 * 2 * 6 * 49 * 2 * 9, None),
        (lambda x: x.sum(1), (t(3, 4),), "sum", 12, 4 * (12 + 3)),
        (lambda x: x.sin(), (t(3, 4, dtype=torch.bfloat16),), "sin", 12, 2 * 24),
        (lambda x: x * x, (t(3, 4),), "mul", 12, 4 * 24),
        (lambda i, w: F.embedding(i, w), (torch.zeros(5, dtype=torch.long), t(1000, 4)), "embedding", 0, 40 + 2 * 80),
        (lambda x: torch.cat([x, x]), (t(3, 4),), "cat", 0, 4 * (12 + 24)),
    ],
)
def test_operations_and_bytes(fn, args, name, flops, nbytes):
    bsym = only(traces(fn, *args)[0], name)
    assert bound_symbol_flops(bsym) == flops
    if nbytes is not None:
        assert bound_symbol_bytes(bsym) == nbytes


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[1:],
        lambda x: x.expand(2, 3, 4),
        lambda x: x.unsqueeze(0),
        lambda x: x.reshape(12),
        lambda x: x.to(torch.float32).permute(1, 0),
    ],
)
def test_views_and_bookkeeping_are_free(fn):
    trace, _ = traces(fn, t(3, 4))
    assert all(is_free(b) and cost_s(b, TOY) == 0 for b in trace.bound_symbols)
    assert sum(cost_s(b, TOY) for b in traces(lambda x: fn(x) + 1, t(3, 4))[0].bound_symbols) > 0


def test_a_cast_to_another_dtype_moves_both():
    bsym = only(traces(lambda x: x.to(torch.bfloat16), t(3, 4))[0], "to")
    assert bound_symbol_bytes(bsym) == 12 * 4 + 12 * 2


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    q, k = t(2, 3, 8, 4, grad=True), t(2, 3, 6, 4)

    def attend(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal)

    forward, backward = traces(attend, q, k, executors=[mem_attention_ex])
    products = 2 * (2 * 3) * 8 * 6 * 4
    share = 2 if causal else 1
    assert bound_symbol_flops(only(forward, "mem_attention_forward")) == 2 * products // share
    assert bound_symbol_flops(only(backward, "mem_attention_backward")) == 5 * products // share


def test_flash_attention_has_a_rate_of_its_own_and_the_product_inside_has_not():
    rate = TOY.matmul_flops("float32")
    device = replace(TOY, flash_shares=(0.5, 0.25), launch_s=0.0, bandwidth_bytes_per_s=1e30)
    trace = TraceCtx(None)
    with tracectx(trace):
        q, weight, grad = (
            TensorProxy(shape=shape, device=Device("cuda:0"), dtype=dtypes.float32)
            for shape in ((2, 3, 8, 4), (5, 12), (16, 5))
        )
        out, log_sums = head_groups._forward_in_groups(q, q, q, False, None, 1, "flash")
        head_groups._backward_in_groups(grad, q, q, q, out, log_sums, False, None, 1, "flash", weight, ())
        prims.matmul(grad, weight)
    forward, backward, product = trace.bound_symbols
    products, projection = 2 * (2 * 3) * 8 * 8 * 4, 2 * 16 * 5 * 12
    assert cost_s(forward, device) == pytest.approx(2 * products / 0.5 / rate)
    assert cost_s(backward, device) == pytest.approx((5 * products / 0.25 + projection) / rate)
    assert cost_s(product, device) == pytest.approx(projection / rate)
    flash = DEVICE_MODELS["H200-141GB"].flash_shares
    assert flash == DEVICE_MODELS["H100-80GB"].flash_shares and max(flash) < 0.5


@pytest.mark.parametrize("shares", [(0.0, 1.0), (1.0, -0.5)])
def test_a_flash_share_is_positive(shares):
    with pytest.raises(ValueError, match="rates must be positive"):
        replace(TOY, flash_shares=shares)


def test_gpu_attention_symbols():
    from thunder.executors.sdpaex import sdpea_gradfwd, sdpfa_gradfwd

    with tracectx(TraceCtx(None)):
        q = TensorProxy("q", shape=(2, 3, 64, 16), device=Device("cuda:0"), dtype=dtypes.bfloat16)
        for symbol, args in ((sdpea_gradfwd, (q, q, q, None, 0.0, True)), (sdpfa_gradfwd, (q, q, q, 0.0, True))):
            bsym = symbol.bind(*args, output=q)
            assert bound_symbol_flops(bsym) == 4 * 2 * 3 * 64 * 64 * 16 // 2


def test_a_step_agrees_with_torch_counter():
    """Products of a whole step, forward and backward, against torch's own counter on eager."""

    def step(x, w, v):
        return F.linear(torch.tanh(F.linear(x, w)), v).sum()

    args = t(8, 16, grad=True), t(32, 16, grad=True), t(4, 32, grad=True)
    with FlopCounterMode(display=False) as counter:
        step(*args).backward()
    counted = sum(
        bound_symbol_flops(b) for trace in traces(step, *args) for b in trace.bound_symbols if b.sym.name in PRODUCTS
    )
    assert counted == counter.get_total_flops()


def test_convolutions_and_their_gradients_agree_with_torch_counter():
    """The argument's gradient has a kernel of its own, which reads no argument."""

    def step(x, w, v):
        return F.conv2d(F.conv2d(x, w), v).sin().sum()

    args = t(2, 4, 9, 8, grad=True), t(6, 4, 3, 2, grad=True), t(2, 6, 1, 1, grad=True)
    with FlopCounterMode(display=False) as counter:
        step(*args).backward()
    made = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=False)])
    made(*args)
    both = thunder.last_traces(made)[-1], thunder.last_backward_traces(made)[-1]
    found = [b for trace in both for b in trace.bound_symbols if "conv" in b.sym.name]
    assert any("weight_backward" in b.sym.name for b in found)
    assert sum(map(bound_symbol_flops, found)) == counter.get_total_flops()


PRODUCTS = ("matmul", "linear")


def test_roofline_takes_the_larger_and_one_launch():
    product = only(traces(torch.matmul, t(100, 100), t(100, 100))[0], "matmul")
    assert cost_s(product, TOY) == pytest.approx(120_000 / 1e3 + 0.5)
    fast = DeviceModel("fast memory", 0, 1e9, {"float32": 1e6}, 1e4, 0.5)
    assert cost_s(product, fast) == pytest.approx(2e6 / 1e6 + 0.5)
    assert DeviceModel("x", 0, 1, {}, 7.0).matmul_flops("float32") == 7.0


def test_a_region_pays_its_edges_and_a_recompute_in_it_its_reads():
    def fn(x, y):
        return (x.sin() * y).exp() + 1

    x, y = t(1000), t(1000)
    wide = DeviceModel("wide", 0, 1e3, {}, 1e9, 0.5)
    unfused = [b for b in traces(fn, x, y)[0].bound_symbols if not is_free(b)]
    fused = next(b for b in traces(fn, x, y, executors=[mem_pointwise_ex])[0].bound_symbols if b.sym.is_fusion)
    edges = 4000 * 3 / 1e3
    assert cost_s(fused, wide) == pytest.approx(edges + 0.5)
    assert region_cost_s(unfused, fused.flat_proxy_args, fused.flat_proxy_outs, wide) == pytest.approx(edges + 0.5)
    assert sum(cost_s(b, wide) for b in unfused) == pytest.approx(4000 * 9 / 1e3 + 4 * 0.5)
    assert extra_region_cost_s(unfused[:1], unfused[0].flat_proxy_args, wide) == pytest.approx(4)
    assert extra_region_cost_s(unfused[:1], [], wide) == pytest.approx(1000 / 1e9)
    assert region_cost_s([], [], [], wide) == 0


def test_an_unclaimed_composite_costs_its_parts():
    trace = thunder.trace()(lambda x: thunder.torch.softmax(x, -1), t(10, 10))
    composite = only(trace, "softmax")
    assert composite.sym.executor is None
    assert cost_s(composite, TOY) == pytest.approx(sum(cost_s(b, TOY) for b in composite.subsymbols))
    assert cost_s(composite, TOY) > 2 * TOY.launch_s


def test_views_in_a_region_move_nothing():
    def fn(x):
        y = x.sin()
        return y, y.reshape(-1, 10), x.reshape(-1, 1) + 1

    (fused,) = (b for b in traces_of(fn, t(20, 50)) if b.sym.is_fusion)
    assert bound_symbol_bytes(fused) == 4000 * 3  # x, its sine and the sum


def traces_of(fn, x):
    jitted = thunder.jit(fn, executors=[mem_pointwise_ex])
    jitted(x)
    return thunder.last_traces(jitted)[-1].bound_symbols


def test_a_composite_that_a_kernel_will_run_is_one_kernel():
    x = t(1000, dtype=torch.bfloat16)
    trace = thunder.trace()(lambda x: thunder.torch.add(x, x), x)
    parts_s = sum(bound_symbol_seconds(b, TOY) for b in trace.bound_symbols)
    assert trace_seconds(trace, TOY) == pytest.approx(0.5 + 4000 / 1e3)
    assert parts_s > 2 * trace_seconds(trace, TOY)  # bfloat16 to float32 and back


def test_the_host_starts_kernels_ahead_of_a_gpu():
    gpu = DeviceModel("gpu", 0, 1e3, {}, 1e9, 0.5)
    large, small = t(1000), t(10)

    def seconds(fn, *args):
        trace = thunder.trace()(fn, *args)
        return overlapped_seconds(read_trace(trace), gpu), trace_seconds(trace, gpu)

    assert seconds(lambda x: thunder.torch.sin(thunder.torch.sin(x)), large) == pytest.approx((0.5 + 16, 1 + 16))
    ahead, serial = seconds(lambda x: thunder.torch.sin(thunder.torch.sin(x)), small)  # .08 s each, less than a launch
    assert (ahead, serial) == pytest.approx((1 + 0.08, 1 + 0.16))
    cpu = DEVICE_MODELS["cpu"]
    trace = thunder.trace()(lambda x: thunder.torch.sin(x), large)
    assert overlapped_seconds(read_trace(trace), cpu) == trace_seconds(trace, cpu)


def test_device_table():
    assert device_model("a100-40gb").memory_bytes == DEVICES["A100-40GB"].memory_bytes
    assert set(DEVICE_MODELS) == {"cpu", *DEVICES}
    for model in DEVICE_MODELS.values():
        assert model.matmul_flops("bfloat16") >= model.matmul_flops("float64") * 0.5
    with pytest.raises(ValueError, match=r"'Z80'.*H100-80GB"):
        device_model("Z80")
    with pytest.raises(ValueError, match="rates must be positive"):
        DeviceModel("broken", 0, 0.0, {}, 1.0)


def test_measured_times_are_cached_by_content(tmp_path, monkeypatch):
    times = iter([0.25, 0.5])
    monkeypatch.setattr(cost_measure, "_time", lambda fn, args: next(times))
    cache = cost_measure.MeasuredCosts(tmp_path / "times.json")
    two, other = (only(traces(torch.matmul, t(*s), t(*s))[0], "matmul") for s in ((8, 8), (16, 16)))
    again = only(traces(lambda a, b: torch.matmul(a, b), t(8, 8), t(8, 8))[0], "matmul")
    assert [cache.cost_s(b) for b in (two, other, again)] == [0.25, 0.5, 0.25]
    assert cost_measure.MeasuredCosts(tmp_path / "times.json").cost_s(again) == 0.25
    assert cache.cost_s(next(b for b in traces(lambda x: x[1:], t(3))[0].bound_symbols if b.flat_proxy_outs)) == 0


def test_a_measurement_runs_the_operation(tmp_path):
    seen = []
    cache = cost_measure.MeasuredCosts(tmp_path / "times.json", timer=lambda fn, args: seen.append(fn(*args)) or 1.0)
    bsym = only(traces(torch.matmul, t(8, 4), t(4, 2))[0], "matmul")
    assert cache.cost_s(bsym) == 1.0
    assert seen[0].shape == (8, 2)


@pytest.mark.parametrize("content", ["not json", "[]", '{"version": 1, "seconds": {"k": "x"}}', '{"version": 9}'])
def test_a_broken_cache_file_is_named(tmp_path, content):
    file = tmp_path / "times.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"times\.json"):
        cost_measure.MeasuredCosts(file)


def bought(x, **options):
    """What a budget costs, and a number drawn after it was planned."""
    option = MemEfficient(budget=4 * 2**20, strict=True, **options)
    jitted = thunder.jit(stack(), executors=[], transforms=[option])
    thunder.compile_data(jitted).get_computation_and_inputs(x)
    return last_plan(jitted).budget, torch.rand(()).item()


@pytest.mark.slow
def test_a_budget_by_measured_times(monkeypatch):
    x, asked = torch.zeros(2048, 64), []

    def timer(fn, args):
        torch.rand(3)
        return asked.append(fn(*args)) or 0.25

    monkeypatch.setattr(cost_measure, "_load", lambda path: seconds)
    monkeypatch.setattr(cost_measure, "_save", lambda path, seconds: None)
    monkeypatch.setattr(cost_measure, "_time", timer)
    seconds = {}
    measured, drawn = bought(x, costs="measured")
    assert asked and measured.recompute_ms > 0 and measured.recompute_ms % 250 == 0
    modelled, drawn_without = bought(x)
    assert modelled.recompute_ms < 250 and drawn == drawn_without
    count = len(asked)
    assert count == len(seconds) and bought(x, costs="measured")[0] == measured and len(asked) == count


@pytest.mark.slow
def test_where_nothing_can_be_measured(monkeypatch):
    def fails(fn, args):
        raise RuntimeError("no such device")

    with pytest.raises(ValueError, match="costs is 'roofline' or 'measured', not 'guess'"):
        MemEfficient(costs="guess")
    assert "costs='measured'" in repr(MemEfficient(costs="measured"))
    with simulate("T4"):
        with torch.device("cuda"):
            model, x = stack(), torch.zeros(64, 64)
        with pytest.raises(cost_measure.MeasuringError, match="here tensors are fake"):
            predict(thunder.jit(model, transforms=[MemEfficient(costs="measured")]), x)
    monkeypatch.setattr(cost_measure, "_load", lambda path: {})
    monkeypatch.setattr(cost_measure, "_time", fails)
    with pytest.raises(cost_measure.MeasuringError, match=r"cannot be measured: RuntimeError: no such device"):
        bought(torch.zeros(2048, 64), costs="measured")
    monkeypatch.setattr(cost_measure.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(cost_measure.distributed, "get_world_size", lambda: 4)
    with pytest.raises(cost_measure.MeasuringError, match="each of the 4 ranks other times"):
        cost_measure.check_measurable()
