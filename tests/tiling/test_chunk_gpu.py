"""Chunk loops as a GPU wants them: few calls, gradients over their logits, and no wait for the device."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loop_calls import row_of
from tests.programs.chunk_cases import CASES, loss_and_grads, prepare
from thunder_mem import ChunkLossHead, MemEfficient, predict, simulate
from thunder_mem.chunk_loop.gradient_sums import _is_known_to_be_one
from thunder_mem.chunk_loop.matmul import adds_to_float32
from thunder_mem.chunk_loop.price import HOST_SHARE, device_seconds, host_calls, loop_seconds
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.memory.device_models import device_model
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.tiling import build

H100 = device_model("H100-80GB")
MIB = 2**20


def head(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def with_bias(x, w, t, b):
    """As BERT has it: tokens of several sequences."""
    logits = F.linear(x.reshape(2, -1, x.shape[-1]), w, b)
    return F.cross_entropy(logits.reshape(-1, w.shape[0]), t)


def loop_on_gpu(n, d, v, executors, fn=head, dtype=torch.bfloat16, **asked):
    """The only chunk loop of a head of these sizes on a simulated H100, and the prediction of a step."""
    with simulate("H100-80GB"):
        x, w, b = (
            torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=True) for shape in ((n, d), (v, d), (v,))
        )
        inputs = (x, w, torch.zeros(n, dtype=torch.long, device="cuda"), *([b] if fn is with_bias else []))
        chunk = ChunkLossHead(**asked) if asked else True
        jitted = thunder.jit(fn, executors=executors, transforms=[MemEfficient(chunk=chunk, strict=True)])
        prediction = predict(jitted, *inputs)
        (loop,) = {loop_of(b) for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)}
    return loop, prediction


# --- rows ---------------------------------------------------------------------------------------------


@pytest.fixture
def unwritten(monkeypatch):
    """Kernels of regions are not written, which takes half a second each: every one is two kernels."""
    figures = KernelFigures(2, 0, 0)
    monkeypatch.setattr("thunder_mem.regions.region_kernels._recalled", lambda *args: figures)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "n, d, v", [(16384, 4096, 32000), (16384, 768, 50304), (16384, 768, 30522), (8192, 2304, 256000)]
)
def test_the_host_takes_a_twentieth_of_the_devices_time_at_most(n, d, v, unwritten):
    loop, prediction = loop_on_gpu(n, d, v, [mem_pointwise_ex])
    plan = loop.plan
    row, calls = row_of("a head", plan), host_calls(plan, backward=True)
    assert plan.block_rows >= 512
    assert calls * H100.launch_s <= HOST_SHARE * device_seconds(plan, H100, backward=True)
    assert row.calls == calls and 0 < row.host_share <= HOST_SHARE
    assert (row.rows, row.depth, row.width) == (n, d, v)
    assert loop_seconds(plan, H100, backward=True) > device_seconds(plan, H100, backward=True)
    assert next(e.launches for e in prediction.timeline if e.name.endswith("with_grads")) == calls


def test_a_block_has_512_rows_or_temporaries_of_32_mib(unwritten):
    """Unfused, a row's temporaries are several times its logits."""
    narrow, _ = loop_on_gpu(16384, 64, 1024, [])
    assert narrow.plan.block_rows >= 512
    wide, _ = loop_on_gpu(16384, 16384, 128256, [])
    assert wide.plan.block_rows < 512
    assert 32 * MIB <= wide.plan.backward_block_bytes <= wide.plan.logits_bytes // 2 + 2 * MIB


def test_rows_that_were_asked_for_stay(unwritten):
    loop, _ = loop_on_gpu(16384, 768, 30522, [mem_pointwise_ex], rows=300)
    assert loop.plan.chunk_rows == loop.plan.block_rows == 300


def wide_before(x, w, t):
    """The program's peak has room for many rows of logits: a softmax over tokens stays outside of the loop."""
    wide = torch.softmax(x.repeat(1, 64), 0).cos().sin()
    return head(wide.reshape(*x.shape, 64).sum(-1), w, t)


def test_chunks_grow_to_the_rows_that_save_time_and_no_further(unwritten):
    loop, prediction = loop_on_gpu(16384, 512, 32000, [], fn=wide_before)
    during_bytes = next(e.live_bytes for e in prediction.timeline if e.name.endswith("with_grads"))
    assert prediction.peak_bytes - during_bytes > 3 * loop.plan.logits_bytes
    assert (loop.plan.chunk_rows, loop.plan.sized) == (4096, "timeline")


# --- gradients over logits ----------------------------------------------------------------------------


def test_nothing_else_of_the_logits_size_exists(unwritten):
    loop, prediction = loop_on_gpu(16384, 4096, 32000, [mem_pointwise_ex])
    assert all(body.over == (0,) for body in loop.backward.values())
    scratch_bytes = max(e.scratch_bytes for e in prediction.timeline)
    assert loop.plan.logits_bytes <= scratch_bytes < 1.001 * loop.plan.logits_bytes


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """CPU tensors take the way of CUDA's, and regions run one operation at a time, with their writes."""
    monkeypatch.setattr(build, "_on_gpu", lambda region: True)
    monkeypatch.setattr("thunder_mem.regions.compiled_region._compile", lambda unfused, args: unfused)


# Whose gradients are written over the logits in ways of their own; test_chunk_losses has all on the CPU's way.
QUICK = {
    *("ce_mean", "ce_none", "ce_bias", "ce_softcap", "ce_z_loss", "ce_class_weights", "ce_smoothing_weights"),
    *("frozen_w", "tied", "two_heads", "multi_token", "kl_and_ce", "jsd", "dpo", "ppo", "scaled_outside"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in CASES],
)
def test_gradients_that_overwrite_their_logits_are_right(case, as_on_a_gpu):
    transform = ChunkLossHead(chunks=3)
    compiled = thunder.jit(case.fn, executors=[mem_pointwise_ex], transforms=[transform])
    got = loss_and_grads(compiled, prepare(case, torch.float32), case.grads)
    want = loss_and_grads(case.fn, prepare(case, torch.float64), case.grads)
    assert len(transform.record.loops) == case.loops
    for mine, exact in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2e-5, atol=1e-6)


def test_a_bias_leaves_nothing_but_the_logits(unwritten):
    """Its gradient is the sum of what goes over the logits; a cast there and back was a copy of that."""
    loop, _ = loop_on_gpu(16384, 768, 30522, [mem_pointwise_ex], fn=with_bias)
    assert all(body.over == (0,) for body in loop.backward.values())
    assert loop.plan.backward_block_bytes < loop.plan.logits_bytes // 100


def reshaped(x, w, t):
    """As nanoGPT has it: one row for each token, after the product."""
    logits = F.linear(x.reshape(4, -1, x.shape[-1]), w)
    return F.cross_entropy(logits.view(-1, w.shape[0]), t, ignore_index=-1)


def test_reshaped_logits_leave_nothing_but_the_logits(unwritten):
    """The target's gather reads the reshaped logits, which no region may keep beside values computed from them."""
    loop, _ = loop_on_gpu(16384, 768, 30522, [mem_pointwise_ex], fn=reshaped, dtype=torch.float32)
    assert all(body.over == (0,) for body in loop.backward.values())
    assert loop.plan.backward_block_bytes < loop.plan.logits_bytes // 100


# --- no wait for the device -----------------------------------------------------------------------------


class NoNumbers(TorchDispatchMode):
    """Refuses to read a number from a tensor, for which the host would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", ["float32", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_loop_reads_a_number(dtype, accumulate, monkeypatch):
    """As on a GPU. On a CPU the tangent is read once, after the loop."""
    monkeypatch.setattr("thunder_mem.chunk_loop.gradient_sums._is_known_to_be_one", lambda scale: False)
    x, w = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((96, 16), (400, 16)))
    t = torch.zeros(96, dtype=torch.long)
    compiled = thunder.jit(head, executors=[], transforms=[ChunkLossHead(rows=32, accumulate=accumulate)])
    compiled(x, w, t)
    with NoNumbers():
        compiled(x, w, t).backward()


def test_a_tangent_on_a_gpu_is_not_read():
    with simulate("H100-80GB"):
        tangent = torch.ones((), device="cuda")
    with NoNumbers():
        assert not _is_known_to_be_one(tangent)
        assert not _is_known_to_be_one(FakeTensorMode().from_tensor(torch.ones(())))
    assert _is_known_to_be_one(torch.ones(())) and not _is_known_to_be_one(torch.tensor(2.0))


def test_the_device_is_asked_what_it_adds_up_before_a_loop_runs(monkeypatch):
    asked = []
    monkeypatch.setattr("thunder_mem.chunk_loop.run.adds_to_float32", lambda *key: asked.append(key))
    monkeypatch.setattr("thunder_mem.chunk_loop.run.run", None)
    with simulate("H100-80GB"):
        x, w = (torch.empty(4096, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2))
        t = torch.zeros(4096, dtype=torch.long, device="cuda")
        jitted = thunder.jit(head, executors=[], transforms=[ChunkLossHead(chunks=4)])
        thunder.compile_data(jitted).get_computation_and_inputs(x, w, t)
    assert set(asked) == {("cuda", torch.bfloat16)}
    assert not adds_to_float32("cpu", torch.float16)
