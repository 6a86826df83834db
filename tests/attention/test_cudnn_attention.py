"""cuDNN's attention for Hopper: who takes it, what it holds, and that PyTorch's cache of its plans is not misled."""

import json
from pathlib import Path

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import get_default_executors

from thunder_mem import MemEfficient, estimate, last_plan, predict, simulate
from thunder_mem.attention import by_cudnn, head_groups, kernels
from thunder_mem.attention.kernels import ATTENTION_KERNELS
from thunder_mem.costs.roofline import bound_symbol_flops, cost_s
from thunder_mem.executors import mem_cudnn_attention_ex, mem_pointwise_ex
from thunder_mem.fake_execution.operator_scratch import OPERATOR_SCRATCH
from thunder_mem.memory.device_models import DEVICE_MODELS
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.semantics.kernel_scratch import (
    CUDNN_FORWARD_BYTES,
    attention_copies_bytes,
    cudnn_backward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
    scratch_follows_layout,
)
from thunder_mem.semantics.layout import Layout
from thunder_mem.tiling.heads import with_head_groups

_aten = torch.ops.aten
RECORDED = json.loads(Path("benchmarks/results/gpu-h200.json").read_text())["found"]["attention"]["allocated"]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['shape']} {row['kernel']}")
def test_an_h200_asked_for_these_bytes(row):
    batch, heads, keys, rows, columns, size = map(int, row["shape"].split("x"))
    query, key = (batch, heads, rows, size), (batch, keys, columns, size)
    with simulate("H200-141GB"):
        forward = list(flash_forward_bytes(query, key))
    if row["kernel"] == "flash":
        assert row["forward"] == forward
        assert sum(row["backward"]) == flash_backward_bytes(query, key, 2)
    else:
        assert row["forward"] == [CUDNN_FORWARD_BYTES]
        assert row["backward"] == [cudnn_backward_bytes(query, key, 2)]


def lying(batch, heads, rows, size, layout, dtype=torch.float32, device="cpu"):
    """A tensor (B, H, T, D) of that layout in memory."""
    if layout == "BHTD":
        return torch.randn(batch, heads, rows, size, dtype=dtype).to(device)
    if layout == "BTHD":
        return torch.randn(batch, rows, heads, size, dtype=dtype).to(device).transpose(1, 2)
    if layout == "BHDT":
        return torch.randn(batch, heads, size, rows, dtype=dtype).to(device).transpose(2, 3)
    fused = torch.randn(batch, rows, 3 * heads * size, dtype=dtype).to(device)
    return fused[..., heads * size : 2 * heads * size].view(batch, rows, heads, size).transpose(1, 2)


@pytest.fixture
def plans(monkeypatch):
    """cuDNN's place is taken by the CPU's kernel; the layouts of output and gradient by PyTorch's key of a plan."""
    found = {}

    def forward(q, k, v, bias, log_sums, dropout, is_causal, debug, *, scale):
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        times = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return torch.empty_like(q).copy_(out), sums.contiguous()[..., None]

    def backward(
        grad, q, k, v, out, log_sums, seed, offset, bias, cum_q, cum_k, rows, columns, dropout, causal, *, scale
    ):
        assert log_sums.is_contiguous() and log_sums.shape == (*q.shape[:3], 1)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        key = (q.shape, k.shape, *(t.stride() for t in (q, k, v)), causal)
        found.setdefault(key, set()).add((out.stride(), grad.stride()))
        times = q.shape[1] // k.shape[1]
        wide = [t.repeat_interleave(times, 1) for t in (k, v)]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, *wide, out, log_sums[..., 0], 0.0, causal, scale=scale
        )
        dk, dv = (t.unflatten(1, (k.shape[1], times)).sum(2) for t in (dk, dv))
        return tuple(torch.empty_like(t).copy_(g) for t, g in zip((q, k, v), (dq, dk, dv), strict=True))

    class Stand:
        _scaled_dot_product_cudnn_attention = staticmethod(forward)
        _scaled_dot_product_cudnn_attention_backward = staticmethod(backward)

    monkeypatch.setattr(kernels, "_aten", Stand)
    return found


@pytest.mark.parametrize("sizes", [(2, 4, 16, 8), (1, 4, 16, 8), (2, 1, 16, 8), (1, 1, 16, 8)])
def test_a_plan_of_the_backward_is_found_by_one_layout_of_output_and_gradient_alone(plans, sizes):
    """A plan for other strides of the gradient than its own read the wrong memory on an H200."""
    torch.manual_seed(0)
    kernel = ATTENTION_KERNELS["cudnn"]
    batch, heads, rows, size = sizes
    eager_keys = set()
    for layout in ("BHTD", "BTHD", "fused", "BHDT"):
        q, k, v = (lying(*sizes, layout) for _ in range(3))
        eager_keys.add(q.stride())
        leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
        exact = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
        for of_grad in ("BHTD", "BTHD", "fused", "projected"):
            for groups in (0, 1, 2, 4)[: 2 + 2 * (heads > 1)]:
                grad = lying(*sizes, "BTHD" if of_grad == "projected" else of_grad)
                expected = torch.autograd.grad(exact, leaves, grad.double(), retain_graph=True)
                if groups == 0:
                    out, sums = kernel.forward(q, k, v, True, 0.3)
                    results = kernel.backward(grad, q, k, v, out, sums, True, 0.3)
                else:
                    how = True, 0.3, groups, "cudnn"
                    out, sums = head_groups._forward(q, k, v, *how)
                    given, weight = grad.transpose(1, 2), None
                    if of_grad == "projected":
                        given, weight = given.reshape(batch * rows, heads * size), torch.eye(heads * size)
                    results = head_groups._backward(given, q, k, v, out, sums, *how, weight, ())
                    out = out.transpose(1, 2)
                for ours, theirs in zip((out, *results), (exact, *expected), strict=True):
                    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert plans and all(len(layouts) == 1 for layouts in plans.values())
    assert not {key[2] for key in plans} & eager_keys  # whose plans are for eager's own layouts


def test_the_copy_for_the_key_is_one_query():
    q = lying(1, 4, 64, 16, "BHTD")
    copy = kernels._with_margin(q)
    assert torch.equal(copy, q) and copy.untyped_storage().nbytes() == q.nbytes + 64 * 104 * 4


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def attend_all(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).square().mean()


def compiled(fn=attend, *, first=(mem_cudnn_attention_ex,), **options):
    executors = [*first, *get_default_executors(), mem_pointwise_ex]
    return thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True, **options)])


def names_of(jitted, *args):
    predict(jitted, *args)
    return [
        b.sym.name
        for t in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted))
        for b in t[-1].bound_symbols
    ]


def on_gpu(size=64, dtype=torch.bfloat16, rows=256, layout="BHTD"):
    return [lying(2, 4, rows, size, layout, dtype, "cuda").requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_runs_attention_by_cudnn(dtype):
    with simulate("H100-80GB"):
        names = names_of(compiled(), *on_gpu(dtype=dtype))
    assert "mem_attention_cudnn_forward" in names and "mem_attention_cudnn_backward" in names


@pytest.mark.parametrize(
    ("device", "given"),
    [("A100-80GB", {}), ("B200-180GB", {}), ("H100-80GB", {"size": 256}), ("H100-80GB", {"size": 20})],
)
def test_other_devices_and_sizes_keep_the_flash_kernel(device, given):
    with simulate(device):
        names = names_of(compiled(), *on_gpu(**given))
    assert not any("cudnn" in name for name in names) and any("sdpafx" in name for name in names)


def test_what_eager_pytorch_would_not_run_by_cudnn_is_left():
    def masked(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()

    def dropped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).square().mean()

    with simulate("H100-80GB"):
        mask = torch.zeros(2, 4, 256, 256, dtype=torch.bfloat16, device="cuda")
        assert not any("cudnn" in name for name in names_of(compiled(masked), *on_gpu(), mask))
        assert not any("cudnn" in name for name in names_of(compiled(dropped), *on_gpu()))
        assert not any("cudnn" in name for name in names_of(compiled(), *on_gpu(dtype=torch.float32)))
        assert not any("cudnn" in name for name in names_of(compiled(first=()), *on_gpu()))
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            assert not any("cudnn" in name for name in names_of(compiled(), *on_gpu()))
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(True)
        try:
            assert not any("cudnn" in name for name in names_of(compiled(), *on_gpu()))
        finally:
            torch.use_deterministic_algorithms(False)


def test_pytorchs_own_switch_puts_cudnn_last(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    with simulate("H100-80GB"):
        assert not any("cudnn" in name for name in names_of(compiled(), *on_gpu()))


@pytest.mark.parametrize(("version", "asked"), [(None, False), (91500, False), (91900, True)])
def test_on_a_real_gpu_pytorch_is_asked_from_the_version_on_that_it_prefers(monkeypatch, version, asked):
    calls = []
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda *args: calls.append(args) or True)
    monkeypatch.setattr(by_cudnn, "simulated_device", lambda: None)
    monkeypatch.setattr(by_cudnn, "_fake", lambda mode, p: torch.empty(p.shape, device="meta"))
    with simulate("H100-80GB"):
        assert any("cudnn" in name for name in names_of(compiled(), *on_gpu())) is asked is bool(calls)


def test_one_key_is_not_for_cudnn():
    with simulate("H100-80GB"):
        q, k, v = on_gpu()
        device = torch.device("cuda")
        assert kernels.eager_prefers_cudnn(device, 64, 2) and not kernels.eager_prefers_cudnn(device, 64, 1)
        assert not any("cudnn" in name for name in names_of(compiled(attend_all), q, k[:, :, :1], v[:, :, :1]))


def test_its_time_is_cudnns():
    """By the shares of an H100's rate that an H200's reached, and with as many operations as the flash kernel's."""

    def attention(first):
        with simulate("H100-80GB"):
            jitted = compiled(first=first)
            predict(jitted, *on_gpu(rows=16384))
            traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
        return [b for t in traces for b in t.bound_symbols if "sdpafx" in b.sym.name or "cudnn" in b.sym.name]

    device = DEVICE_MODELS["H100-80GB"]
    for ours, flash, half in zip(attention((mem_cudnn_attention_ex,)), attention(()), (0, 1), strict=True):
        assert bound_symbol_flops(ours) == bound_symbol_flops(flash) > 1e11
        ratio = device.flash_shares[half] / device.cudnn_shares[half]
        assert cost_s(ours, device) == pytest.approx(cost_s(flash, device) * ratio, rel=0.02)


def test_on_a_cpu_the_executor_takes_nothing():
    q, k, v = (lying(1, 2, 8, 8, "BHTD").requires_grad_() for _ in range(3))
    jitted = compiled()
    jitted(q, k, v).backward()
    assert not any("cudnn" in b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols)


@pytest.mark.parametrize(("first", "kernel"), [((mem_cudnn_attention_ex,), "cudnn"), ((), "flash")])
def test_groups_of_heads_run_by_the_kernel_that_takes_them_whole(first, kernel):
    with simulate("H100-80GB"):
        trace = thunder.trace()(
            lambda *qkv: ltorch.scaled_dot_product_attention(*qkv, None, 0.0, True), *on_gpu(rows=16384)
        )
        grouped, (decision,) = with_head_groups(trace, (*first, *get_default_executors()))
    attention = next(b for b in grouped.bound_symbols if b.sym.name == "mem_attention_groups")
    assert head_groups.kernel_of(attention) == kernel and ("by cuDNN" in decision.how) == (kernel == "cudnn")


@pytest.mark.parametrize("layout", ["BHTD", "BTHD", "fused"])
@pytest.mark.parametrize("of_grad", ["BHTD", "BTHD"])
def test_the_plan_holds_at_least_what_is_predicted(layout, of_grad):
    """The kernel's copies, its own memory and its results; a fake kernel shows what the real one would be given."""
    kernel = ATTENTION_KERNELS["cudnn"]
    with simulate("H100-80GB"):
        q, k, v = on_gpu(layout=layout)
        out, sums = kernel.forward(q, k, v, True, None)
        grad = lying(2, 4, 256, 64, of_grad, torch.bfloat16, "cuda")
        with AllocationWatch(inside=OPERATOR_SCRATCH) as watch:
            found = kernel.backward(grad, q, k, v, out, sums, True, None)
        held_bytes = watch.peak_bytes - sum(t.nbytes for t in found)
        copies = sum(not t.transpose(1, 2).is_contiguous() for t in (out, grad))
        said = kernel.backward_bytes(q.shape, k.shape, 2) + copies * q.nbytes
        assert said == held_bytes


@pytest.mark.sampled(8)
@pytest.mark.parametrize("first", [(mem_cudnn_attention_ex,), ()])
@pytest.mark.parametrize("layout", ["BHTD", "BTHD", "fused", "BHDT"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("size", [64, 20])
def test_the_plan_peaks_where_the_prediction_does(first, layout, joined, size):
    """Results, copies and the kernel's own memory are those of how the operands lie."""

    def layer(qkv):
        if layout == "BHTD":
            q, k, v = qkv.view(3, 2, 4, 256, size).unbind(0)
        elif layout == "BTHD":
            q, k, v = (t.transpose(1, 2) for t in qkv.view(3, 2, 256, 4, size).unbind(0))
        elif layout == "BHDT":
            q, k, v = (t.transpose(2, 3) for t in qkv.view(3, 2, 4, size, 256).unbind(0))
        else:
            q, k, v = (
                t.reshape(2, 256, 4, size).transpose(1, 2) for t in qkv.view(2, 256, 12 * size).split(4 * size, -1)
            )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.transpose(1, 2).reshape(2, 256, 4 * size) if joined else out).float().square().mean()

    with simulate("H100-80GB"):
        jitted = compiled(layer, first=first, verify=True)
        qkv = torch.zeros(3 * 2 * 256 * 4 * size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        predicted = predict(jitted, qkv, keep_outputs=True)
    planned = last_plan(jitted).candidate
    peaks = [predicted.phase(half).peak_bytes for half in ("forward", "backward")]
    assert [planned.forward_peak_bytes, planned.backward_peak_bytes] == peaks


def test_eager_on_hopper_is_predicted_without_the_flash_kernels_parts():
    """A flash kernel with few blocks of rows keeps parts of its result in float32, many times the result."""

    def run(q, k, v):
        attend(q, k, v).backward()

    def peak(device):
        with simulate(device):
            return estimate(run, None, None, *on_gpu(rows=1024), device=device).prediction.peak_bytes

    parts_bytes = 2**20
    assert peak("A100-80GB") > peak("H100-80GB") + parts_bytes


def test_the_flash_kernels_parts_are_predicted_for_thunder_too():
    with simulate("A100-80GB"):
        args = on_gpu(rows=1024)
        jitted = thunder.jit(attend)
        predicted = predict(jitted, *args)
    assert predicted.peak_bytes > 3 * args[0].nbytes + sum(flash_forward_on("A100-80GB", args[0]))


def flash_forward_on(device, q):
    with simulate(device):
        return flash_forward_bytes(q.shape, q.shape)


def test_with_dropout_the_keys_are_not_divided():
    q = torch.empty(1, 4, 1024, 128, dtype=torch.bfloat16, device="meta")
    with simulate("H100-80GB"):
        op = _aten._scaled_dot_product_flash_attention.default
        assert OPERATOR_SCRATCH[op](q, q, q, 0.0) > 0 == OPERATOR_SCRATCH[op](q, q, q, 0.1)


@pytest.mark.parametrize("first", [(mem_cudnn_attention_ex,), ()])
def test_one_group_copies_a_gradient_that_does_not_lie_as_its_output(first):
    """Shared keys run in groups, and one group takes the whole gradient: here a sum over (B, H, T, D) made it."""
    with simulate("H100-80GB"), tracectx(TraceCtx()):
        q, k, v = on_gpu()
        given = [proxy(t) for t in (q, k, v)]
        out = TensorProxy(like=given[0], shape=(2, 256, 4, 64))
        kernel = "cudnn" if first else "flash"
        sums = TensorProxy(shape=(2, 4, 256), device=given[0].device, dtype=dtypes.float32, requires_grad=False)
        grad = TensorProxy(like=out)
        bsym = head_groups._backward_in_groups.bind(
            grad, *given, out, sums, True, None, 1, kernel, None, (), output=tuple(given)
        )
        dense, odd = (torch.empty(2, 256, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
        odd = odd.transpose(1, 2).contiguous().transpose(1, 2)
        names = [p.name for p in (*given, out, sums)]
        copies = [
            attention_copies_bytes(bsym, Layout.of({**dict.fromkeys(names, dense), grad.name: t})) for t in (dense, odd)
        ]
    assert copies == [0, q.nbytes] and scratch_follows_layout(bsym)


def proxy(t):
    return TensorProxy(
        shape=tuple(t.shape), device=Device("cuda:0"), dtype=dtypes.to_dtype(t.dtype), requires_grad=False
    )
