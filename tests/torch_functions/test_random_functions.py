"""Functions that draw inside: eager's numbers, and the gradient of those numbers, not of others."""

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, measure_peak, predict
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.semantics.effects import is_random
from thunder_mem.torch_functions.random_functions import RANDOM

X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

GENERATOR = torch.Generator().manual_seed(0)

FUNCTIONS = {
    "dropout": lambda x: torch.dropout(x, 0.3, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.3, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.3, True) + F.alpha_dropout(x, 0.6, training=True),
    "feature_alpha_dropout": lambda x: (
        torch.feature_alpha_dropout(x, 0.3, True) * F.feature_alpha_dropout(x, training=True)
    ),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d": lambda x: F.dropout1d(x, 0.3) * F.dropout1d(x[0])[None],
    "dropout2d": lambda x: F.dropout2d(x[None], 0.3)[0] * F.dropout2d(x.view(4, 3, 4, 4)).reshape(4, 6, 8),
    "dropout3d": lambda x: F.dropout3d(x[:, None, None])[:, 0, 0] * F.dropout3d(x[None, None])[0, 0],
    "dropout1d of all": lambda x: F.dropout1d(x, 1.0) + x,
    "alpha_dropout of nothing": lambda x: F.alpha_dropout(x, 0.0, training=True) * F.dropout2d(x[None], training=False),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x) * F.gumbel_softmax(x, tau=0.5, dim=1),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True, dim=1),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[None], 2, (3, 5)),
    "fractional_max_pool2d_with_indices": lambda x: F.fractional_max_pool2d(
        x, 2, output_ratio=(0.5, 0.5), return_indices=True
    )[0],
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x[None], 2, output_size=(2, 3, 5)),
    "fractional_max_pool3d_with_indices": lambda x: F.fractional_max_pool3d_with_indices(x[None], 2, (2, 3, 5))[0],
}


def drop_path(x):
    """The stochastic depth of `timm`."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.75)
    kept.div_(0.75)
    return x * kept


FILLED = {
    "drop_path": drop_path,
    "bernoulli_ of bool": lambda x: x * torch.empty(8, dtype=torch.bool).bernoulli_(p=0.4),
    "bernoulli_ by chances": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(-1, 2) + torch.empty(8).uniform_(),
    "normal_": lambda x: x * torch.zeros_like(x).normal_(std=0.5) + torch.empty(6, 8).normal_(1, 0.1),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "a view": lambda x: (lambda out: (out[1:3].uniform_(), out * x)[1])(x * 2),
    "normal": lambda x: torch.normal(x, 0.5) * x + torch.normal(0.0, x.abs()) + torch.normal(x[:, :1], x.abs()),
    "normal of a size": lambda x: x * torch.normal(1.0, 2.0, (6, 8)),
    "randperm": lambda x: x[torch.randperm(4)] * torch.randperm(8, dtype=torch.float64),
}


def seen(fn):
    """The result under a seed, its gradient, and the next number of the generator."""
    torch.manual_seed(5)
    x = X.clone().requires_grad_()
    out = fn(x)
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    after = torch.rand(())
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    return out, grad, after


@pytest.mark.sampled(18)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", FUNCTIONS | FILLED)
def test_numbers_and_gradients_are_eagers(name, executors):
    function = (FUNCTIONS | FILLED)[name]

    def in_checkpoint(x):
        return checkpoint(lambda x: function(x.sin()).exp(), x, use_reentrant=False)

    for fn in (function, in_checkpoint):
        with uncompiled_regions():
            found = seen(thunder.jit(fn, executors=executors, transforms=[MemEfficient(strict=True)]))
        for mine, eager in zip(found, seen(fn), strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


def test_each_function_is_tried():
    tried = {name.split(",")[0].split()[0] for name in FUNCTIONS}
    assert {function.__name__ for function in RANDOM} <= tried | {"fn"}  # "fn" are the pools, by `boolean_dispatch`
    assert {ltorch._torch_to_thunder_function_map[function].name for function in RANDOM} <= tried


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
def test_whole_they_count_as_random(name):
    """Those that stay whole, because nothing is known of their arguments, are never run twice."""
    drawing = {ltorch._torch_to_thunder_function_map[function].id for function in RANDOM}
    alone = thunder.jit(FUNCTIONS[name], executors=[])
    alone(X)
    whole = [b for b in thunder.last_traces(alone)[0].bound_symbols if b.sym.id in drawing]
    assert whole and all(map(is_random, whole))


def test_a_generator_is_refused():
    fn = thunder.jit(lambda x: x * torch.empty_like(x).uniform_(generator=GENERATOR), transforms=[MemEfficient()])
    with pytest.raises(NotImplementedError, match="uniform_ with a generator"):
        fn(X)


@pytest.mark.parametrize("name", ["dropout2d", "alpha_dropout", "drop_path", "normal_"])
def test_predictions_count_the_numbers(name):
    function = (FUNCTIONS | FILLED)[name]
    fn = thunder.jit(lambda x: function(x).square().sum(), executors=[], transforms=[MemEfficient()])
    x = X.clone().requires_grad_()
    fn(x)
    assert measure_peak(lambda: fn(x).backward()) == predict(fn, x, keep_outputs=True).measured_bytes
