"""Chunked losses under autograd's own rules, in modules and under autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, head, inputs, relative
from thunder_mem.runtime.measure import measure_peak


@pytest.mark.parametrize("tangent", [1.0, 2.0], ids=["one", "two"])
def test_only_a_tangent_that_is_not_one_is_multiplied_and_never_into_kept_gradients(tangent):
    x, w, t = inputs(64, 8, 32, torch.float32)
    fn, _ = chunked(head, chunks=4)
    loss = fn(x, w, t)
    scale = torch.tensor(tangent)
    kept = torch.autograd.grad(loss, (x, w), scale, retain_graph=True)
    copies = [g.clone() for g in kept]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = torch.autograd.grad(loss, (x, w), scale)
    assert ("aten::mul_" in {e.key for e in profile.key_averages()}) == (tangent != 1)
    for a, b, before, want in zip(found, kept, copies, exact(head, x, w, t)[1][:2], strict=True):
        assert torch.equal(b, before) and torch.equal(a, b) and a.data_ptr() != b.data_ptr()
        assert relative(a, tangent * want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retain_graph_twice_leaves_the_first_gradients_alone(dtype):
    x, w, t = inputs(64, 64, 700, dtype)  # large enough for the accumulator to have two parts
    fn, _ = chunked(head)
    loss = fn(x, w, t)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(2.0, dtype=dtype), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, w), torch.tensor(-1.0, dtype=dtype))
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c * -2)
        assert a.untyped_storage().data_ptr() != c.untyped_storage().data_ptr()


def test_grad_is_accumulated_over_steps():
    x, w, t = inputs(64, 64, 700, torch.bfloat16)
    fn, _ = chunked(head)
    fn(x, w, t).backward()
    once = w.grad.clone()
    fn(x, w, t).backward()
    torch.testing.assert_close(w.grad, once * 2)


def test_backward_twice_without_retaining_raises():
    x, w, t = inputs()
    loss = chunked(head)[0](x, w, t)
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_double_backward_raises():
    x, w, t = inputs()
    loss = chunked(head)[0](x, w, t)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        dx.sum().backward()


def beside_accuracy(x, w, t):
    logits = F.linear(x, w)
    with torch.no_grad():
        right = (logits.argmax(-1) == t).to(x.dtype).mean()
    return F.cross_entropy(logits, t), right


def scaled_under_no_grad(x, w, t):
    logits = F.linear(x, w)
    with torch.no_grad():
        scale = logits.square().sum().rsqrt()
    return F.cross_entropy(logits, t) * scale + F.linear(x * scale, w[:2]).sum(), scale


@pytest.mark.parametrize("fn", [beside_accuracy, scaled_under_no_grad])
def test_a_result_under_no_grad_leaves_the_losss_gradients(fn):
    """Thunder takes an operation for a constant if any of its results is detached."""
    x, w, t = inputs(64, 64, 300)
    jitted, transform = chunked(fn)
    loss, _ = jitted(x, w, t)
    assert transform.record.loops[0].grads
    value, gradients = exact(lambda *args: fn(*args)[0], x, w, t)
    assert relative(loss, value) < 1e-5
    for got, want in zip(torch.autograd.grad(loss, (x, w)), gradients, strict=True):
        assert relative(got, want) < 1e-5


def test_no_grad_does_no_gradient_work():
    x, w, t = inputs(256, 16, 1024)
    fn, transform = chunked(head, chunks=8)
    with torch.no_grad():
        loss = fn(x, w, t)
        peak = measure_peak(fn, x, w, t)
    assert transform.record.loops[0].mode == "forward"
    assert transform.record.loops[0].grads == ()
    assert peak < 256 * 1024 * 4 / 4
    torch.testing.assert_close(loss.double(), exact(head, x, w, t)[0])


def test_autocast_with_float32_weights():
    x, w, t = inputs(64, 32, 500)
    fn, transform = chunked(head)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fn(x, w, t)
        ref = head(x, w, t)
    dx, dw = torch.autograd.grad(loss, (x, w))
    ex, ew = torch.autograd.grad(ref, (x, w))
    assert transform.record.loops
    assert dw.dtype == torch.float32
    assert relative(loss, ref.double()) < 1e-2
    assert relative(dx, ex.double()) < 2e-2 and relative(dw, ew.double()) < 2e-2


def test_a_module_trains_like_its_eager_copy():
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(97, 12)
            self.norm = torch.nn.LayerNorm(12)
            self.head = torch.nn.Linear(12, 97, bias=True)

        def forward(self, i, t):
            return F.cross_entropy(self.head(self.norm(torch.tanh(self.embed(i)))).flatten(0, 1), t.flatten())

    torch.manual_seed(0)
    model = Tiny()
    twin = copy.deepcopy(model)
    i, t = torch.randint(0, 97, (2, 5, 7))
    compiled, transform = chunked(model)
    for _ in range(3):
        for m, step in ((model, compiled), (twin, twin)):
            m.zero_grad()
            step(i, t).backward()
            torch.optim.SGD(m.parameters(), 0.5).step()
    assert transform.record.loops
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
