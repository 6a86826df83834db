"""Composites by PyTorch's own kernels: results against float64, what is kept, what stays Thunder's."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.extend import get_executor
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, last_plan, measure_peak
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.kernels.kernel_executor import is_float
from thunder_mem.kernels.registered import mem_gradients_ex, mem_kernels_ex
from thunder_mem.prediction.predict import predict

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ACTIVATIONS = {
    "celu": lambda x: F.celu(x, 0.5),
    "elu": lambda x: F.elu(x, 0.7),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "mish": F.mish,
    "relu": F.relu,
    "relu6": lambda x: F.relu6(3 * x),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(1),
    "softmax of a dim that is not dense": lambda x: F.softmax(x.transpose(1, 2), -2),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "softshrink": F.softshrink,
    "tanh": torch.tanh,
}
NORMS = {
    "layer": lambda: nn.LayerNorm((5, 6)),
    "layer, no bias": lambda: nn.LayerNorm(6, bias=False),
    "layer, no parameters": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "group, no parameters": lambda: nn.GroupNorm(2, 4, affine=False),
    "batch": lambda: nn.BatchNorm2d(4, momentum=0.3),
    "batch, no parameters": lambda: nn.BatchNorm2d(4, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch, evaluated": lambda: nn.BatchNorm2d(4).eval(),
}


def planned(fn, executors=()):
    return thunder.jit(fn, executors=list(executors), transforms=[MemEfficient(strict=True)])


def traces(jitted):
    return f"{thunder.last_traces(jitted)[-1]}\n{thunder.last_backward_traces(jitted)[-1:]}"


def seen(fn, call, args):
    """Outputs, gradients of arguments and parameters, and buffers, in float64."""
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    outs = call(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum((o * (o.detach() + 1)).sum() for o in outs).backward()
    owned = [*fn.parameters(), *fn.buffers()] if isinstance(fn, nn.Module) else []
    grads = [t.grad for t in (*args, *owned) if t.requires_grad]
    buffers = list(fn.buffers()) if isinstance(fn, nn.Module) else []
    return [t.detach().double() for t in (*outs, *grads, *buffers)]


def assert_like_eager(fn, args, executors=()):
    """Where rounded in another place than eager, no further from float64 than twice eager's own distance."""
    mine, exact = copy.deepcopy(fn), copy.deepcopy(fn)
    exact = exact.double() if isinstance(fn, nn.Module) else exact
    jitted = planned(mine, executors)
    found = seen(mine, jitted, args)
    eager = seen(fn, fn, args)
    true = seen(exact, exact, [a.detach().double().requires_grad_(a.requires_grad) for a in args])
    eps = torch.finfo(args[0].dtype).eps
    for a, e, t in zip(found, eager, true, strict=True):
        scale = float(t.abs().max()) + 1
        assert float((a - t).abs().max()) <= 2 * float((e - t).abs().max()) + 4 * eps * scale
    return jitted


def images(dtype=torch.float32, *, last=False):
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64).to(dtype)
    return (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_eager_ones(dtype):
    def all_of_them(*xs):
        return tuple(activation(x) for activation, x in zip(ACTIVATIONS.values(), xs, strict=True))

    jitted = assert_like_eager(all_of_them, [torch.randn(2, 3, 7).to(dtype).requires_grad_() for _ in ACTIVATIONS])
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert backward.count(" = mem_") == len(ACTIVATIONS)


IN_PLACE = sorted(ACTIVATIONS.keys() - {"hardswish", "mish", "softmax", "softmax of a dim that is not dense"})


def between_products(activation):
    def fn(x, w, v):
        return activation(x @ w) @ v

    return fn


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_derivative_is_written_over_the_gradient_that_dies(name):
    fn = between_products(ACTIVATIONS[name])
    args = [torch.randn(n, m).requires_grad_() for n, m in ((64, 8), (8, 64), (64, 8))]
    jitted = assert_like_eager(fn, args)
    assert "_backward_over_gradient(" in str(thunder.last_backward_traces(jitted)[-1])

    def peak(call):
        def step():
            call(*args).sum().backward()

        step()
        return measure_peak(step)

    apart = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True, reuse=False)])
    alone = thunder.jit(fn, executors=[])
    assert peak(jitted) <= min(peak(apart), peak(alone), peak(fn))


def test_a_gradient_that_something_else_holds_is_not_written_over():
    def read_again(x, w):
        h = x @ w
        return h.relu() @ w + h  # the derivative of `h` is read before and after

    def of_the_caller(x):
        return x.tanh()

    def turned(x, w):
        return (x @ w).sigmoid().t() @ w

    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    for fn, args in ((read_again, [x, w]), (of_the_caller, [x]), (turned, [x, w])):
        assert_like_eager(fn, args)
    tangent = torch.ones(6, 6)
    planned(of_the_caller)(x).backward(tangent)
    assert bool((tangent == 1).all())


def test_a_kept_graph_runs_twice_with_gradients_written_over():
    fn, args = between_products(torch.relu), [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    jitted = planned(fn)
    loss = jitted(*args).sum()
    once = torch.autograd.grad(loss, args, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(loss, args)))


class All(nn.Module):
    """Norms side by side, each of an image of its own; their statistics twice."""

    def __init__(self, dtype):
        super().__init__()
        self.norms = nn.ModuleList(make() for make in NORMS.values()).to(dtype)
        for p in self.norms.parameters():
            nn.init.normal_(p)

    def forward(self, *xs):
        return tuple(norm(2 * x) for norm, x in zip(self.norms, xs, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_norms_equal_eager_ones(dtype, last):
    jitted = assert_like_eager(All(dtype), [images(dtype, last=last) for _ in NORMS])
    assert str(thunder.last_backward_traces(jitted)[-1]).count("norm_backward(") == len(NORMS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["layer", "group", "batch", "batch, no parameters"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_proxies_and_fake_tensors_tell_the_truth(name, dtype):
    """The memory model believes what the operators say about tensors that are not there."""
    norm, x = NORMS[name]().to(dtype), images(dtype)
    jitted = planned(norm)
    prediction = predict(jitted, x, keep_outputs=True)
    jitted(x).sum().backward()
    (bsym,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name.endswith("_norm")]
    (fn,) = bsym._call_ctx.values()
    given = [norm.weight, norm.bias, norm.eps]
    real = {"layer": lambda: fn(x, (5, 6), *given), "group": lambda: fn(x, 2, *given)}.get(
        name, lambda: fn(x, *given)
    )()
    for proxy, result in zip(bsym.output, real, strict=True):
        assert tuple(proxy.shape) == tuple(result.shape)
        assert dtypes.to_torch_dtype(proxy.dtype) == result.dtype
    x.grad = None
    norm.zero_grad()
    assert prediction.phase("forward").measured_bytes == measure_peak(lambda: jitted(x))


class Small(nn.Module):
    """What each norm and activation hands to the backward shows here."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.batch, self.group, self.layer = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(16)

    def forward(self, x):
        a, b, c = self.convolutions
        x = F.relu(self.batch(a(x)), inplace=True)
        x = F.silu(self.group(b(x)))
        return F.gelu(self.layer(c(x))).softmax(-1)


@pytest.mark.slow
def test_peaks_are_predicted_and_below_eager_and_thunder():
    model, x = Small(), torch.randn(4, 4, 16, 16)

    def peak(call):
        def step():
            out = call(x)
            torch.autograd.backward(out, torch.ones_like(out))

        step()
        model.zero_grad()
        used_bytes = measure_peak(step)
        model.zero_grad()
        return used_bytes

    jitted = planned(model)
    prediction = predict(jitted, x, tangents=[torch.ones(4, 4, 16, 16)], keep_outputs=True)
    assert prediction.measured_bytes == peak(jitted) <= peak(model)
    assert peak(jitted) < 0.8 * peak(thunder.jit(model, executors=[]))


def test_statistics_are_written_in_checkpoints_and_without_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x):
            x = checkpoint(lambda x: torch.tanh(self.norm(self.linear(x))), x, use_reentrant=False)
            with torch.no_grad():
                y = self.norm(x)
            return x, y, self.norm.running_mean * 2

    model, x = Twice(), torch.randn(5, 6)
    once = copy.deepcopy(model)
    once.forward = lambda x: Twice.forward(once, x)
    jitted = planned(model)
    for _ in range(2):
        found = jitted(x)
        found[0].sum().backward()
        with torch.no_grad():  # eager writes again in the backward of a checkpoint
            expected = once(x)
    for a, e in zip((*found, *model.buffers()), (*expected, *once.buffers()), strict=True):
        torch.testing.assert_close(a, e)


CONVOLUTIONS = {
    "plain": ((2, 4, 9, 8), (6, 4, 3, 3), {"padding": 1}),
    "strided": ((2, 4, 9, 8), (6, 4, 3, 2), {"stride": (2, 3), "padding": (0, 1)}),
    "grouped and dilated": ((2, 4, 9, 8), (8, 2, 3, 3), {"dilation": 2, "groups": 2}),
    "one dim": ((2, 4, 9), (2, 4, 3), {"padding": 2}),
    "three dims": ((2, 2, 5, 4, 3), (3, 2, 2, 2, 2), {}),
    "no bias": ((2, 4, 9, 8), (6, 4, 1, 1), {"bias": None}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_convolutions_equal_eager_ones(last):
    def all_of_them(*args):
        outs = []
        for i, (shape, _, options) in enumerate(CONVOLUTIONS.values()):
            x, weight, bias = args[3 * i : 3 * i + 3]
            function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
            outs.append(function(x * 2, weight, **{"bias": bias, **options}))
        return tuple(outs)

    args = []
    for shape, weight, _ in CONVOLUTIONS.values():
        args += [torch.randn(shape), torch.randn(weight), torch.randn(weight[0])]
        if last and len(shape) == 4:
            args[-3:-1] = [t.to(memory_format=torch.channels_last) for t in args[-3:-1]]
    args = [a.requires_grad_() for a in args]
    args[-1].requires_grad_(False)
    jitted = assert_like_eager(all_of_them, args)
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert backward.count("mem_convolution_backward(") == backward.count("_weight_backward(") == len(CONVOLUTIONS)


X, WEIGHT = torch.randn(2, 4, 6, 8).double(), torch.randn(4, 3, 2, 3).double()
POOLS = {
    "one dim": lambda x, w: F.avg_pool1d(x[0], 3, 2, 1),
    "two dims": lambda x, w: F.avg_pool2d(x * 2, (3, 2), 1, padding=1, divisor_override=5),
    "of one sample": lambda x, w: F.avg_pool2d(x[0], 3, stride=[2]),
    "three dims": lambda x, w: F.avg_pool3d(x[None], 2),
    "transposed": lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
    "transposed and dilated": lambda x, w: F.conv_transpose2d(x, w, w.sum((0, 2, 3)), stride=(1, 2), dilation=2),
    "transposed groups": lambda x, w: F.conv_transpose2d(x, w[:, :1], groups=4),
    "transposed in one dim": lambda x, w: F.conv_transpose1d(x[:, :, 0], w[:, :, 0], stride=[2]),
    "transposed in three dims": lambda x, w: F.conv_transpose3d(x[..., None], w[..., None]),
    "transposed, of one sample": lambda x, w: F.conv_transpose2d(x[0], w),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_and_transposed_convolutions_equal_eager_ones(name):
    fn = POOLS[name]
    found = []
    for call in (fn, thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])):
        x, w = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        out = call(x, w)
        grads = torch.autograd.grad((out * out.detach().sin()).sum(), [x, w], allow_unused=True)
        found.append((out, *(torch.zeros(()).double() if g is None else g for g in grads)))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager.expand_as(mine), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["one dim", "two dims", "transposed"])
def test_pools_and_transposed_convolutions_peak_as_in_eager(name):
    def loss(x, w):
        return POOLS[name](x.sin(), w).square().sum()

    x, w = torch.randn(4, 4, 64, 64, requires_grad=True), WEIGHT.float().requires_grad_()
    x = x.detach()[..., 0].clone().requires_grad_() if name == "one dim" else x
    jitted = thunder.jit(loss, executors=[], transforms=[MemEfficient(strict=True)])
    jitted(x, w)
    peak = measure_peak(lambda: jitted(x, w).backward())
    x.grad = w.grad = None
    assert peak <= measure_peak(lambda: loss(x, w).backward()) + 64


LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_losses_equal_eager_ones(dtype):
    """With weights and without; the default's ignored target is no class. Smoothed ones are not by the kernel."""
    some, all_count = torch.tensor([0, 3, -100, 6, 3]), torch.tensor([0, 3, 1, 6, 3])

    def all_of_them(weight, row, *xs):
        losses = [F.cross_entropy(row, all_count[1])]
        for i, given in enumerate(LOSSES.values()):
            targets = all_count if "ignore_index" in given else some
            losses.append(F.cross_entropy(xs[2 * i], targets, **given))
            losses.append(F.cross_entropy(xs[2 * i + 1], targets, weight, **given))
        return tuple(losses)

    rows = [torch.randn(5, 7).to(dtype).requires_grad_() for _ in range(2 * len(LOSSES))]
    args = [torch.linspace(0.2, 3, 7).to(dtype), torch.randn(7).to(dtype).requires_grad_(), *rows]
    jitted = assert_like_eager(all_of_them, args)
    assert str(thunder.last_traces(jitted)[-1]).count(" = mem_nll_loss(") == 1 + 2 * (len(LOSSES) - 1)


def test_a_loss_copies_no_probabilities():
    x, targets = torch.randn(256, 500, requires_grad=True), torch.randint(0, 500, (256,))

    def eager(x):
        return F.cross_entropy(x, targets)

    def peak(call):
        call(x).backward()
        x.grad = None
        used_bytes = measure_peak(lambda: call(x).backward())
        x.grad = None
        return used_bytes

    jitted = planned(eager)
    assert peak(jitted) <= peak(eager)
    assert predict(jitted, x).phase("forward").measured_bytes < 1.1 * x.nbytes


def test_losses_of_images_are_left_to_thunder():
    x, targets = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randint(0, 3, (2, 4, 4))
    jitted = planned(lambda x: F.cross_entropy(x, targets))
    torch.testing.assert_close(jitted(x), F.cross_entropy(x, targets))
    assert "mem_nll_loss" not in traces(jitted)


def test_only_gradients_that_something_reads_are_made():
    norm = nn.LayerNorm(6)
    norm.weight.requires_grad_(False)
    jitted = planned(lambda x: norm(x))
    jitted(torch.randn(3, 6)).sum().backward()
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert "(False, False, True)" in backward
    torch.testing.assert_close(norm.bias.grad, torch.full((6,), 3.0))


def test_one_layer_norm_read_twice_and_its_argument_too():
    def twice(x, weight):
        y = F.layer_norm(x, (6,), weight)
        return (y * y.softmax(-1) + x).relu() + F.layer_norm(y, (6,), weight)

    assert_like_eager(twice, [torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)])


def test_what_a_kernel_cannot_do_is_left_to_thunder():
    x = torch.randn(3, 6, requires_grad=True)
    jitted = planned(lambda x: F.leaky_relu(x, -0.5) + torch.arange(6).relu() + F.gelu(x[:0]).sum())
    torch.testing.assert_close(jitted(x), F.leaky_relu(x, -0.5) + torch.arange(6))
    assert "mem_" not in traces(jitted)


def test_other_devices_are_left_alone():
    with thunder.core.trace.tracectx(thunder.core.trace.TraceCtx(None)):
        there = [
            TensorProxy(shape=(2, 3), dtype=dtypes.float32, device=devices.to_device(device), requires_grad=False)
            for device in ("cpu", "cuda", "meta")
        ]
        assert list(map(is_float, there)) == [True, True, False]


@pytest.mark.parametrize("executors", [None, [mem_pointwise_ex], [mem_attention_ex], []], ids=str)
def test_gradients_that_nothing_fuses_are_pytorchs_in_every_list(executors):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    x, y = torch.randn(4, 3, 16, 16), torch.rand(4, 16, 16, 16)

    def loss(model):
        return F.binary_cross_entropy_with_logits(model(x), y)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self):
            return loss(self.net)

    jitted = thunder.jit(Loss(), executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        found = torch.autograd.grad(jitted(), list(net.parameters()))
    names = [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols]
    assert names.count("mem_convolution_weight_backward") == 2
    assert names.count("mem_convolution_backward") == 1
    fused = executors is None or mem_pointwise_ex in executors
    assert names.count("mem_binary_cross_entropy_with_logits_backward") == (not fused)
    exact = copy.deepcopy(net).double()
    x, y = x.double(), y.double()
    for mine, true in zip(found, torch.autograd.grad(loss(exact), list(exact.parameters())), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-7)


def test_fused_convolutional_networks_peak_below_eager():
    def block(inner, outer):
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64), block(64, 64))
            self.head = nn.Linear(64, 10)

        def forward(self, x, y):
            return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), y)

    net, args = Net(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
    held_bytes = sum(t.nbytes for t in (*net.state_dict().values(), *args))
    eager_bytes = held_bytes + measure_peak(lambda: net(*args).backward())
    jitted = thunder.jit(net, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        jitted(*args)
    assert last_plan(jitted).candidate.peak_bytes < 0.8 * eager_bytes


def test_they_join_where_nothing_fuses():
    assert get_executor("mem_kernels") is mem_kernels_ex
    assert get_executor("mem_gradients") is mem_gradients_ex
    x = torch.randn(3, 6, requires_grad=True)
    with uncompiled_regions():
        fused = planned(F.gelu, [mem_pointwise_ex])
        fused(x)
    assert "mem_gelu" not in traces(fused)
    given = planned(F.gelu, [mem_attention_ex])
    given(x)
    assert "mem_gelu" in traces(given)
