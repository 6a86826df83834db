"""Attention by the CPU's flash kernel against a float64 reference, and what is left to Thunder."""

import pytest
import thunder
import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import get_executor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from thunder_mem.attention import on_cpu
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.semantics.layout import Layout


def attend(q, k, v, mask=None, is_causal=False, scale=None):
    return sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def make(t=5, s=7, b=2, h=3, d=8, dtype=torch.float32):
    shapes = [(b, h, t, d), (b, h, s, d), (b, h, s, d)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def claimed(jitted):
    return "mem_attention_forward" in str(thunder.last_traces(jitted)[-1])


def exact(args, **kwargs):
    """Output and gradients in float64, by the definition."""
    args = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    with sdpa_kernel(SDPBackend.MATH):
        return args, attend(*args, **kwargs)


def assert_close_to_exact(args, executors=(mem_attention_ex,), **kwargs):
    jitted = thunder.jit(attend, executors=list(executors))
    out = jitted(*args, **kwargs)
    assert claimed(jitted)
    exact_args, exact_out = exact(args, **kwargs)
    weight = torch.randn_like(exact_out)
    leaves, exact_leaves = ([a for a in many if a.requires_grad] for many in (args, exact_args))
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    exact_grads = torch.autograd.grad((exact_out * weight).sum(), exact_leaves)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[out.dtype]
    for a, e in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert a.dtype == out.dtype or a.shape == args[-1].shape
        torch.testing.assert_close(a.double(), e, atol=tolerance, rtol=tolerance)
    return jitted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_forward_and_backward_equal_the_definition(dtype, kwargs):
    assert_close_to_exact(make(dtype=dtype), **kwargs)


@pytest.mark.parametrize(("t", "s"), [(1, 1), (9, 4), (4, 9), (70, 70)])
def test_causal_with_lengths_that_differ(t, s):
    assert_close_to_exact(make(t=t, s=s), is_causal=True)


MASKS = {
    "bool": lambda: torch.rand(5, 7) > 0.3,
    "bool per head": lambda: torch.rand(1, 3, 5, 7) > 0.3,
    "additive": lambda: torch.randn(5, 7),
    "one row": lambda: torch.randn(1, 7),
    "1-d": lambda: torch.randn(7),
    "3-d": lambda: torch.randn(3, 5, 7),
    "per batch": lambda: torch.randn(2, 1, 5, 7),
    "full": lambda: torch.randn(2, 3, 5, 7),
    "transposed": lambda: torch.randn(7, 5).t(),
    "expanded": lambda: torch.randn(1, 1, 1, 7).expand(2, 3, 5, 7),
    "learned": lambda: torch.randn(3, 5, 7, requires_grad=True),
    "learned, one row": lambda: torch.randn(7, requires_grad=True),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    jitted = assert_close_to_exact([*make(), MASKS[name]()])
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert ("mem_attention_mask_grad" in backward) == name.startswith("learned")


def test_a_mask_in_half_precision_with_regions_around():
    assert_close_to_exact(
        [*make(dtype=torch.bfloat16), torch.rand(5, 7) > 0.3], executors=(mem_attention_ex, mem_pointwise_ex)
    )


def test_a_learned_mask_that_hides_a_whole_row_gets_finite_gradients():
    mask = torch.randn(5, 7)
    mask[2] = -float("inf")
    q, k, v = make()
    mask.requires_grad_()
    jitted = thunder.jit(attend, executors=[mem_attention_ex])
    out = jitted(q, k, v, mask)
    exact_args, exact_out = exact([q, k, v, mask])
    torch.testing.assert_close(out.double(), exact_out, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(out.sin().sum(), mask)
    assert grad.isfinite().all() and not grad[2].any()
    (exact_grad,) = torch.autograd.grad(exact_out.sin().sum(), exact_args[3])
    rows = [0, 1, 3, 4]
    torch.testing.assert_close(grad[rows].double(), exact_grad[rows], atol=1e-5, rtol=1e-5)


LAYOUTS = {
    "heads inside": lambda *s: torch.randn(s[0], s[2], s[1], s[3]).transpose(1, 2),
    "last dim not dense": lambda *s: torch.randn(*s[:2], s[3], s[2]).transpose(2, 3),
    "expanded": lambda *s: torch.randn(1, 1, *s[2:]).expand(s),
    "slice of a projection": lambda *s: torch.randn(s[0], s[2], s[1], 3, s[3])[:, :, :, 1].transpose(1, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    assert_close_to_exact([LAYOUTS[name](2, 3, n, 8).requires_grad_() for n in (5, 7, 7)])


def test_a_gradient_without_memory_of_its_own():
    q, k, v = make()
    jitted = thunder.jit(lambda *a: attend(*a).sum(), executors=[mem_attention_ex])
    exact_args, exact_out = exact([q, k, v])
    grads = torch.autograd.grad(jitted(q, k, v), (q, k, v))
    exact_grads = torch.autograd.grad(exact_out.sum(), exact_args)
    for g, e in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(g.double(), e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("needed", range(3))
def test_one_gradient_alone(needed):
    args = [a.detach().requires_grad_(i == needed) for i, a in enumerate(make())]
    assert_close_to_exact(args)


def test_what_the_backward_keeps():
    args = make()
    jitted = thunder.jit(attend, executors=[mem_attention_ex])
    out = jitted(*args)
    saved = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert sorted(t.shape for t in saved) == sorted([(2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 5)])


def test_forward_only_has_no_backward():
    q, k, v = (a.detach() for a in make())
    jitted = thunder.jit(attend, executors=[mem_attention_ex])
    torch.testing.assert_close(jitted(q, k, v), attend(q, k, v))
    assert claimed(jitted) and not thunder.last_backward_traces(jitted)


NOT_OURS = {
    "dropout": lambda: ([torch.randn(2, 3, 5, 8)] * 3, {"dropout_p": 0.1}),
    "3-d": lambda: ([torch.randn(3, 5, 8)] * 3, {}),
    "no keys' width equal": lambda: ([torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 4)], {}),
    "one head for many": lambda: ([torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)], {}),
    "nothing in it": lambda: ([torch.randn(2, 3, 0, 8)] * 3, {}),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_the_kernel_cannot_do_is_left_to_thunder(name):
    args, kwargs = NOT_OURS[name]()
    jitted = thunder.jit(lambda q, k, v: sdpa(q, k, v, **kwargs), executors=[mem_attention_ex])
    out = jitted(*args)
    assert not claimed(jitted)
    if "dropout_p" not in kwargs:
        torch.testing.assert_close(out, sdpa(*args))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_are_left_alone(device):
    with thunder.core.trace.tracectx(thunder.core.trace.TraceCtx(None)):
        q = TensorProxy(shape=(2, 3, 5, 8), dtype=dtypes.float32, device=devices.to_device(device), requires_grad=False)
        here = TensorProxy(shape=(2, 3, 5, 8), dtype=dtypes.float32, device=devices.cpu, requires_grad=False)
        assert on_cpu._is_supported(here, here, here)
        assert not on_cpu._is_supported(q, q, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_inside", [False, True])
def test_fake_tensors_tell_the_true_layout(dtype, heads_inside):
    """The memory model believes what the operators say about tensors that are not there."""
    shape = (2, 5, 3, 8) if heads_inside else (2, 3, 5, 8)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    if heads_inside:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def run(q, k, v):
        out, logsumexp = on_cpu._forward(q, k, v, None, True, None)
        return [
            out,
            logsumexp,
            *on_cpu._backward(torch.ones_like(out), q, k, v, out, logsumexp, None, True, None),
        ]

    with FakeTensorMode() as mode:
        fake = run(*map(mode.from_tensor, (q, k, v)))
    for f, r in zip(fake, run(q, k, v), strict=True):
        assert (f.dtype, f.shape, f.stride()) == (r.dtype, r.shape, r.stride())
        assert f.untyped_storage().nbytes() == r.untyped_storage().nbytes()


def test_proxies_have_the_shapes_and_dtypes_of_the_results():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        args = make(dtype=dtype)
        jitted = thunder.jit(attend, executors=[mem_attention_ex])
        jitted(*args)
        trace = thunder.last_traces(jitted)[-1]
        (bsym,) = [b for b in trace.bound_symbols if b.sym.name == "mem_attention_forward"]
        results = on_cpu._forward(*args, None, False, None)
        for proxy, real in zip(bsym.output, results, strict=True):
            assert tuple(proxy.shape) == tuple(real.shape)
            assert dtypes.to_torch_dtype(proxy.dtype) == real.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "s"), [(16, 700), (128, 128), (512, 512), (1000, 1000), (1024, 300)])
def test_the_planner_knows_what_the_backward_holds_inside(t, s, dtype):
    heads = [torch.randn(1, n, 8, 16, dtype=dtype).transpose(1, 2) for n in (t, s, s)]
    jitted = thunder.jit(attend, executors=[mem_attention_ex])
    jitted(*(x.clone().requires_grad_() for x in heads))
    backward = next(b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if "attention" in b.sym.name)
    out, logsumexp = on_cpu._forward(*heads, None, False, None)
    held = measure_peak(on_cpu._backward, torch.ones_like(out), *heads, out, logsumexp, None, False, None)
    inside = held - sum(x.nbytes for x in heads)
    # Row sums come on top, and in bfloat16 the panels that oneDNN packs.
    assert estimated_scratch_bytes(backward) <= inside <= 1.3 * estimated_scratch_bytes(backward) + 65_536


def test_it_stands_in_the_registry():
    assert get_executor("mem_attention") is mem_attention_ex


QUERIES = {
    "contiguous": lambda b, h, t, d: torch.randn(b, h, t, d),
    "a view of (B, T, H, D)": lambda b, h, t, d: torch.randn(b, t, h, d).transpose(1, 2),
    "a part of a projection": lambda b, h, t, d: torch.randn(b, t, 3, h, d)[:, :, 0].transpose(1, 2),
    "one head for all": lambda b, h, t, d: torch.randn(b, 1, t, d).expand(b, h, t, d),
    "a transposed matrix": lambda b, h, t, d: torch.randn(b, h, d, t).mT,
}


@pytest.mark.parametrize("make_query", QUERIES.values(), ids=QUERIES.keys())
def test_plans_know_how_results_lie_in_memory(make_query):
    query = make_query(2, 3, 5, 8)
    key, value = torch.randn(2, 7, 3, 8).transpose(1, 2), torch.randn(2, 3, 7, 8)
    results = on_cpu._forward(query, key, value, None, False, None)
    results += on_cpu._backward(torch.randn(2, 3, 5, 8), query, key, value, *results, None, False, None)
    trace = TraceCtx()
    with tracectx(trace):
        q, k, v = proxies = [
            TensorProxy(shape=tuple(t.shape), device=devices.cpu, dtype=dtypes.float32, requires_grad=False)
            for t in (query, key, value)
        ]
        out, logsumexp = on_cpu.attention_forward(q, k, v, None, False, None)
        grads = on_cpu.attention_backward(out, q, k, v, out, logsumexp, None, False, None)
    layout = Layout.of({p.name: t.to("meta") for p, t in zip(proxies, (query, key, value), strict=True)})
    for bsym in trace.bound_symbols:
        layout.run(bsym)
    planned = [layout[p.name] for p in (out, logsumexp, *grads)]
    assert [t.stride() for t in planned] == [t.stride() for t in results]
    assert [t.untyped_storage().nbytes() for t in planned] == [t.untyped_storage().nbytes() for t in results]
