"""The pointwise executor: what it takes, what it computes, and what its regions are as functions."""

import copy
import gc
import itertools
import threading
import weakref

import pytest
import thunder
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.utils import Region
from thunder.extend import get_executor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from thunder_mem import ChunkLossHead, MemEfficient
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.regions import compiled_region
from thunder_mem.regions.compiled_region import CompileWarning
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex, region_function
from thunder_mem.regions.region_outputs import return_whole_results

# A region that silently runs unfused would pass every comparison below.
pytestmark = pytest.mark.filterwarnings("error::thunder_mem.regions.compiled_region.CompileWarning")


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def fusions(trace):
    return [b for b in trace.bound_symbols if b.sym.is_fusion]


def functions(jitted):
    return [b._call_ctx[b.sym.name] for b in fusions(thunder.last_traces(jitted)[-1])]


def jit(fn, **options):
    return thunder.jit(fn, executors=[mem_pointwise_ex], **options)


def trace_of(make, inputs):
    """The bound symbols of `make(*inputs)` over prims, and its outputs, for inputs given as (shape, dtype)."""
    trace = TraceCtx(None)
    with tracectx(trace):
        proxies = [TensorProxy(shape=s, dtype=d, device=devices.cpu, requires_grad=False) for s, d in inputs]
        outputs = tree_leaves(make(*proxies))
    return trace.bound_symbols, proxies, outputs


def region_of(make, *inputs):
    return region_function(*trace_of(make, inputs))


def layout(outputs, inputs):
    """Strides, bytes behind each output, and who shares memory with whom."""
    everything = [*inputs, *outputs]
    pointers = [t.untyped_storage().data_ptr() for t in everything]
    sizes = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in outputs]
    return sizes, [pointers.index(p) if t.numel() else None for p, t in zip(pointers, everything, strict=True)]


R = torch.randn
PROGRAMS = {
    "views of an argument": (lambda x: (x.reshape(8, 6), x.transpose(0, 1), x[2:4], x * 2), R(6, 8)),
    "only views": (lambda x: (x.reshape(8, 6), x.transpose(0, 1)[2:4]), R(6, 8)),
    "non-contiguous inputs": (lambda x, y: x * y + 1, R(8, 6).t(), R(12, 8)[::2]),
    "expanded input": (lambda x, y: (x * y).sum(0), R(1, 8).expand(6, 8), R(6, 8)),
    "0-d": (lambda x: (x * 2).exp() + 1, torch.tensor(2.0)),
    "nothing in it": (lambda x: ((x * 2).exp(), x.sum(), x.sum(0), x.amax(1)), R(0, 4)),
    "a clone is a copy": (lambda x: (x.clone(), x * 1), R(4, 4)),
    "contiguous, needed and not": (lambda x: (x.t().contiguous(), (x * 2).contiguous()), R(4, 5)),
    "cat and pad": (
        lambda x, y: torch.nn.functional.pad(torch.cat([x, y], 1), (1, -1, 2, 0), value=3.0),
        R(4, 4),
        R(4, 3),
    ),
    "no inputs": (lambda: (torch.arange(5) * 2, torch.full((3,), 2.0) + 1, torch.zeros(4)),),
    "views of results": (lambda x: (x.sum(1, keepdim=True).expand(4, 6), (x * 2)[:2], (x * 3).t()), R(4, 5)),
    "reductions": (lambda x: (*torch.var_mean(x, 1), x.prod(0), x.amin((0, 1)), x.mean()), R(6, 8)),
    "bool": (lambda x: ((x > 0) & (x < 1), ~(x > 0), torch.where(x > 0, x, -float("inf"))), R(4, 4)),
    "masks and views of them": (
        lambda x, m: (x < 0, (x > 0)[1:], (x > 0).t(), (x == 0).any(1), m[0], m | (x < 0), (x < 1).expand(2, 4, 5)),
        R(5, 4).t(),
        R(4, 5) < 0,
    ),
    "views of results that lie like a transposed input": (
        lambda x: ((x * 2)[1:], (x * 3).expand(2, 4, 5), (y := x.sin(), y.t(), y[0])),
        R(5, 4).t(),
    ),
    "views of what is concatenated": (
        lambda x, y: (a := x * 2, b := y < 0, torch.cat([y, a]), torch.cat([b, x < 0]), a[1:], b[1:], a.t()),
        R(4, 5),
        R(3, 5),
    ),
    "a mask and a view of it": (lambda x: (mask := x < 0, mask.reshape(20), mask[2:]), R(4, 5)),
    "no mask at all": (lambda x: (x < 0, (x < 0).any()), R(0, 4)),
    "int": (lambda x: (x // 2, x.sum(), x.to(torch.float32).mean(), x & 3), torch.arange(-8, 8).reshape(4, 4)),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), R(4, 4), R(4, 4)),
    "what PyTorch makes contiguous": (
        lambda x: (F.softmax(x.sin(), 0), F.log_softmax(x, 1), F.logsigmoid(x), F.layer_norm(x, (6,)), x.sin()),
        R(6, 4).t(),
    ),
    "normalised over batches": (lambda x: F.group_norm(x.sin(), 2), R(5, 6, 4).permute(2, 1, 0)),
    "images keep their format": (lambda x: F.group_norm(x.sin(), 2), R(2, 5, 5, 4).permute(0, 3, 1, 2)),
    "a number": (lambda x, s: x * s + x.shape[0], R(4, 4), 2.5),
    "half in, float out": (lambda x: (x.float() * 2, x * 2), R(4, 4, dtype=torch.float16)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_strides_and_aliasing_are_those_of_eager(name):
    fn, *args = PROGRAMS[name]
    jitted = jit(fn)
    for _ in range(2):  # the call that compiles and one that does not
        actual, expected = tensors(jitted(*args)), tensors(fn(*args))
        torch.testing.assert_close(actual, expected)
        assert layout(actual, tensors(args)) == layout(expected, tensors(args))
    assert functions(jitted)


def viewed_then_gathered(x, i):
    y = (x * 2).exp()
    v = x.view(-1, 6).unsqueeze(0)
    return y, v[0].exp() + 1, torch.gather(v, 2, i)


def product_viewed(x, i):
    v = (x @ x.t()).view(1, -1, 6)
    return v.sin().sum(-1), torch.gather(v, 2, i)


@pytest.mark.parametrize("fn", (viewed_then_gathered, product_viewed))
def test_a_view_that_others_read_is_no_regions_result(fn):
    """It costs nothing outside; inside it would keep its operand alive under a name that no other region may read."""
    args = torch.randn(6, 6), torch.tensor([[[0], [3], [5], [1], [2], [4]]])
    jitted = jit(fn)
    for actual, expected in zip(jitted(*args), fn(*args), strict=True):
        torch.testing.assert_close(actual, expected)
    regions = fusions(thunder.last_traces(jitted)[-1])
    (gather,) = (b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "gather")
    viewed = gather.flat_proxy_args[0].name
    assert len(regions) == 1 and viewed in {p.name for r in regions for p in r.flat_proxy_args}


def test_masks_of_what_writes_over_its_inputs_stay_booleans():
    """They must exist before the write, and bytes made of them would be memory beside them."""
    for fn, positions in ((lambda x: (x < 0, x.copy_(x * 2)), []), (lambda x: (x < 0, x * 2), [0])):
        graph = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(R(4))
        assert sorted(return_whole_results(graph)) == positions


def test_dropout_draws_after_a_region_as_it_does_after_the_operation():
    def fn(x):  # draws in the order of the memory, and a softmax is contiguous
        return F.dropout(F.softmax(x.sin(), 0), 0.5)

    x = R(4, 4).t()
    jitted = jit(fn)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = fn(x)
        torch.manual_seed(0)
        torch.testing.assert_close(jitted(x), expected)
    assert functions(jitted)


def test_inputs_may_share_memory():
    x = torch.randn(6, 6)
    torch.testing.assert_close(jit(lambda a, b, c: a * 2 + b.t() - c)(x, x, x[:1]), x * 2 + x.t() - x[:1])


UNARY = [
    *(
        "abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "clone",
        "cos",
        "cosh",
        "erf",
        "erfc",
        "erfinv",
    ),
    *("exp", "exp2", "expm1", "floor", "isfinite", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal"),
    *("round", "rsqrt", "sign", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
]
BINARY = [
    *("add", "atan2", "div", "eq", "fmod", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "nextafter"),
    *("pow", "remainder", "sub"),
]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor", "eq"]
INT_UNARY = ["abs", "neg", "sign", "bitwise_not"]
INT_BINARY = [
    *("bitwise_left_shift", "bitwise_right_shift", "add", "sub", "mul", "div", "remainder", "fmod", "maximum"),
    *("minimum", "lt", *BITS),
]


@pytest.mark.parametrize(
    ("unary", "binary", "dtype"),
    [
        pytest.param(UNARY, BINARY, torch.float32, id="float32"),
        pytest.param(UNARY, BINARY, torch.float64, id="float64", marks=pytest.mark.slow),
        pytest.param(INT_UNARY, INT_BINARY, torch.int64, id="int64"),
        pytest.param(INT_UNARY, INT_BINARY, torch.uint8, id="uint8", marks=pytest.mark.slow),
        pytest.param(["bitwise_not"], BITS, torch.bool, id="bool"),
    ],
)
def test_every_pointwise_prim_is_taken_and_computes_what_torch_does(unary, binary, dtype):
    def make(x, y):
        return [getattr(prims, n)(x) for n in unary] + [getattr(prims, n)(x, y) for n in binary]

    shape = (5, 33)  # 33: a vector and a rest
    bsyms, inputs, outputs = trace_of(make, [(shape, dtypes.to_dtype(dtype))] * 2)
    assert all(map(mem_pointwise_ex.can_fuse, bsyms))
    if dtype.is_floating_point:
        args = [torch.rand(shape, dtype=dtype) * 0.8 + 0.1 for _ in range(2)]
    else:
        args = [torch.randint(1, 5, shape).to(dtype) for _ in range(2)]
    function = region_function(bsyms, inputs, outputs)
    actual = function(*args)
    expected = function._unfused(args)
    for name, a, e in zip([*unary, *binary], actual, expected, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    assert function.variants == 1


def block(x, w, scale, cos, sin):
    """Norm, rotation, softmax and gated activation around two matmuls."""
    h = x.float()
    h = (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale
    h1, h2 = h.chunk(2, -1)
    h = h * cos + torch.cat([-h2, h1], -1) * sin
    h = torch.softmax((h @ w).float(), -1).to(x.dtype)
    return torch.nn.functional.silu(h @ w.t()) * x + torch.nn.functional.gelu(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_exact_as_eager(dtype):
    args = [torch.randn(s, dtype=torch.float64) for s in [(2, 24, 16), (16, 16), (16,), (24, 16), (24, 16)]]
    args = [a.to(dtype).requires_grad_() for a in args]
    exact_args = [a.detach().double().requires_grad_() for a in args]
    weight = torch.randn(2, 24, 16).to(dtype)

    def run(fn, args, weight):
        out = fn(*args)
        return [out, *torch.autograd.grad((out * weight).sum(), args)]

    exact = run(block, exact_args, weight.double())
    eager = run(block, args, weight)
    jitted = thunder.jit(block, executors=[mem_attention_ex, mem_pointwise_ex])
    fused = run(jitted, args, weight)
    assert fusions(thunder.last_backward_traces(jitted)[-1])
    for f, e, x in zip(fused, eager, exact, strict=True):
        assert f.dtype == dtype
        assert (f - x).norm() <= 1.25 * (e - x).norm() + 1e-7 * x.norm()


def test_a_chain_in_bfloat16_is_rounded_once():
    x = torch.randn(4096, dtype=torch.bfloat16)

    def chain(x):
        for _ in range(6):
            x = x * 1.01 + 0.3
        return x

    error = (jit(chain)(x).double() - chain(x.double())).abs()
    assert error.max() < (chain(x).double() - chain(x.double())).abs().max()
    assert (error <= chain(x.double()).abs() * 2**-8).all()


def test_equal_regions_share_one_function_and_one_compilation():
    def layers(x, w):
        for _ in range(4):
            x = (torch.nn.functional.gelu(x) * 2) @ w
        return x

    jitted = jit(layers)
    x, w = torch.randn(4, 8), torch.randn(8, 8) / 8
    torch.testing.assert_close(jitted(x, w), layers(x, w))
    assert len(functions(jitted)) == 4
    assert len(set(map(id, functions(jitted)))) == 1
    assert functions(jitted)[0].variants == 1
    assert functions(jit_and_run(layers, x, w))[0] is functions(jitted)[0]


def jit_and_run(fn, *args):
    jitted = jit(fn)
    jitted(*args)
    return jitted


F32 = ((4, 4), dtypes.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x, y: prims.mul(x, 2.0), lambda x, y: prims.mul(x, 3.0)),
        (lambda x, y: prims.mul(x, 0.0), lambda x, y: prims.mul(x, -0.0)),
        (lambda x, y: prims.sub(x, y), lambda x, y: prims.sub(y, x)),
        (lambda x, y: (prims.sin(x), prims.cos(x)), lambda x, y: (prims.cos(x), prims.sin(x))),
        (lambda x, y: prims.sum(x, (0,)), lambda x, y: prims.sum(x, (1,))),
        (lambda x, y: prims.full((2,), 1, device=devices.cpu, dtype=dtypes.int64),
         lambda x, y: prims.full((2,), True, device=devices.cpu, dtype=dtypes.bool8)),
    ],
)  # fmt: skip
def test_regions_that_differ_do_not_share(first, second):
    one, other = region_of(first, F32, F32), region_of(second, F32, F32)
    assert one is not other
    assert one is region_of(first, F32, F32)


def test_shapes_and_dtypes_are_part_of_the_content():
    one, same, shape, dtype = (
        region_of(prims.neg, i) for i in [F32, F32, ((4, 5), dtypes.float32), ((4, 4), dtypes.float64)]
    )
    assert one is same
    assert len({id(f) for f in (one, shape, dtype)}) == 3


def test_functions_live_as_long_as_the_traces_that_call_them():
    jitted = jit_and_run(lambda x: x.sin() * 1.7, torch.randn(3))
    function = weakref.ref(functions(jitted)[0])
    assert function() is not None
    del jitted
    gc.collect()
    assert function() is None


def test_fuse_is_lazy_and_prints_its_body(monkeypatch):
    monkeypatch.setattr(compiled_region, "_compile", lambda *_: pytest.fail("compiled before the first call"))
    monkeypatch.setattr(compiled_region, "python_function", lambda *_: pytest.fail("built before the first call"))
    trace = TraceCtx(None)
    with tracectx(trace):
        x = TensorProxy("x", shape=(4,), dtype=dtypes.float32, device=devices.cpu, requires_grad=False)
        prims.unpack_trivial(x, name="x")
        y = prims.mul(prims.sin(x), 2.0)
        prims.python_return(y)
    producers, consumers = thunder.core.utils.producers_and_consumers(trace)
    bsym = mem_pointwise_ex.fuse(Region(producers, consumers, trace.bound_symbols[1:3]), 7)
    assert bsym.sym.name == "MemPointwise7" and bsym.sym.is_fusion and bsym.sym.executor is mem_pointwise_ex
    assert list(bsym.flat_proxy_outs) == [y]
    assert "= MemPointwise7(x)" in str(bsym) and "prims.sin(x)" in str(bsym)


def test_each_layout_compiles_once_and_too_many_run_unfused(monkeypatch):
    monkeypatch.setattr(compiled_region, "MAX_VARIANTS", 2)
    function = region_of(lambda x, y: prims.mul(prims.sin(x), y), F32, F32)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for x, y, variants in [(a, b, 1), (b, a, 1), (a.t(), b, 2), (a.t(), b, 2), (a.t(), b.t(), 2)]:
        torch.testing.assert_close(function(x, y)[0], x.sin() * y)
        assert function.variants == variants


def test_calls_in_turn_get_the_function_of_their_own_arguments():
    function = region_of(lambda x, y: prims.mul(prims.sin(x), y), F32, F32)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    pairs = [
        (a, b),
        (a.t(), b.t()),
        (a[:2], b[:2]),
        (a[:, :1], b[:, :1]),
        (a[:1].expand(4, 4), b),
        (torch.nn.Parameter(a), b),
        (a, a),
        (torch._neg_view(a), b),
    ]
    for first, second in itertools.permutations(pairs, 2):
        for x, y in (first, first, first, second, first, second, first):  # equal calls in turn are remembered
            (out,), expected = function(x, y), x.detach().sin() * y
            torch.testing.assert_close(out, expected)
            assert out.stride() == expected.stride()


def test_layouts_in_turn_make_no_check_of_their_own(monkeypatch):
    made = []
    check = compiled_region._same_as
    monkeypatch.setattr(compiled_region, "_same_as", lambda args: made.append(args) or check(args))
    function = region_of(lambda x, y: prims.mul(prims.cos(x), y), F32, F32)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(6):
        function(a, b)
        function(a.t(), b)
    assert not made
    for x in (a, a, a, a.t(), a, a.t(), a):
        function(x, b)
    assert len(made) == 1


@pytest.mark.parametrize("calls", [1, 4])
def test_a_tensor_with_the_negative_bit_is_read_as_negated(calls):
    """Inductor reads the memory as it is, and returned the result's negative."""
    z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj().imag
    assert z.is_neg()
    jitted = jit(lambda x: x.sin() * 2 + x)
    for x in (z.resolve_neg(),) * (calls - 1) + (z,):
        torch.testing.assert_close(jitted(x), z.sin() * 2 + z)


def test_fake_tensors_run_unfused_and_look_like_the_real_thing(monkeypatch):
    def make(x, y):
        t = prims.mul(prims.transpose(x, (1, 0)), y)
        return t, prims.transpose(t, (1, 0)), prims.sum(t, (1,)), prims.reshape(y, (16,))

    function = region_of(make, F32, F32)
    args = [torch.randn(4, 4), torch.randn(4, 4)]
    real = function(*args)
    monkeypatch.setattr(compiled_region, "_compile", lambda *_: pytest.fail("compiled fake tensors"))
    with FakeTensorMode() as mode:
        fake = function(*map(mode.from_tensor, args))
        iota = region_of(lambda: prims.iota(5, start=0, step=1, device=devices.cpu, dtype=dtypes.int64))()
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in (*fake, *iota))
    assert [(f.shape, f.stride(), f.untyped_storage().nbytes()) for f in fake] == [
        (r.shape, r.stride(), r.untyped_storage().nbytes()) for r in real
    ]
    assert fake[0].untyped_storage() is not fake[2].untyped_storage()


def test_where_inductor_fails_the_region_runs_unfused_and_says_why(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr(compiled_region, "_compile", fail)
    jitted = jit(lambda x: x.sin() * 1.9)
    x = torch.randn(3)
    with pytest.warns(CompileWarning, match=r"RuntimeError: no compiler here\)"):
        torch.testing.assert_close(jitted(x), x.sin() * 1.9)
    torch.testing.assert_close(jitted(x), x.sin() * 1.9)  # and says it once


def test_an_interrupted_compilation_leaves_nothing_behind(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    function = region_of(lambda x: prims.cos(prims.cos(x)), F32)
    x = torch.randn(4, 4)
    with monkeypatch.context() as m:
        m.setattr(compiled_region, "_compile", interrupt)
        with pytest.raises(KeyboardInterrupt):
            function(x)
    torch.testing.assert_close(function(x)[0], x.cos().cos())


def test_two_threads_compile_once(monkeypatch):
    compilations = []
    compile_region = compiled_region._compile
    monkeypatch.setattr(compiled_region, "_compile", lambda *a: compilations.append(1) or compile_region(*a))
    function = region_of(lambda x: prims.exp(prims.neg(x)), F32)
    x = torch.randn(4, 4)
    results = []
    threads = [threading.Thread(target=lambda: results.append(function(x)[0])) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4 and all(torch.equal(r, results[0]) for r in results)
    torch.testing.assert_close(results[0], x.neg().exp())
    assert len(compilations) == 1


def reader_before_write(x):
    y = x.sin()
    x.add_(1)
    return y + x


def write_through_a_view(x):
    w = x * 3
    v = x.view(-1)
    v.mul_(2)
    return w + x, v


def chain_in_place(x):
    return (x * 2).add_(1).sin().mul_(2)


@pytest.mark.parametrize("fn", [reader_before_write, write_through_a_view, chain_in_place])
def test_writes_in_place_stay_in_order(fn):
    x, y = torch.randn(5, 5), None
    y = x.clone()
    torch.testing.assert_close(jit(fn)(x), fn(y))
    torch.testing.assert_close(x, y)


def test_no_read_moves_past_a_write_in_the_passes_of_other_fusion_executors():
    """These call Thunder's `rematerialize`, which computes a region's inputs in the region."""

    def fn(x):
        y = x.tanh()
        z = y * 2
        y.add_(x)
        return z * 3

    x = torch.randn(4)
    others = [get_executor("torchcompile_xentropy")]
    torch.testing.assert_close(thunder.jit(fn, executors=[mem_pointwise_ex, *others])(x), fn(x))


@pytest.mark.slow
def test_batch_norm_updates_its_statistics():
    eager = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    jitted = jit(copy.deepcopy(eager))
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        actual, expected = jitted(x), eager(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.sin().sum(), x)[0] for o in (actual, expected)))
    torch.testing.assert_close(jitted.state_dict(), eager.state_dict())


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_modes_of_the_caller_do_not_change_a_region(mode):
    x = torch.randn(4, 4, requires_grad=True)
    with mode():
        out = jit(lambda x: x.sin().t() * 2.5)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.sin().t() * 2.5)


@pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")
def test_symbolic_values_reach_the_region_as_numbers():
    jitted = jit(lambda x, s: (x.sin() * s).reshape(-1), cache="symbolic values")
    for rows, s in [(4, 2.5), (5, 3.5), (5, -3.5)]:
        x = torch.randn(rows, 4)
        torch.testing.assert_close(jitted(x, s), (x.sin() * s).reshape(-1))
    assert thunder.cache_misses(jitted) == 1
    assert [f.variants for f in functions(jitted)] == [3]


REFUSED = {
    "matmul": (lambda x: x @ x, R(4, 4)),
    "linear": (lambda x: torch.nn.functional.linear(x, x), R(4, 4)),
    "random": (lambda x: torch.nn.functional.dropout(x, 0.5), R(4, 4)),
    "gather": (lambda x: torch.gather(x, 0, torch.zeros(2, 2, dtype=torch.int64)), R(4, 4)),
    "embedding": (lambda i, w: torch.nn.functional.embedding(i, w), torch.arange(3), R(4, 4)),
    "complex": (lambda x: x * 2, torch.randn(4, dtype=torch.complex64)),
    "cumulative": (lambda x: torch.cumsum(x, 0), R(4, 4)),
    "sort": (lambda x: torch.topk(x, 2)[0], R(4, 4)),
    "in place": (lambda x: x.copy_(torch.zeros(4, 4)), R(4, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_left_to_others(name):
    fn, *args = REFUSED[name]
    jitted = jit(fn)
    jitted(*args)
    traces = thunder.last_traces(jitted)
    refused = [b for b in traces[0].bound_symbols if b.flat_proxy_outs and not mem_pointwise_ex.can_fuse(b)]
    refused = [b for b in refused if b.sym.id not in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN)]
    assert len(refused) == 1
    with pytest.raises(ValueError, match="mem_pointwise cannot fuse"):
        region_function(refused, list(refused[0].flat_proxy_args), list(refused[0].flat_proxy_outs))


def test_a_region_that_reads_what_nobody_gives_is_refused():
    bsyms, inputs, outputs = trace_of(lambda x: prims.sin(prims.cos(x)), [F32])
    with pytest.raises(ValueError, match=rf"reads {inputs[0].name}, which is neither an input"):
        region_function(bsyms, [], outputs)


def test_it_stands_in_the_registry_and_survives_a_deep_copy():
    assert get_executor("mem_pointwise") is mem_pointwise_ex
    function = region_of(prims.sin, F32)
    assert copy.deepcopy({"f": function})["f"] is function


def test_a_loss_head_listed_beside_a_plan_has_the_plan_s_executors():
    def head(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    x, w, t = torch.ones(512, 8, requires_grad=True), torch.ones(1024, 8), torch.zeros(512, dtype=torch.long)
    loops = []
    for transforms in ([MemEfficient(chunk=ChunkLossHead(rows=64))], [ChunkLossHead(rows=64), MemEfficient()]):
        compiled = thunder.jit(head, transforms=transforms)
        compiled(x, w, t)
        (loop,) = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if is_chunk_loop(b)]
        loops.append(loop_of(loop))
    inside, beside = loops
    assert inside.plan.block_rows == beside.plan.block_rows
    for loop in loops:
        names = [b.sym.name for body in loop.backward.values() for b in body.trace.bound_symbols]
        assert any(name.startswith("MemPointwise") for name in names)
