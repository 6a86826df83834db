"""Recurrent layers train: eager's values and gradients, also of the weights, which are given in a list."""

import pytest
import thunder
import torch
from torch import nn

from tests.checking.gradients import with_gradients
from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, measure_peak, predict
from thunder_mem.executors import mem_pointwise_ex

T, B, C = 3, 2, 4
FLOAT = torch.float64

LAYERS = {
    "lstm": lambda: nn.LSTM(C, 6),
    "lstm, projected": lambda: nn.LSTM(C, 6, 2, proj_size=3, bidirectional=True),
    "gru, both ways": lambda: nn.GRU(C, 6, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(C, 6, 2),
    "rnn of relus without bias": lambda: nn.RNN(C, 6, nonlinearity="relu", bias=False),
    "lstm with dropout": lambda: nn.LSTM(C, 6, 2, dropout=0.4, bidirectional=True, batch_first=True),
    "lstm with dropout, projected": lambda: nn.LSTM(C, 6, 2, dropout=0.4, proj_size=2),
    "gru with dropout": lambda: nn.GRU(C, 6, 2, dropout=0.4),
    "lstm with dropout, evaluated": lambda: nn.LSTM(C, 6, 2, dropout=0.4).eval(),
}


class Model(nn.Module):
    """The layer behind another one, whose result is scaled so that every element counts."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(C, C), layer

    def forward(self, x, states=None):
        y, last = self.layer(self.first(x), states)
        results = (y, *last) if isinstance(last, tuple) else (y, last)
        return sum((r * torch.arange(r.numel(), dtype=FLOAT).reshape(r.shape).cos()).sum() for r in results)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_like_eager(model, executors, x, *states):
    compiled = thunder.jit(model, executors=executors, transforms=[MemEfficient(strict=True)])
    inputs = [x, *(s for state in states for s in (state if isinstance(state, tuple) else (state,)))]
    found = []
    for call in (model, compiled):
        torch.manual_seed(1)
        with uncompiled_regions():
            loss = call(x, *states)
            found.append((loss, *torch.autograd.grad(loss, [*inputs, *model.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train(name, executors):
    torch.manual_seed(0)
    assert_like_eager(Model(LAYERS[name]()).to(FLOAT), executors, drawn(T, B, C))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_given_states_get_their_gradients(layer):
    torch.manual_seed(0)
    states = drawn(1, B, 6, seed=1)
    states = (states, drawn(1, B, 6, seed=2)) if layer is nn.LSTM else states
    assert_like_eager(Model(layer(C, 6)).to(FLOAT), [], drawn(T, B, C), states)


def test_one_sample_and_weights_that_were_replaced():
    torch.manual_seed(0)
    layer = nn.LSTM(C, 6).to(FLOAT)
    compiled = thunder.jit(layer, executors=[], transforms=[MemEfficient(strict=True)])
    x = drawn(T, C)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


def test_a_step_peaks_below_eagers_as_predicted():
    torch.manual_seed(0)
    model = Model(nn.LSTM(C, 64, 2)).to(FLOAT)
    x = drawn(6, 64, C)

    def step(f):
        f(x).backward()
        for t in (x, *model.parameters()):
            t.grad = None

    step(model)
    eager_bytes = measure_peak(lambda: step(model))
    compiled = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])
    step(compiled)
    compiled_bytes = measure_peak(lambda: step(compiled))
    assert compiled_bytes < eager_bytes
    assert abs(predict(compiled, x).measured_bytes - compiled_bytes) <= 64  # the loss and its tangent


PLAIN = {
    "a list": lambda x, y: torch.linalg.multi_dot([x, y.t(), x]) * x,
    "tensors": lambda x, y: torch.block_diag(x, y.sin(), x * 2),
    "a list of a tensor and its view": lambda x, y: torch.broadcast_tensors(x[:1], y)[0].clone().mul_(2) * y,
    "given by name": lambda x, y: torch.xlogy(input=x, other=y.abs()) * torch.cdist(x1=x, x2=y).sum(),
    "the same twice": lambda x, y: torch.linalg.multi_dot([x, x.t(), x]) + torch.chain_matmul(y, y.t(), y),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.filterwarnings("ignore")
def test_tensors_in_sequences_and_by_name(name):
    fn, inputs = PLAIN[name], (drawn(4, 6), drawn(4, 6, seed=1))
    compiled = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(with_gradients(compiled, *inputs), with_gradients(fn, *inputs), rtol=1e-12, atol=1e-12)


def test_other_programs_are_traced_as_before():
    with pytest.raises(Exception, match="KeyError: None"):
        thunder.jit(nn.LSTM(C, 6), executors=[])(torch.randn(T, B, C))
