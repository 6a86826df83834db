"""`MemEfficient` beside Thunder's other transforms and PyTorch's other features.

Every program gives what it gives in eager float64, and was planned, wherever `MemEfficient` stands in the list.
"""

import sys
import types
import warnings

import pytest
import thunder
import torch
from thunder.core.transform_common import Transform
from thunder.dynamo import thunderfx
from thunder.transforms.constant_folding import ConstantFolding
from thunder.transforms.cudagraph import CUDAGraphRunner, CUDAGraphTransform
from thunder.transforms.materialization import MaterializationTransform
from thunder.transforms.qlora import LORATransform
from torch import nn
from torch.nn import functional as F

from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import ChunkLossHead, MemEfficient, chunked, explain, fx, last_plan
from thunder_mem.chunking import ChunkingError
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex


@pytest.fixture(autouse=True)
def _uncompiled():
    with uncompiled_regions():
        yield


ORDERS = pytest.mark.parametrize("order", ["last", "first"])


def listed(order, other, mine=None):
    mine = mine or MemEfficient(strict=True)
    return [mine, other] if order == "first" else [other, mine]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))


X = randn(16, 8, grad=False)


def seen(compiled, parameters, x=X):
    """The output and the gradients of the input and of those parameters, in float64."""
    x = x.detach().requires_grad_()
    parameters = [p for p in parameters if p.requires_grad]
    y = compiled(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
    return [t.detach().double() for t in (y, *grads)]


def in_float64(make=net, x=X):
    model = make().double()
    return seen(model, model.parameters(), x.double())


def assert_close(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# --- Thunder's transforms ----------------------------------------------------------------------------


def test_autocast():
    model, exact = net(), in_float64()
    jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)])
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = (seen(f, model.parameters()) for f in (jitted, model))
    for mine, theirs, true in zip(got, eager, exact, strict=True):  # as far from it as autocast is in eager mode
        assert (mine - true).abs().max() <= 1.5 * (theirs - true).abs().max() + 1e-3
    assert "bfloat16" in str(thunder.last_traces(jitted)[-1]) and last_plan(jitted) is not None


def test_autocast_of_an_earlier_call_is_warned_of():
    """Thunder pushes it at each call and never pops it: its own fault, and silent without `MemEfficient`."""
    alone, planned = (thunder.jit(torch.matmul, executors=[], transforms=t) for t in ([], [MemEfficient()]))
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(action="error", category=UserWarning):
        planned(X, X.T), alone(X, X.T)
    with pytest.warns(UserWarning, match="keeps the torch.autocast of an earlier call.*use a thunder.jit of its own"):
        planned(X, X.T)
    assert alone(X, X.T).dtype is torch.bfloat16  # so that the warning goes when Thunder is repaired


@pytest.mark.sampled(1)
@ORDERS
def test_constant_folding(order):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x * torch.tensor(2.0).sqrt())

    model = Folded()
    jitted = thunder.jit(model, transforms=listed(order, ConstantFolding()))
    assert_close(seen(jitted, model.parameters()), in_float64(Folded))
    assert last_plan(jitted) is not None
    assert "1.414" in str(thunder.last_traces(jitted)[-1])  # folded, before and after us


@pytest.mark.sampled(1)
@ORDERS
def test_materialization(order):
    source = net()
    with torch.device("meta"):
        model = net()
    init = MaterializationTransform.init_from_original_state_dict(source.state_dict())
    jitted = thunder.jit(model, transforms=listed(order, MaterializationTransform("cpu", init=init)))
    assert_close(seen(jitted, jitted.parameters()), in_float64())
    assert last_plan(jitted) is not None


class WithLora(nn.Module):
    """What `LORATransform` makes of `net`, in eager mode."""

    def __init__(self, adapted):
        super().__init__()
        self.net, self.adapted = net(), adapted

    def forward(self, x):
        for name, layer in self.net.named_children():
            y = layer(x)
            if isinstance(layer, nn.Linear):
                a, b = (self.adapted[f"{name}.weight.lora_{i}"].to(x.dtype) for i in "ab")
                y = y + x @ a.T @ b.T * 0.5
            x = y
        return x


def lora_jitted(transforms, **options):
    """A jitted model with all of its LoRA's factors filled, which Thunder leaves without a gradient."""
    jitted = thunder.jit(net().requires_grad_(False), transforms=transforms, **options)
    adapted = {name: p for name, p in jitted._overrides_parameters.items() if "lora" in name}
    with torch.no_grad():
        for k, p in enumerate(adapted.values()):
            p.copy_(randn(*p.shape, seed=k) / 4)
    return jitted, adapted


@pytest.mark.sampled(1)
@ORDERS
def test_lora(order):
    jitted, adapted = lora_jitted(listed(order, LORATransform(r=4, lora_alpha=2)))
    got = seen(jitted, [])
    model = WithLora(adapted).double()
    assert_close(got, seen(model, [], X.double()))
    assert last_plan(jitted) is not None


class Quantised(types.ModuleType):
    """The part of bitsandbytes that Thunder uses, on a CPU: a byte an element, and absolute maxima of blocks."""

    def __init__(self):
        super().__init__("bitsandbytes")
        self.functional = self

    class QuantState:
        def __init__(self, absmax, shape, blocksize, code, quant_type, dtype):
            self.absmax, self.shape, self.blocksize, self.code, self.dtype = absmax, shape, blocksize, code, dtype

    def quantize_4bit(self, w, quant_type):
        blocks, code = w.detach().reshape(-1, 16), torch.linspace(-1, 1, 16)
        absmax = blocks.abs().amax(1)
        nearest = (blocks[..., None] / absmax[:, None, None] - code).abs().argmin(-1).to(torch.uint8)
        return nearest.reshape(-1, 1), self.QuantState(absmax, w.shape, 16, code, quant_type, w.dtype)

    def dequantize(self, q, state):
        blocks = state.code[q.reshape(-1, state.blocksize).long()] * state.absmax[:, None]
        return blocks.reshape(tuple(state.shape))

    def as_4bit(self, w):
        return self.dequantize(*self.quantize_4bit(w.float(), "nf4")).to(w.dtype)

    def matmul_4bit(self, x, q, bias, quant_state):
        return F.linear(x, self.dequantize(q.t(), quant_state).to(x.dtype), bias)


@pytest.fixture
def bitsandbytes(monkeypatch):
    from thunder.transforms import quantization

    double = Quantised()
    monkeypatch.setitem(sys.modules, "bitsandbytes", double)
    monkeypatch.setattr(quantization, "bitsandbytes_executor", None)
    monkeypatch.setattr(
        quantization.BitsAndBytesLinearQuant4bit, "quantize_weight", lambda self, w: double.quantize_4bit(w, "nf4")
    )
    return double


@pytest.mark.parametrize("way", ["plugins", "plugins, ours first", "transforms, ours first"])
def test_quantization(bitsandbytes, way):
    from thunder.transforms.quantization import BitsAndBytesLinearQuant4bit, get_bitsandbytes_executor

    model = net().requires_grad_(False)
    if way == "transforms, ours first":
        transforms = listed("first", BitsAndBytesLinearQuant4bit())
        executors = [get_bitsandbytes_executor(), mem_pointwise_ex]
        compiled = thunder.jit(model, transforms=transforms, executors=executors)
    else:
        plugins = ["quantize-int4", "mem-efficient"]
        compiled = thunder.compile(model, plugins=plugins[::-1] if "ours first" in way else plugins)
    got = compiled(X)
    eager = net().double()
    for layer in (eager[0], eager[2]):
        layer.weight.data = bitsandbytes.as_4bit(layer.weight)
    assert_close(got.double(), eager(X.double()).detach())
    assert "bnb_matmul_nf4" in str(thunder.last_traces(compiled)[-1]) and last_plan(compiled) is not None


@ORDERS
def test_qlora(bitsandbytes, order):
    from thunder.transforms.quantization import BitsAndBytesLinearQuant4bit, get_bitsandbytes_executor

    lora, quantised = LORATransform(r=4, lora_alpha=2), BitsAndBytesLinearQuant4bit()
    ours = MemEfficient(strict=True)
    transforms = [lora, quantised, ours] if order == "last" else [ours, lora, quantised]
    jitted, adapted = lora_jitted(transforms, executors=[get_bitsandbytes_executor(), mem_pointwise_ex])
    got = jitted(X)
    eager = WithLora(adapted).double()
    for layer in (eager.net[0], eager.net[2]):
        layer.weight.data = bitsandbytes.as_4bit(layer.weight)
    assert_close(got.double(), eager(X.double()).detach())
    text = str(thunder.last_traces(jitted)[-1])
    assert "bnb_matmul_nf4" in text and "lora_a" in text and last_plan(jitted) is not None


# --- CUDA graphs, as they are recorded and replayed, on a CPU ----------------------------------------


class Replayed:
    """What a CUDA graph does: the recorded kernels again, on the recorded memory."""

    def __init__(self, fn, inputs, outputs):
        self.fn, self.inputs, self.outputs = fn, inputs, outputs

    def replay(self):
        for kept, new in zip(self.outputs, self.fn(*self.inputs), strict=True):
            kept.copy_(new)


def record(self, fn, args, static):
    """`CUDAGraphRunner.build_cuda_graph` without the GPU: buffers, three warm-ups, a recording, which runs nothing."""
    inputs = tuple(a if mask else self.get_static_buffer(a) for a, mask in zip(args, static, strict=True))
    for _ in range(3):
        fn(*inputs)
    outputs = [t.clone() for t in fn(*(t.clone() for t in inputs))]
    return Replayed(fn, inputs, outputs), inputs, outputs


@pytest.fixture
def cuda_graphs(monkeypatch):
    monkeypatch.setattr(CUDAGraphRunner, "build_cuda_graph", record)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA graphs need a GPU")
        yield


def deep():
    """What is saved dies in the backward, where without CUDA graphs results are written over it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


@ORDERS
@pytest.mark.slow
def test_cuda_graphs(order, cuda_graphs):
    alone = thunder.jit(deep(), transforms=[MemEfficient(strict=True)])
    alone(X)
    assert "written in place" in str(thunder.last_backward_traces(alone)[-1])

    model = deep()
    jitted = thunder.jit(model, transforms=listed(order, CUDAGraphTransform()))
    for k in range(4):  # the first call records, the others replay
        x = X + k
        assert_close(seen(jitted, model.parameters(), x), in_float64(deep, x), 1e-4)
    assert "CUDAGraph2" in str(thunder.last_backward_traces(jitted)[-1])
    refused = {r.what: r.reason for r in last_plan(jitted).refused}
    assert refused["results over values that die"] == "CUDA graphs are recorded on values that must stay"
    assert any("CUDA graphs keep their values" in note for note in explain(jitted, bounds=False).notes)


def test_cuda_graphs_around_a_chunked_head(cuda_graphs):
    def head(x, w, t):
        return F.cross_entropy(x @ w, t)

    t = torch.arange(16) % 9
    jitted = thunder.jit(
        head, transforms=[MemEfficient(strict=True, chunk=ChunkLossHead(chunks=4)), CUDAGraphTransform()]
    )
    for k in range(3):
        x, w = randn(16, 8, seed=k), randn(8, 9, seed=k)
        loss = jitted(x, w, t)
        got = [t.double() for t in (loss, *torch.autograd.grad(loss * (k + 1), [x, w]))]
        x, w = (a.detach().double().requires_grad_() for a in (x, w))
        loss = head(x, w, t)
        assert_close(got, [loss, *torch.autograd.grad(loss * (k + 1), [x, w])])
    assert "chunk_loop" in str(thunder.last_traces(jitted)[-1])


def test_the_backward_begins_as_cuda_graphs_expect():
    jitted = thunder.jit(deep(), transforms=[MemEfficient(strict=True)])
    jitted(X)
    bsyms = thunder.last_backward_traces(jitted)[-1].bound_symbols
    assert [a.name for a in bsyms[2].args[:1]] == ["saved_for_backward"]
    assert bsyms[9].sym.name == "unpack_sequence" and bsyms[9].args[0] is bsyms[2].output[0]


def test_cuda_graphs_without_a_gpu_are_warned_of(monkeypatch):
    monkeypatch.setattr(CUDAGraphRunner, "build_cuda_graph", record)
    with pytest.warns(UserWarning, match=r"CUDA graphs need a GPU.* move the model to it, or leave .*reduce-overhead"):
        thunder.compile(deep(), plugins=["mem-efficient", "reduce-overhead"])(X)


# --- the order of transforms -------------------------------------------------------------------------


class Rewriting(Transform):
    """Doubles the results of products, which it has to see for that."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        from thunder.core.trace import from_trace, tracectx

        new = from_trace(computation_trace)
        swap = {}
        with tracectx(new):
            for bsym in computation_trace.bound_symbols:
                bsym = bsym.from_bsym_swap_proxies(swap, skip_output=True)
                new.bound_symbols.append(bsym)
                if bsym.sym.name in ("matmul", "linear"):
                    doubled = thunder.torch.mul(bsym.output, 2)
                    swap[thunder.core.proxies.variableify(bsym.output)] = doubled
        return prologue_trace, new, epilogue_trace


def head(x, w, t):
    return F.cross_entropy(x @ w, t)


def doubled_head(x, w, t):
    return F.cross_entropy(x @ w * 2, t)


@ORDERS
@pytest.mark.parametrize("mine", [MemEfficient, ChunkLossHead])
def test_a_transform_behind_sees_products_that_would_be_in_chunks(order, mine):
    chunks = ChunkLossHead(chunks=4)
    ours = MemEfficient(strict=True, chunk=chunks) if mine is MemEfficient else chunks
    jitted = thunder.jit(head, transforms=listed(order, Rewriting(), ours))
    x, w, t = randn(16, 8), randn(8, 9), torch.arange(16) % 9
    loss = jitted(x, w, t)
    got = [a.double() for a in (loss, *torch.autograd.grad(loss, [x, w]))]
    x, w = (a.detach().double().requires_grad_() for a in (x, w))
    loss = doubled_head(x, w, t)
    assert_close(got, [loss, *torch.autograd.grad(loss, [x, w])])
    assert ("chunk_loop" in str(thunder.last_traces(jitted)[-1])) == (order == "last")
    refusals = last_plan(jitted).refused if mine is MemEfficient else chunks.record.refusals
    sentence = f"Rewriting stands behind {mine.__name__} in transforms= and would not see the products in a chunk loop"
    assert any(r.reason == f"{sentence}: put {mine.__name__} behind it" for r in refusals) == (order == "first")


def test_a_marked_head_before_such_a_transform_is_an_error():
    def marked(x, w, t):
        with chunked():
            return F.cross_entropy(x @ w, t)

    jitted = thunder.jit(marked, transforms=[MemEfficient(), Rewriting()])
    with pytest.raises(ChunkingError, match="is not chunked: Rewriting stands behind MemEfficient"):
        jitted(randn(16, 8), randn(8, 9), torch.arange(16) % 9)


# --- Thunder's cache and options ---------------------------------------------------------------------


@pytest.mark.slow
def test_symbolic_values_are_planned_for_the_example_and_the_plan_says_so():
    def program(a, b):  # two sizes that are equal in the example alone
        return (a.sin() * 2).exp().sum(0) + (b.cos() * 3).exp().sum(0), (a * 2).sin() @ b.T.exp()

    jitted = thunder.jit(program, transforms=[MemEfficient(strict=True)], cache="symbolic values")
    for n, m in ((4, 4), (6, 4), (4, 7), (3, 3)):
        a, b = randn(n, 5), randn(m, 5, seed=1)
        outputs = jitted(a, b)
        got = [t.double() for t in (*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), [a, b]))]
        a, b = (t.detach().double().requires_grad_() for t in (a, b))
        outputs = program(a, b)
        assert_close(got, [*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), [a, b])], 1e-4)
    assert thunder.cache_misses(jitted) == 1
    refused = {r.what: r.reason for r in last_plan(jitted).refused}
    assert "for the sizes of the example (i0=4, i1=5, i2=4, i3=5)" in refused["symbolic sizes"]
    told = " ".join(str(explain(jitted, bounds=False, detail=True)).split())
    assert refused["symbolic sizes"] in told and "budget" not in refused["symbolic sizes"]

    limited = thunder.jit(program, transforms=[MemEfficient(budget="1 GiB")], cache="symbolic values")
    limited(randn(4, 5), randn(4, 5, seed=1))
    refused = {r.what: r.reason for r in last_plan(limited).refused}
    assert "the budget is kept at these, not at larger ones" in refused["symbolic sizes"]


def test_the_sort_as_a_compile_option(capsys):
    jitted = thunder.jit(net(), executors=[], transforms=[MemEfficient()], mem_efficient_sort="dfs")
    jitted(X)
    assert last_plan(jitted).sort == "dfs"
    thunder.last_compile_options(jitted)
    used, unused = capsys.readouterr().out.split("Unused compile options:")
    assert "mem_efficient_sort. Algorithm by which thunder_mem.MemEfficient orders the program" in used
    assert "No unused options" in unused

    taken = []
    own = thunder.jit(
        net(), executors=[], transforms=[MemEfficient()], mem_efficient_sort=lambda g: taken.append(g) or range(len(g))
    )
    own(X)
    assert taken and last_plan(own) is not None


@pytest.mark.parametrize(
    ("own", "option", "error", "said"),
    [
        ("auto", "fastest", ValueError, "mem_efficient_sort='fastest' is not known; known are source, "),
        ("auto", 3, TypeError, "mem_efficient_sort is a name or a function"),
        ("dfs", "source", ValueError, "both name an order: give one of them"),
    ],
)
def test_a_wrong_compile_option_is_refused(own, option, error, said):
    jitted = thunder.jit(net(), executors=[], transforms=[MemEfficient(sort=own)], mem_efficient_sort=option)
    with pytest.raises(error, match=said):
        jitted(X)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mem_eficient_sort", "memefficient_sort", "mem_efficient_budget"])
def test_a_compile_option_that_is_almost_ours_is_named(name):
    jitted = thunder.jit(net(), executors=[], transforms=[MemEfficient()], **{name: "dfs"})
    with pytest.raises(ValueError, match=f"no compile option '{name}': write mem_efficient_sort="):
        jitted(X)
    thunder.jit(net(), executors=[], transforms=[MemEfficient()], nv_store_fusion_inputs=False)(X)  # nor any other


# --- PyTorch's features ------------------------------------------------------------------------------


@pytest.mark.slow
def test_parametrize():
    class Scaled(nn.Module):
        def forward(self, w):
            return w.triu() + w.tril(-1) * 0.5

    def make():
        model = net()
        nn.utils.parametrize.register_parametrization(model[2], "weight", Scaled())
        return model

    model = make()
    jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)])
    assert_close(seen(jitted, model.parameters()), in_float64(make))
    assert last_plan(jitted) is not None


def test_gradient_accumulation():
    model, eager = net(), net().double()
    jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)])
    for k in range(3):
        x = randn(16, 8, grad=False, seed=k)
        jitted(x).square().sum().backward()
        eager(x.double()).square().sum().backward()
    assert_close([p.grad.double() for p in model.parameters()], [p.grad for p in eager.parameters()])
    assert last_plan(jitted) is not None


@pytest.mark.slow
def test_functional_call():
    """Through ThunderFX: Thunder's own interpreter does not follow `functional_call`."""
    torch._dynamo.reset()
    model, eager = net(), net().double()
    compiled = thunderfx(
        lambda parameters, x: torch.func.functional_call(model, parameters, (x,)),
        transforms=[MemEfficient(strict=True)],
        executors=["mem_pointwise"],
    )
    others = {name: (p * 0.9).detach().requires_grad_() for name, p in model.named_parameters()}
    doubles = {name: p.detach().double().requires_grad_() for name, p in others.items()}
    got = seen(lambda x: compiled(others, x), others.values())
    expected = seen(lambda x: torch.func.functional_call(eager, doubles, (x,)), doubles.values(), X.double())
    assert_close(got, expected)
    assert last_plan(compiled) is not None and len(fx.subgraphs(compiled)) == 1


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    if name == "gpt2":
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).eval()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param("llama", "thunderfx", marks=pytest.mark.slow),
        pytest.param("bert", "thunderfx", marks=pytest.mark.slow),
        pytest.param("llama", "jit", marks=pytest.mark.slow),  # Thunder's interpreter takes a minute to trace it
        pytest.param("gpt2", "jit", marks=pytest.mark.slow),
    ],
)
def test_hugging_face_models(name, way):
    torch._dynamo.reset()
    model, eager = hugging_face(name), hugging_face(name).double()
    compile_with = thunder.jit if way == "jit" else thunderfx
    compiled = compile_with(model, transforms=[MemEfficient(strict=True)])
    ids = torch.arange(24).reshape(2, 12) % 50
    # Of a whole mask transformers makes none of its own, which Thunder 0.2.6 cannot trace.
    mask = torch.ones(12, 12).tril().log().expand(2, 1, 12, 12).contiguous()
    arguments = (
        {"attention_mask": torch.ones_like(ids)} if name == "bert" else {"attention_mask": mask, "use_cache": False}
    )

    def run(called, own):
        arguments["attention_mask"] = arguments["attention_mask"].to(
            next(own.parameters()).dtype if name != "bert" else torch.int64
        )
        logits = called(input_ids=ids, **arguments).logits
        parameters = dict(own.named_parameters())
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return [logits.detach().double(), *(g.double() for g in grads if g is not None)]

    assert_close(run(compiled, model), run(eager, eager), 1e-4)
    assert last_plan(compiled) is not None
