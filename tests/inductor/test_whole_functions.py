"""Functions that Thunder passes to PyTorch whole are written out: PyTorch's values and gradients, and they fuse."""

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, measure_peak, predict
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.torch_functions.random_functions import RANDOM
from thunder_mem.torch_functions.recurrent import RECURRENT
from thunder_mem.torch_functions.whole_functions import FUSED, WRITTEN_OUT

A = torch.arange(-12.0, 12).reshape(4, 6).double() / 4  # kinks and bounds are among its elements
B = A.flip(0) * 0.5
POSITIVE = B.abs() + 0.25
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0]).double()[:, None].expand(4, 6).contiguous()
FAR = torch.tensor([0, 0, torch.inf, 0, 0, -torch.inf], dtype=torch.float64)
IMAGE = torch.randn(2, 8, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

FUNCTIONS = {
    "absolute": lambda x, y: torch.absolute(x) + x.absolute() * y,
    "diff": lambda x, y: torch.diff(x, dim=0) * y.diff(dim=0),
    "divide": lambda x, y: torch.divide(x, y.abs() + 1) + x.divide(2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25) * x.lerp(y, 0.75),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, POSITIVE) * torch.lerp(y, POSITIVE, x),
    "moveaxis": lambda x, y: torch.moveaxis(x, 0, 1) @ y.moveaxis(-1, -2).t(),
    "multiply": lambda x, y: torch.multiply(x, y) + x.multiply(3),
    "narrow": lambda x, y: torch.narrow(x, 1, 1, 3) * y.narrow(-1, -4, 3),
    "negative": lambda x, y: torch.negative(x) * y.negative(),
    "subtract": lambda x, y: torch.subtract(x, y, alpha=2) * x.subtract(y),
    "swapaxes": lambda x, y: torch.swapaxes(x, 0, 1) @ y.swapaxes(-1, 0).t(),
    "expand_as": lambda x, y: x[:1].expand_as(y) * y,
    "reshape_as": lambda x, y: x.reshape_as(y.t()) * y.t(),
    "view_as": lambda x, y: x.view_as(y.view(3, 8)) * x.view_as(x).reshape(3, 8),
    "swapdims": lambda x, y: x.swapdims(0, 1) * y.swapdims(1, 0),
    "clamp": lambda x, y: torch.clamp(x, -1, 1.5) * y.clamp(max=0.5),
    "clamp by tensors": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp_max": lambda x, y: torch.clamp_max(x, 1) * y.clamp_max(0.25),
    "clamp_min": lambda x, y: torch.clamp_min(x, 0) * y.clamp_min(-0.25),
    "clip": lambda x, y: torch.clip(x, -1, 1) * y.clip(min=0),
    "clip from above to below": lambda x, y: torch.clip(x, 1, -1) * y,
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, -1) + F.cosine_similarity(x[:1], y, dim=1),
    "cosine of zeros": lambda x, y: F.cosine_similarity(x * (x > 0), y * 0, -1),
    "cosine of short rows": lambda x, y: (
        F.cosine_similarity(x / 8, y, -1, eps=1.0) + F.cosine_similarity(x, y, -1, eps=3.0)
    ),
    "clamp to a single value": lambda x, y: torch.clamp(x, y, y) + torch.clamp(x, y.abs(), -y.abs()),
    "clip of infinities": lambda x, y: torch.clip(x / x.relu(), -1, 1).nan_to_num(3.0) * y,
    "huber_loss of infinities": lambda x, y: F.huber_loss(x + FAR, y) + F.huber_loss(x, y, delta=torch.inf),
    "smooth_l1_loss of infinities": lambda x, y: F.smooth_l1_loss(x + FAR, y) + F.smooth_l1_loss(x, y, beta=5e-324),
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.5) + F.huber_loss(x, y, "sum", 2.0),
    "cosine_embedding_loss": lambda x, y: (
        F.cosine_embedding_loss(x, y, SIGNS[:, 0], 0.25)
        + F.cosine_embedding_loss(x[0], y[0], SIGNS[0, 0], reduction="none")
    ),
    "hinge_embedding_loss": lambda x, y: (
        F.hinge_embedding_loss(x * y, SIGNS) + F.hinge_embedding_loss(x, y.sign(), 0.5)
    ),
    "margin_ranking_loss": lambda x, y: (
        F.margin_ranking_loss(x, y, SIGNS, 0.5) + F.margin_ranking_loss(x, y, SIGNS[:1], reduction="none")
    ),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y) + F.pairwise_distance(x, y[:1], eps=0.0, keepdim=True),
    "pairwise_distance of equal rows": lambda x, y: F.pairwise_distance(x, A, eps=0.0).sum() * y,
    "poisson_nll_loss": lambda x, y: (
        F.poisson_nll_loss(x, POSITIVE, full=True) + F.poisson_nll_loss(x.abs(), y, log_input=False, reduction="none")
    ),
    "triplet_margin_loss": lambda x, y: (
        F.triplet_margin_loss(x, y, POSITIVE, swap=True)
        + F.triplet_margin_loss(x, y, POSITIVE[:1], margin=0.5, reduction="none")
    ),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, SIGNS) + F.soft_margin_loss(y, SIGNS, reduction="none"),
    "binary_cross_entropy_with_logits": lambda x, y: (
        F.binary_cross_entropy_with_logits(FAR * x, y, weight=B[:, :1], pos_weight=POSITIVE[0])
        + F.binary_cross_entropy_with_logits(x, y, reduction="none")
        + F.binary_cross_entropy_with_logits(y, POSITIVE, reduction="sum")
    ),
    "kl_div": lambda x, y: F.kl_div(x, y.exp(), reduction="batchmean") + F.kl_div(x, y, log_target=True),
    "l1_loss": lambda x, y: F.l1_loss(x, y) + F.l1_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y) + F.smooth_l1_loss(x, y, reduction="sum", beta=0.5),
    "smooth_l1_loss of beta 0": lambda x, y: F.smooth_l1_loss(x, y, beta=0.0),
    "pixel_shuffle": lambda x, y: F.pixel_shuffle(IMAGE * x.sum(), 2) * F.pixel_shuffle(IMAGE[0] * y.mean(), 2),
    "pixel_unshuffle": lambda x, y: F.pixel_unshuffle(IMAGE * x.sum(), 2) * y.mean(),
    "addmm": lambda x, y: torch.addmm(x[0], y, x.t() @ y) * x.addmm(y, x.t() @ y, beta=0.5, alpha=2),
    "spmm is mm": lambda x, y: torch.mm(x, y.t()).mm(x),
    "mv": lambda x, y: torch.mv(x, y[0]) * y.mv(x[1]),
    "dot": lambda x, y: torch.dot(x[0], y[1]) * y[2].dot(x[3]) * x,
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2) * torch.rsub(y, 1),
    "double": lambda x, y: (x.float() * y.float()).double() * x.double(),
    "half": lambda x, y: x.half().double() * y,
    "bfloat16": lambda x, y: x.bfloat16().double() * y,
    "bool": lambda x, y: x * y.bool(),
    "byte": lambda x, y: x * y.abs().byte(),
    "char": lambda x, y: x * y.char(),
    "int": lambda x, y: x * y.int(),
    "short": lambda x, y: x * y.short(),
    "norm": lambda x, y: x.norm() * y.norm(2, dim=(0, 1), keepdim=True) * torch.norm(x, dim=1, keepdim=True) * y,
    "norm of zeros": lambda x, y: (x * (x > 0)).norm(dim=-1) * (y * 0).norm() + (FAR * x).norm(dim=0)[0],
    "linalg.norm": lambda x, y: torch.linalg.norm(x) * torch.linalg.norm(y, 2, dim=-1) * torch.linalg.norm(x[0], ord=2),
    "linalg.vector_norm": lambda x, y: torch.linalg.vector_norm(x, dim=[1]) * torch.linalg.vector_norm(y),
    "normalize": lambda x, y: F.normalize(x) * F.normalize(y, dim=0, eps=2.0) + F.normalize(FAR * x, dim=-1),
    "roll": lambda x, y: torch.roll(x, 2, 0) * y.roll((-1,), (1,)) + x.roll(7),
}
LEFT_WHOLE = {
    "a quotient rounded down": lambda x, y: x * torch.divide(x, y.abs() + 1, rounding_mode="floor"),
    "a quotient cut off": lambda x, y: x * x.divide(y.abs() + 1, rounding_mode="trunc"),
    "a pixel_shuffle of single pixels": lambda x, y: (
        F.pixel_shuffle(x[:, 0].reshape(1, 4, 1, 1), 2).mul_(3).sum() * x * y
    ),
    "a cosine of broadcast dims": lambda x, y: F.cosine_similarity(x, y[:, :1], -1).sum() + x * y,
    "a clip by what is no number": lambda x, y: torch.clip(x, torch.nan, 1).nan_to_num(2.0) * y,
    "clip of integers": lambda x, y: x * y.mul(4).long().clip(-1, 1),
    "diff of order two": lambda x, y: x.diff(n=2) * y.diff(n=2, dim=1),
    "a cosine of other dims": lambda x, y: F.cosine_similarity(x[0], y, dim=1),
    "activations that clamp": lambda x, y: F.relu6(x) * F.hardtanh(y) + F.hardswish(4 * x),
    "a roll along two dims": lambda x, y: x * y.roll((1, -2), (0, 1)),
    "a roll by nothing": lambda x, y: x.roll(4, 0) * y,
    "a distance by the sum": lambda x, y: F.pairwise_distance(x, y, p=1).sum() + x * y,
    "a sum of absolutes": lambda x, y: x.norm(1) * torch.linalg.vector_norm(y, 3.0, dim=0) * x,
    "a matrix's norm": lambda x, y: torch.linalg.norm(x @ y.t() + torch.diag(x[0, :4]), 2) * x,
    "a norm of nothing": lambda x, y: torch.linalg.vector_norm(x, dim=()) * y,
    "a loss that broadcasts": lambda x, y: F.l1_loss(x, y[:1].expand(4, 6)),
}
OTHERS = (F.multi_head_attention_forward, F.scaled_dot_product_attention, torch.lstm_cell, torch.meshgrid)
THUNDERS = ("clamp", "clamp by tensors", "clamp to a single value")


def compiled(fn, executors):
    return thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True)])


def seen(call):
    x, y = A.clone().requires_grad_(), B.clone().requires_grad_()
    out = call(x, y)
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), [x, y], allow_unused=True)
    return out, *(torch.zeros(()) if g is None else g for g in grads)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", FUNCTIONS | LEFT_WHOLE)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_values_and_gradients_are_pytorchs(name, executors):
    if name in THUNDERS and not executors:
        pytest.skip("whole, and with Thunder's derivative at the bounds")
    fn = (FUNCTIONS | LEFT_WHOLE)[name]
    jitted = compiled(fn, executors)
    with uncompiled_regions():
        found = seen(jitted)
    for mine, eager in zip(found, seen(fn), strict=True):
        torch.testing.assert_close(mine, eager.expand_as(mine), rtol=1e-12, atol=1e-12, equal_nan=True)
    if name in FUNCTIONS and executors:
        whole = [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols]
        assert not [called for called in whole if called.endswith("_vjp")]


def test_each_function_is_tried():
    tried = {name.split()[0].rpartition(".")[2] for name in FUNCTIONS}
    # In `tests/torch_functions`.
    elsewhere = {ltorch._torch_to_thunder_function_map[fn].id for fn in (*RANDOM, *RECURRENT, *OTHERS)}
    assert {str(symbol).rpartition(".")[2] for symbol in {*FUSED, *WRITTEN_OUT} - elsewhere} <= tried


def test_bounds_are_rounded_as_the_tensor_is():
    x = torch.tensor([0.1, 0.3, 0.7], dtype=torch.bfloat16).requires_grad_()
    for fn in (lambda x: torch.clip(x, 0.1, 0.3), compiled(lambda x: torch.clip(x, 0.1, 0.3), [mem_pointwise_ex])):
        (grad,) = torch.autograd.grad(fn(x).sum(), x)
        assert grad.tolist() == [1, 1, 0]


@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: F.smooth_l1_loss(x, y, beta=-1.0),
        lambda x, y: F.huber_loss(x, y, delta=0.0),
    ],
)
def test_what_eager_refuses_is_refused(fn, executors):
    for call in (fn, compiled(fn, executors)):
        with pytest.raises((RuntimeError, ValueError)):
            call(A, B)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["clip", "multiply", "l1_loss", "roll", "norm"])
def test_fused_they_peak_below_eager(name):
    x, y = torch.randn(64, 256, requires_grad=True), torch.randn(64, 256, requires_grad=True)

    def loss(x, y):
        return FUNCTIONS[name](x, y).square().sum()

    eager_bytes = measure_peak(lambda: loss(x, y).backward())
    x.grad = y.grad = None
    assert predict(compiled(loss, [mem_pointwise_ex]), x, y).measured_bytes < 0.9 * eager_bytes


@pytest.mark.parametrize("name", ["addmm", "mm"])
def test_products_are_made_once_and_peak_as_in_eager(name):
    w, x = torch.randn(16, 64, requires_grad=True), torch.randn(256, 16, requires_grad=True)
    g = torch.randn(256, 64)

    def product(x, w):
        return torch.addmm(w[0], x, w) if name == "addmm" else torch.mm(x, w)

    eager_bytes = measure_peak(lambda: product(x, w).backward(g))
    x.grad = w.grad = None
    jitted = compiled(product, [])
    for _ in range(2):  # the first call compiles
        compiled_bytes = measure_peak(lambda: jitted(x, w).backward(g))
        x.grad = w.grad = None
    assert compiled_bytes <= eager_bytes


@pytest.mark.parametrize("fused", [True, False])
def test_a_view_that_is_written_is_written(fused):
    def fn(x):
        y = x * 2
        y.narrow(0, 1, 2).mul_(3)
        y.swapaxes(0, 1)[2].add_(1)
        y.lerp_(x.cos(), 0.25).clamp_(max=2)
        return y.sin()

    with uncompiled_regions():
        for call in (fn, compiled(fn, [mem_pointwise_ex] if fused else [])):
            x = A.clone().requires_grad_()
            out = call(x)
            (grad,) = torch.autograd.grad(out.sum(), x)
            if call is fn:
                expected = out, grad
    torch.testing.assert_close((out, grad), expected, rtol=1e-12, atol=1e-12)
