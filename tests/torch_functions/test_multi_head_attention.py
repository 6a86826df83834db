"""`nn.MultiheadAttention` and the layers of `nn.Transformer`: eager's values and gradients."""

import itertools

import pytest
import thunder
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient
from thunder_mem.executors import mem_pointwise_ex

pytestmark = pytest.mark.filterwarnings("error:Thunder's autograd loses gradients")

L, S, B, E, H = 5, 7, 3, 12, 4
FLOAT = torch.float64
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=FLOAT)
PADDED = torch.arange(S).expand(B, S) >= torch.tensor([[7], [5], [6]])


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE, NARROW = drawn(L, B, E), drawn(S, B, E, seed=1), drawn(S, B, E, seed=2), drawn(S, B, 8, seed=3)
EMPTY = torch.tensor([[False] * 5, [True, True] + [False] * 3, [False] * 5])
BY_HEAD = drawn(B * H, L, S, seed=4)

CALLS = {
    "self": ({}, lambda m, x, k: m(x, x, x)),
    "self without weights": ({}, lambda m, x, k: m(x, x, x, need_weights=False)),
    "batch first": ({"batch_first": True}, lambda m, x, k: m(x, x, x, need_weights=False)),
    "one sample": ({}, lambda m, x, k: m(x[:, 0], x[:, 1], x[:, 2], average_attn_weights=False)),
    "one sample, padded": ({}, lambda m, x, k: m(x[:, 0], k[:, 0], k[:, 0], PADDED[1], need_weights=False)),
    "keys are values": ({}, lambda m, x, k: m(x, k, k)),
    "keys are values without bias": ({"bias": False}, lambda m, x, k: m(x, k, k, need_weights=False)),
    "three arguments": ({}, lambda m, x, k: m(x, k, VALUE, need_weights=False)),
    "other widths": ({"kdim": 12, "vdim": 8}, lambda m, x, k: m(x, k, NARROW)),
    "padded": ({}, lambda m, x, k: m(x, k, k, PADDED)),
    "padded without weights": ({}, lambda m, x, k: m(x, k, k, PADDED.to(FLOAT) * -2, need_weights=False)),
    "causal": ({}, lambda m, x, k: m(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False)),
    "causal with weights": ({}, lambda m, x, k: m(x, x, x, attn_mask=CAUSAL, is_causal=True)),
    "causal, padded": (
        {},
        lambda m, x, k: m(x, x, x, PADDED[:, 2:], attn_mask=CAUSAL < 0, is_causal=True, need_weights=False),
    ),
    "a mask for each head": (
        {},
        lambda m, x, k: m(x, k, k, attn_mask=BY_HEAD, need_weights=False),
    ),
    "rows of bias and zeros": (
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda m, x, k: m(x, k, k, PADDED, attn_mask=BY_HEAD[0]),
    ),
    "no key for a query, dropout": (
        {"dropout": 0.4},
        lambda m, x, k: m(x, x, x, EMPTY, attn_mask=CAUSAL < 0, need_weights=False),
    ),
    "dropout": ({"dropout": 0.4}, lambda m, x, k: m(x, k, k)),
    "dropout without weights": ({"dropout": 0.4}, lambda m, x, k: m(x, x, x, need_weights=False)),
}


def seen(fn, module, *inputs):
    torch.manual_seed(3)
    given = [x.clone().requires_grad_() for x in inputs]
    outputs = fn(*given)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    loss = sum((y * torch.arange(y.numel(), dtype=FLOAT).view(y.shape).cos()).sum() for y in outputs)
    grads = torch.autograd.grad(loss, [*given, *module.parameters()], allow_unused=True)
    return *outputs, *(torch.zeros((), dtype=FLOAT) if g is None else g for g in grads)


def assert_like_eager(module, call, executors, *inputs):
    def fn(*inputs):
        return call(module, *inputs)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            return call(self.module, *inputs)

    with uncompiled_regions():
        compiled = thunder.jit(Model(), executors=executors, transforms=[MemEfficient(strict=True)])
        found = seen(compiled, module, *inputs)
    for mine, eager in zip(found, seen(fn, module, *inputs), strict=True):
        torch.testing.assert_close(mine, eager.expand_as(mine), rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", CALLS)
def test_attention_is_eagers(name, executors):
    options, call = CALLS[name]
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **options).to(FLOAT)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    assert_like_eager(module, call, executors, QUERY, KEY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("training", "norm_first"), itertools.product([True, False], [True, False]))
@pytest.mark.parametrize(
    "layer", [nn.TransformerEncoderLayer, pytest.param(nn.TransformerDecoderLayer, marks=pytest.mark.slow)]
)
def test_layers_train(layer, training, norm_first):
    torch.manual_seed(0)
    module = layer(E, nhead=H, dim_feedforward=16, dropout=0.25, norm_first=norm_first).to(FLOAT).train(training)

    def call(m, x, memory):
        if isinstance(m, nn.TransformerEncoderLayer):
            return m(x + memory.mean(), src_mask=CAUSAL, is_causal=True)
        return m(x, memory, tgt_mask=CAUSAL, memory_key_padding_mask=PADDED)

    assert_like_eager(module, call, [mem_pointwise_ex], QUERY, KEY)


@pytest.mark.slow
def test_a_transformer_trains():
    torch.manual_seed(0)
    module = nn.Transformer(E, H, 1, 1, 16, dropout=0.0, activation="gelu", batch_first=True).to(FLOAT)
    source, target = KEY.transpose(0, 1).contiguous(), QUERY.transpose(0, 1).contiguous()
    assert_like_eager(module, lambda m, x, y: m(x, y, tgt_mask=CAUSAL), [mem_pointwise_ex], source, target)


def test_static_keys_stay_whole():
    torch.manual_seed(0)
    w, out, b = drawn(3 * E, E), drawn(E, E, seed=1), drawn(E, seed=2)
    static = drawn(B * H, S, E // H, seed=3)

    def fn(x):
        return F.multi_head_attention_forward(
            x, x, x, E, H, w, None, None, None, False, 0.0, out, b, static_k=static, static_v=static
        )[0]

    found = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(QUERY)
    torch.testing.assert_close(found, fn(QUERY))


def test_an_encoder_is_evaluated_and_frozen():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 1).to(FLOAT).eval()
    compiled = thunder.jit(encoder, executors=[], transforms=[MemEfficient(strict=True)])
    for p in encoder.parameters():
        p.requires_grad_(False)
    torch.testing.assert_close(compiled(QUERY), encoder(QUERY))
    with torch.no_grad():
        torch.testing.assert_close(compiled(QUERY), encoder(QUERY))
