"""Code that Thunder traces means what it means with PyTorch."""

from collections import namedtuple
from typing import NamedTuple

import pytest
import thunder
import torch
import torch.nn as nn
import torch.nn.functional as F
from thunder.core.interpreter import InterpreterError
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_mem import MemEfficient, predict

WIDTHS = {torch.float32: 4.0, torch.bfloat16: 2.0}

QUESTIONS = {
    "equal": lambda x, m: x.dtype == torch.float32,
    "equal from the right": lambda x, m: torch.bool == m.dtype,
    "unequal": lambda x, m: x.dtype != torch.float32,
    "identical": lambda x, m: x.dtype is torch.float32,
    "among": lambda x, m: x.dtype in (torch.float16, torch.bfloat16, torch.float32),
    "of a value": lambda x, m: (x > 0).dtype == m.dtype == torch.bool,
    "by getattr": lambda x, m: getattr(m, "dtype", None) == torch.bool,
    "of another": lambda x, m: x.to(torch.bfloat16).dtype == torch.bfloat16 and x.to(m.dtype).dtype == torch.bool,
    "of a new tensor": lambda x, m: torch.zeros(2, dtype=x.dtype).dtype == x.dtype,
    "its own attributes": lambda x, m: x.dtype.is_floating_point and x.dtype.itemsize == 4,
    "the default": lambda x, m: torch.get_default_dtype() == x.dtype,
    "a key": lambda x, m: WIDTHS[x.dtype] == 4.0,
    "a number of it": lambda x, m: torch.finfo(x.dtype).eps < 1e-6,
}


def branching(question):
    def fn(x, mask):
        return x * 2 if question(x, mask) else x.masked_fill(mask, -1.0)

    return fn


@pytest.mark.parametrize("name", QUESTIONS)
def test_dtypes_are_pytorchs(name):
    fn = branching(QUESTIONS[name])
    x, mask = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    for given in (x, x.to(torch.bfloat16)) if name != "a number of it" else (x,):
        found = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(given, mask)
        torch.testing.assert_close(found, fn(given, mask), rtol=0, atol=0)


def test_of_parameters_and_under_autocast():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x.to(self.linear.weight.dtype))
            return y.float() * 2 if y.dtype == torch.bfloat16 else y

    model, x = Model(), torch.randn(3, 4, dtype=torch.float64)
    compiled = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(compiled(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x))


def test_other_programs_are_traced_as_before():
    MemEfficient()
    x, mask = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    fn = branching(QUESTIONS["equal"])
    if not torch.equal(thunder.jit(fn, executors=[])(x, mask), x.masked_fill(mask, -1.0)):
        pytest.fail("Thunder compares dtypes as PyTorch: `traced_code` need not change `getattr`")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 1, enable_nested_tensor=False)
    with pytest.raises(NotImplementedError, match="data dependency"):
        thunder.jit(encoder)(torch.randn(3, 2, 4), mask=nn.Transformer.generate_square_subsequent_mask(3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [None, True, False])
def test_an_encoder_with_a_mask_is_compiled(causal):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    compiled = thunder.jit(encoder, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(compiled(x, mask=mask, is_causal=causal), encoder(x, mask=mask, is_causal=causal))


@pytest.mark.parametrize("module", [nn.LogSoftmax(-1), nn.Softmin(0), nn.Softmax(1)])
def test_softmax_modules_are_compiled(module):
    x = torch.randn(3, 4)
    torch.testing.assert_close(thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True)])(x), module(x))


@pytest.mark.parametrize("name", ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"])
@pytest.mark.parametrize("training", [True, False])
def test_dropouts_in_place_write(name, training):
    x = torch.randn((3, 4, 5, 2, 2)[: {"dropout1d": 3, "dropout2d": 4}.get(name, 5)], dtype=torch.float64)

    def drop(z):
        return getattr(F, name)(z, 0.4, training, inplace=True)

    def fn(x):
        z = x * 2
        drop(z)
        return drop(z.sin()) * 2 + z.sum()

    found = []
    for call in (fn, thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        out = call(given)
        found.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), given)))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


def test_a_plain_dropout_in_place_writes():
    drop = nn.Dropout(0.4, inplace=True)

    def fn(x):
        z = x * 2
        drop(z)
        return z

    x = torch.ones(64, requires_grad=True)
    out = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert 0 < (out == 0).sum() < 64
    torch.testing.assert_close(grad, out.detach())


def test_remainders_of_integers_and_signs():
    def fn(i):
        return i % 3 + 5 % (i + 9) + (+i)

    i = torch.arange(-4, 5)
    assert torch.equal(thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(i), fn(i))


@pytest.mark.parametrize("module", [torch.nn.LogSoftmax(), torch.nn.Softmin()])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_softmax_modules_without_a_dim(module):
    for shape in ((4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(
            thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True)])(x), module(x)
        )


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor | None = None


Pair = namedtuple("Pair", "first second")

RESULTS = {
    "alone": lambda x: Output(x.sum(), x.sin()),
    "in each other": lambda x: Output(x.sum(), (Pair(x.sin(), 3), [x.cos()])),
    "in a dict": lambda x: {"a": Pair(x.sin(), x), "b": [Pair(1, Output(x.exp()))]},
    "of numbers": lambda x: (x.sin(), Pair(1, None)),
    "read as well": lambda x: (pair := Pair(x.sin(), x.cos()), pair.first * pair[1]),
}


@pytest.mark.parametrize("executors", [[], None], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_named_tuples(name, executors):
    fn, x = RESULTS[name], torch.rand(3, requires_grad=True)
    jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)], **({} if executors is None else {"executors": []}))
    for _ in range(2):
        found, expected = jitted(x), fn(x)
        torch.testing.assert_close(found, expected)
        parts, structure = torch.utils._pytree.tree_flatten(found)
        others, as_expected = torch.utils._pytree.tree_flatten(expected)
        assert structure == as_expected
        (grad,), (exact,) = (
            torch.autograd.grad(sum(t.sum() for t in ts if isinstance(t, torch.Tensor)), x) for ts in (parts, others)
        )
        torch.testing.assert_close(grad, exact)
    assert predict(jitted, x).peak_bytes > 0


@pytest.mark.parametrize("backends", [SDPBackend.MATH, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]])
def test_a_choice_of_attentions_kernel_does_nothing_but_warn(backends):
    def fn(q):
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 4, 8)
    jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)])
    with pytest.warns(UserWarning, match="sdpa_kernel"):
        torch.testing.assert_close(jitted(q), fn(q))
    with pytest.raises(InterpreterError, match="fromkeys"):
        thunder.jit(fn)(q)


def test_a_part_named_for_the_profiler_is_as_without_the_name():
    def fn(q):
        with torch.profiler.record_function("scores"):
            return (q @ q.mT).softmax(-1)

    q = torch.randn(2, 4, 8, requires_grad=True)
    found = thunder.jit(fn, transforms=[MemEfficient(strict=True)])(q)
    torch.testing.assert_close(found, fn(q))
    torch.testing.assert_close(*(torch.autograd.grad(r.square().sum(), q) for r in (found, fn(q))))


class MovingMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        self.mean.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
        return (y * self.mean.data).sum() + (y.data * y).mean()


def test_data_of_a_tensor_has_no_gradient_and_is_written():
    torch.manual_seed(0)
    module, x = MovingMean(), torch.randn(3, 4)
    eager = MovingMean()
    eager.load_state_dict(module.state_dict())
    jitted = thunder.jit(module, transforms=[MemEfficient(strict=True)])
    for _ in range(2):
        for program in (jitted, eager):
            program(x).backward()
    torch.testing.assert_close(module.mean, eager.mean)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
