"""Functions that Thunder refuses, or refuses with some arguments: eager's values and gradients."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from tests.checking.gradients import with_gradients
from thunder_mem import MemEfficient, measure_peak, predict

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def dense(x):
    features = [x]
    for _ in range(3):
        features.append(torch.cat(features, 1)[:, ::2].sin())
        features[0] = features[0] * 2
    return torch.cat(features, dim=-1)


def stacked(x):
    rows = []
    for i in range(3):
        rows.append(x * i)
        rows.append(torch.stack(rows).sum(0))
    return torch.stack(tuple(rows), 1) + torch.hstack(rows).sum() + torch.vstack([x, *rows]).sum()


FUNCTIONS = {
    "lists that grow": dense,
    "lists that are stacked": stacked,
    "var": lambda x: x.var(-1, unbiased=False) + torch.var(x, False) + x.var(1, False) + x.var(0, correction=0).sum(),
    "std": lambda x: x.std(0, False, True) * torch.std(x, dim=1, unbiased=True, keepdim=True) * x.std(),
    "var_mean": lambda x: (
        torch.var_mean(x, 0, False)[0] * torch.var_mean(x, False)[1] + torch.std_mean(x, 1, False)[0][0]
    ),
    "names of results": lambda x: x.max(dim=1).values + x.topk(2, 1).values.sum() + x.sort(-1).values[:, 0] * x[:, 1],
    "places by name": lambda x: x * torch.max(x, 1, keepdim=True).indices + torch.sort(x, 0).indices,
    "decompositions by name": lambda x: torch.linalg.svd(x, full_matrices=False).S * torch.linalg.qr(x).R.sum(),
    "axis": lambda x: (
        x.sum(axis=1) * x.mean(axis=0, keepdims=True).sum()
        + torch.prod(x, axis=1) * x.var(axis=1) * torch.std(x, axis=1)
        + x.max(axis=1)[0]
    ),
    "axis of sequences": lambda x: torch.cat([x, x], axis=1) + torch.stack([x, x], axis=0).softmax(axis=1).sum(),
    "interpolate": lambda x: (
        F.interpolate(x[None, None], scale_factor=2)
        * F.interpolate(x[None, None], scale_factor=2, mode="bilinear", align_corners=False)
        * F.interpolate(x[None, None], (8, 12), mode="bilinear")
    ),
    "interpolate, corners": lambda x: (
        F.interpolate(x[None, None], (7, 9), mode="bilinear", align_corners=True)
        + F.interpolate(x[None, None], (7, 9), mode="bicubic")
        * F.interpolate(x[None, None], (7, 9), mode="bicubic", align_corners=True)
    ),
    "interpolate, down": lambda x: (
        F.interpolate(x[None, None], (2, 3), mode="area")
        + F.interpolate(x[None, None], scale_factor=0.5, mode="bilinear", antialias=True)
        + F.interpolate(x[None], 3, mode="linear")[:, None, :2]
        + F.interpolate(x[None, None], scale_factor=0.5, recompute_scale_factor=True)
        + F.interpolate(x[None, None], scale_factor=(0.6, 0.55), mode="bilinear")
    ),
    "pad": lambda x: (
        F.pad(x[None], (2, 1), mode="reflect") * F.pad(x[None], (1, 2), mode="circular")
        + F.pad(x[None], [2, 1], mode="replicate") * F.pad(x[None], (1, 2), value=3.0)
    ),
    "pads of images": lambda x: torch.nn.ReflectionPad2d(1)(x[None]) * torch.nn.ReplicationPad2d((1, 1, 1, 1))(x[None]),
    "max pools": lambda x: (
        F.max_pool2d(x[None], 3, 2, 1, 1, True) * torch.max_pool2d(x[None], (3, 3), 2, [1, 1], 1, True)
        + F.max_pool1d(x, 4, ceil_mode=True).sum() * F.max_pool2d(x[None], 2, dilation=2).sum()
    ),
    "max pools with places": lambda x: F.max_unpool1d(*F.max_pool1d(x * 2, 2, return_indices=True), 2) * x,
    "average pools": lambda x: (
        F.avg_pool2d(x[None], 3, 1, 1, count_include_pad=False) * F.avg_pool2d(x[None], 3, 1, 1, divisor_override=2)
        + F.avg_pool1d(x, 4, ceil_mode=True).sum() * F.avg_pool3d(x.expand(1, 2, 4, 6), 2, 1, 0, True).sum()
    ),
    "quantiles": lambda x: (
        torch.quantile(x, 0.3, dim=1, keepdim=True) * x.quantile(torch.tensor([0.2, 0.5], dtype=x.dtype), 0).sum()
        + torch.quantile(x, torch.tensor(0.5, dtype=x.dtype))
        + x.nanquantile(0.1, interpolation="lower")
        + torch.nanquantile(x, 1.0, dim=-1, keepdim=False).sum()
    ),
    "covariances": lambda x: torch.cov(x) * x.corrcoef() + torch.cov(x[0], correction=0) + x.t().cov().sum(),
    "combinations": lambda x: (
        torch.combinations(x[0], 3).prod(-1) * torch.combinations(x[0, :4], with_replacement=True).sum()
    ),
    "round": lambda x: x.round(decimals=1) * x + torch.round(x * 3),
    "windows": lambda x: (
        torch.stft(x.reshape(24), 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True).abs()
        * torch.hamming_window(5, False, dtype=x.dtype)[:, None]
        * torch.kaiser_window(5, dtype=x.dtype).sum()
    ),
    "linspace": lambda x: (
        x * torch.linspace(0, 1, 6, device=x.device, dtype=x.dtype, requires_grad=False)
        + x * torch.logspace(-1, 1, steps=6, base=2, dtype=x.dtype)
    ),
    "indices": lambda x: x[tuple(torch.tril_indices(4, 6, offset=-1))] * x[tuple(torch.triu_indices(4, 4))].sum(),
    "full": lambda x: x * torch.full(size=(6,), fill_value=2.0) + torch.full((4, 1), 3.0),
    "fill_": lambda x: (x * torch.empty_like(x).fill_(3.0) + x.new_zeros(6).fill_(x[0, 0])) * (x * 1).fill_(2),
    "fill_diagonal_": lambda x: (
        (x * 2).fill_diagonal_(-3.0)
        + (x.t() @ x)[:4].fill_diagonal_(True) * (x.t() * 2).fill_diagonal_(0.5, wrap=False).t()
        + torch.einsum("ab,cb,db->acd", x, x, x).fill_diagonal_(2.0).sum()
    ),
    "ranges as places": lambda x: (
        x[range(4), range(0, 6, 2) if len(x) < 3 else range(1, 5)] * x[range(3, -1, -1), 2] + x[range(2)].sum()
    ),
    "writes to ranges": lambda x: (lambda y: (y.__setitem__((range(2), range(1, 3)), x[0, 0]), y)[1])(x * 3),
    "writes to chosen rows": lambda x: (lambda y: (y.__setitem__(x[:, 0] > 0, x[0]), y)[1])(x * 3),
    "writes to chosen elements": lambda x: (lambda y: (y.__setitem__(x > 0, x[0, 0].float()), y)[1])(x * 3),
    "gaussian_nll_loss": lambda x: (
        F.gaussian_nll_loss(x, x.t().reshape(4, 6), x.exp())
        + F.gaussian_nll_loss(x, 2 * x, x[:, 0].relu(), full=True, reduction="none")
        + F.gaussian_nll_loss(x, 3 * x, 0.5, eps=1.0, reduction="sum")
        + F.gaussian_nll_loss(x, 3 * x, x[:, :1] ** 2)
        + F.gaussian_nll_loss(x[0, 0], x[1, 1], 0.3, reduction="none")
    ),
    "unfold": lambda x: x.unfold(1, 2, 2).sum(-1) * x.unfold(-2, 3, 3).sum(0)[0, 0] + x.unfold(1, 4, 4).prod(-1)[:, :1],
    "a write into windows": lambda x: (lambda y: (y.unfold(1, 2, 2).mul_(x[:, :1, None]), y)[1])(x * 3),
    "nan_to_num": lambda x: torch.log(x).nan_to_num(nan=2.0) + (x / 0).nan_to_num(posinf=1.0, neginf=-1.0),
    "normalize": lambda x: F.normalize(x, out=None) * F.normalize(x, p=1.0, dim=0) + x.H.sum() * (x.mH @ x).sum(),
    "weight_norm": lambda x: (
        torch._weight_norm(x, x[:, :1], -2) * torch._weight_norm(x, x[:1], 1)
        + torch._weight_norm(x, x.sum(), -1) * torch._weight_norm(x[0], x[1], 0)
    ),
    "keys for several heads": lambda x: (
        F.scaled_dot_product_attention(
            x.view(2, 4, 3, 1), x.view(2, 2, 2, 3)[..., :1], x.view(2, 1, 2, 6), is_causal=False, enable_gqa=True
        )
        * F.scaled_dot_product_attention(
            x.view(4, 3, 2), x[:2].view(2, 3, 2), x[2:].view(2, 3, 2), torch.ones(3, 3).tril() > 0, enable_gqa=True
        ).mean()
        + F.scaled_dot_product_attention(
            x.view(1, 4, 3, 2), x.view(1, 4, 3, 2), x.view(1, 4, 3, 2), enable_gqa=True
        ).sum()
    ),
    "Python's types as dtypes": lambda x: (
        x * torch.arange(6, dtype=int) * torch.ones(6, dtype=float)
        + torch.zeros(6, dtype=bool)
        + x.to(int)
        + x.to(torch.float32).sum(dtype=float)
        + x.to("cpu", float)
        + torch.full((6,), 2, dtype=int).to(dtype=bool)
    ),
    "to without waiting": lambda x: (
        x.to("cpu", non_blocking=True) * x.to(x.device, torch.float32, True)
        + x.to(torch.float32, non_blocking=True, copy=True) * x.to(x, True) * x.to(device="cpu", non_blocking=True)
        + x.to(torch.promote_types(torch.float32, torch.float16))
    ),
    "detach_": lambda x: (lambda y: (y * 2).sin() * y.detach_() + x * y)(x.clone()),
    "eye": lambda x: x * torch.eye(4, 6, dtype=x.dtype) + x @ torch.eye(6, dtype=torch.float64),
    "as_tensor": lambda x: torch.as_tensor(x) * torch.as_tensor(x, dtype=torch.float32) * torch.as_tensor(2.0),
    "tile": lambda x: x.tile(2) * torch.tile(x, (3, 1, 2)) * x.tile((2,)) + x.tile(1, 2),
    "clone": lambda x: x.t().clone(memory_format=torch.contiguous_format).view(-1) * torch.clone(x).view(-1),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_pytorchs(name):
    fn = FUNCTIONS[name]
    compiled = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(
        with_gradients(compiled, X), with_gradients(fn, X), rtol=1e-12, atol=1e-12, equal_nan=True
    )


def test_keys_that_cannot_be_shared_are_refused():
    fn = thunder.jit(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), transforms=[MemEfficient()])
    with pytest.raises(RuntimeError, match="3 heads of keys or values between 4 of queries"):
        fn(torch.ones(1, 4, 2, 2), torch.ones(1, 3, 2, 2))


def test_a_negative_variance_gives_no_number():
    """PyTorch looks at all elements and raises an error."""
    fn = thunder.jit(F.gaussian_nll_loss, executors=[], transforms=[MemEfficient(strict=True)])
    assert fn(X, X, torch.full_like(X, -0.1)).isnan()
    assert fn(X, X, torch.full_like(X, torch.inf)) == torch.inf


def test_other_programs_are_traced_as_by_thunder_alone():
    """It misses writes through views, which a method that fills would make."""
    MemEfficient()
    with pytest.raises(AttributeError, match="uniform_"):
        thunder.jit(lambda x: x[0].uniform_(), executors=[])(X.clone())


@pytest.mark.parametrize("name", ["linspace", "full"])
def test_options_that_cannot_be_compiled_are_refused(name):
    call = {"linspace": lambda x: torch.linspace(0, 1, 6, out=x), "full": lambda x: torch.full((6,), 2.0, out=x)}[name]
    with pytest.raises(NotImplementedError, match=f"torch.{name} with out= cannot be compiled"):
        thunder.jit(call, executors=[], transforms=[MemEfficient()])(torch.zeros(6))


@pytest.mark.parametrize("name", ["backward", "torch.autograd.grad"])
def test_gradients_inside_of_a_program_are_refused_with_what_to_do(name):
    def step(x):
        loss = (x * 2).sum()
        return loss.backward() if name == "backward" else torch.autograd.grad(loss, x)

    with pytest.raises(NotImplementedError, match=rf"{name}.* cannot run inside a compiled function: return the loss"):
        thunder.jit(step, executors=[], transforms=[MemEfficient()])(torch.ones(2, requires_grad=True))


def test_stochastic_depth_peaks_as_predicted_and_not_above_eager():
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(128, 64)

    def step(x, w):
        for _ in range(4):
            x = x + F.gelu(x @ w) * x.new_empty((128, 1)).bernoulli_(0.9).div_(0.9)
        return x.square().mean()

    compiled = thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True)])
    compiled(x, w)
    peaks = []
    for fn in (compiled, step):
        peaks.append(measure_peak(lambda fn=fn: torch.autograd.grad(fn(x, w), w)))
    assert predict(compiled, x, w).measured_bytes <= peaks[0] <= peaks[1]


DISTRIBUTIONS = {
    "Normal": lambda x: D.Normal(x, x.exp()).log_prob(2 * x) + D.Normal(x, 1.0).entropy() + D.Normal(x, 2.0).rsample(),
    "kl_divergence": lambda x: D.kl_divergence(D.Normal(x, x.exp()), D.Normal(0.0, 1.0)),
    "Independent": lambda x: D.Independent(D.Laplace(x, 1.0), 1).log_prob(x * 2),
    "Categorical": lambda x: (lambda d: d.log_prob(d.sample()) * d.entropy())(D.Categorical(logits=x)),
    "Bernoulli": lambda x: D.Bernoulli(logits=x).log_prob((x > 0).double()) + D.Bernoulli(x.sigmoid()).entropy(),
    "Uniform": lambda x: D.Uniform(x, x + 2).rsample() * D.Beta(x.exp(), x.exp()).log_prob(x.sigmoid()),
    "TransformedDistribution": lambda x: D.TransformedDistribution(
        D.Normal(x, 1.0), [D.transforms.TanhTransform()]
    ).log_prob((x * 0.5).tanh()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_have_eagers_values_and_gradients(name):
    fn = DISTRIBUTIONS[name]
    compiled = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    found = []
    for call in (compiled, fn):
        torch.manual_seed(3)
        found.append(with_gradients(call, X))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules_train_as_in_eager(name):
    module = getattr(nn.utils.parametrizations, name)(nn.Linear(6, 6).double())
    twin = copy.deepcopy(module)
    compiled = thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True)])
    for _ in range(2):  # `spectral_norm` writes its vectors
        torch.testing.assert_close(compiled(X), twin(X))
        for net in (compiled, twin):
            net(X).square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    torch.testing.assert_close(list(module.buffers()), list(twin.buffers()))


@pytest.mark.parametrize("executors", [[], None], ids=["unfused", "fused"])
def test_a_weight_with_a_parametrization_is_made_at_each_use(executors):
    """The discriminator of a GAN, whose spectral norm takes a step of its power method at each use."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    layer.parametrizations.weight.original.data.normal_()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, real, made):
            return self.layer(real).sum() + self.layer(made).pow(2).sum()

    module = Twice().double()
    eager, x, y = copy.deepcopy(module), *torch.randn(2, 4, 6, dtype=torch.float64)
    jitted = thunder.jit(
        module, transforms=[MemEfficient(strict=True)], **({} if executors is None else {"executors": []})
    )
    for _ in range(2):
        found, expected = jitted(x, y), eager(x, y)
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_an_identity_is_pytorchs():
    def fn(n):
        return torch.eye(n), torch.eye(2, n, dtype=torch.int64), torch.eye(n, 1, dtype=torch.bool)

    for mine, eager in zip(
        thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(3), fn(3), strict=True
    ):
        assert torch.equal(mine, eager) and mine.dtype == eager.dtype


IN_PLACE = {
    "addmm_": lambda y, x: y.addmm_(x[:, :4] * 0.1, x, beta=0.5),
    "addmv_": lambda y, x: y[:, 0].addmv_(x, x[0]),
    "addr_": lambda y, x: y.addr_(x[:, 0], x[0]),
    "baddbmm_": lambda y, x: y[None].baddbmm_(x[None, :, :4], x[None]),
    "clamp_max_": lambda y, x: y.clamp_max_(0.3),
    "clip_": lambda y, x: y[1:].clip_(-0.3, 0.5),
    "divide_": lambda y, x: y.divide_(x.exp()),
    "frac_": lambda y, x: y.frac_(),
    "hypot_": lambda y, x: y.hypot_(x[0]),
    "index_fill_": lambda y, x: y.index_fill_(1, torch.tensor([0, 2]), 3.0),
    "masked_scatter_": lambda y, x: y.masked_scatter_(x > 0, x.t().contiguous()),
    "multiply_": lambda y, x: y[:, ::2].multiply_(x[:, :3]),
    "nan_to_num_": lambda y, x: (y / 0).nan_to_num_(posinf=2.0, neginf=1.0),
    "scatter_reduce_": lambda y, x: y.scatter_reduce_(0, torch.zeros(2, 6, dtype=torch.int64), x[:2], "sum"),
    "sigmoid_": lambda y, x: y.t().sigmoid_(),
    "subtract_": lambda y, x: y.subtract_(x, alpha=2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_methods_write(name):
    def fn(x):
        y = x * 3
        written = IN_PLACE[name](y, x)
        return y + written.sum()

    compiled = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(with_gradients(compiled, X), with_gradients(fn, X), equal_nan=True)


LABELS = torch.randint(1, 5, (3, 4), generator=torch.Generator().manual_seed(0))
SEQUENCE_LOSSES = {
    "tensors": lambda x: F.ctc_loss(x, LABELS, torch.full((3,), 9), torch.tensor([4, 2, 3])),
    "lists": lambda x: F.ctc_loss(x, LABELS, (9, 9, 8), (4, 2, 3), reduction="sum"),
    "one after the other": lambda x: F.ctc_loss(x, LABELS.flatten()[:9], torch.full((3,), 9), torch.tensor([4, 2, 3])),
    "each": lambda x: F.ctc_loss(x, LABELS, torch.full((3,), 9), torch.full((3,), 4), 2, "none", zero_infinity=True),
    "of one": lambda x: F.ctc_loss(x[:, 0], LABELS[0], torch.tensor(9), torch.tensor(4)) * torch.ones(2),
    "module": lambda x: nn.CTCLoss(blank=3)(x, LABELS, torch.full((3,), 9), torch.full((3,), 2)),
}


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_losses_of_sequences_are_pytorchs(name):
    fn = SEQUENCE_LOSSES[name]
    compiled = thunder.jit(lambda x: fn(x.log_softmax(-1)), executors=[], transforms=[MemEfficient(strict=True)])
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(with_gradients(compiled, x), with_gradients(lambda x: fn(x.log_softmax(-1)), x))


def test_a_loss_of_sequences_peaks_as_predicted_and_not_above_eager():
    labels, lengths = torch.randint(1, 32, (8, 20)), torch.full((8,), 20)

    def loss(x):
        return F.ctc_loss((x * 2).log_softmax(-1), labels, lengths * 2, lengths)

    x = torch.randn(40, 8, 32, requires_grad=True)
    compiled = thunder.jit(loss, executors=[], transforms=[MemEfficient(strict=True)])

    def step(fn):
        fn(x).backward()
        x.grad = None

    step(compiled)
    ours, eager = measure_peak(lambda: step(compiled)), measure_peak(lambda: step(loss))
    assert abs(predict(compiled, x).measured_bytes - ours) <= 8 and ours <= eager + 64


@pytest.mark.parametrize("executors", [[], None], ids=["unfused", "fused"])
@pytest.mark.parametrize("affine", [False, True])
def test_an_instance_norm_tracks_statistics(affine, executors):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm = torch.nn.InstanceNorm2d(3, affine=affine, track_running_stats=True, momentum=0.3).double()
        options = {} if executors is None else {"executors": executors}
        call = thunder.jit(norm, transforms=[MemEfficient(strict=True)], **options) if compiled else norm
        x = torch.randn(4, 3, 5, 2, dtype=torch.float64, requires_grad=True)
        for i in range(2):
            (call(x + i).sin() * x).sum().backward()
        call.eval()
        found.append((x.grad, norm.running_mean, norm.running_var, call(x), *(p.grad for p in norm.parameters())))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-10, atol=1e-12)
