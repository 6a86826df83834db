"""Functions whose gradient plain Thunder loses or lacks have eager's."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, measure_peak, predict

ROWS = torch.arange(6) % 4
TARGET = torch.tensor([0, 2, 1, 2, -100, 0])
WEIGHT = torch.tensor([1.0, 2.0, 0.5])

NLL = torch.nn.NLLLoss()

LOSSES = {
    "default": lambda log_p: F.nll_loss(log_p, TARGET),
    "sum": lambda log_p: F.nll_loss(log_p, TARGET, reduction="sum"),
    "none": lambda log_p: F.nll_loss(log_p, TARGET, reduction="none").square().sum(),
    "weight": lambda log_p: F.nll_loss(log_p, TARGET, WEIGHT),
    "ignored": lambda log_p: F.nll_loss(log_p, TARGET.clamp(0), ignore_index=0),
    "module": lambda log_p: NLL(log_p, TARGET),
}
STACKS = {
    "hstack": torch.hstack,
    "vstack": torch.vstack,
    "row_stack": torch.row_stack,
    "dstack": torch.dstack,
    "column_stack": torch.column_stack,
}
OTHERS = {
    "flip": lambda x: x.flip(0, 1).sin(),
    "round": lambda x: (x * 3).round() * x,
    "index_add": lambda x: torch.index_add(x[:4] * 2, 0, ROWS, x.sin()).cos(),
    "index_add of columns": lambda x: torch.index_add(x[:, :4] * 2, 1, ROWS[:4], x[:, :4].sin()).cos(),
}


def _planned(function):
    return thunder.jit(function, executors=[], transforms=[MemEfficient(strict=True)])


def assert_as_eager(function, *shapes):
    xs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    jitted, out = _planned(function), function(*xs)
    torch.testing.assert_close(jitted(*xs), out)
    expected = torch.autograd.grad((out * out.detach().cos()).sum(), xs)
    found = torch.autograd.grad((jitted(*xs) * out.detach().cos()).sum(), xs)
    torch.testing.assert_close(found, expected)


def _of_log_p(loss, given):
    return lambda x: loss(x.log_softmax(1), **given)


@pytest.mark.parametrize("name", LOSSES)
def test_a_negative_log_likelihood_trains(name):
    weight = WEIGHT.double()
    loss = LOSSES[name] if name != "weight" else lambda log_p: F.nll_loss(log_p, TARGET, weight)
    assert_as_eager(lambda x: loss(F.log_softmax(x, -1)), (6, 3))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {}),
        ("cross_entropy", {"weight": WEIGHT.double(), "ignore_index": 1}),
        ("cross_entropy", {"label_smoothing": 0.1, "weight": WEIGHT.double()}),
        ("cross_entropy", {"target": torch.rand(2, 3, 4, dtype=torch.float64)}),
        ("nll_loss", {}),
        ("nll_loss", {"weight": WEIGHT.double()}),
    ],
    ids=["plain", "weight", "smoothed", "probabilities", "likelihood", "its weight"],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.sampled(5)
def test_a_loss_of_sequences_trains(name, options, reduction):
    """Logits (B, C, T), as of `logits.transpose(1, 2)`; and (B, C, X, Y, Z)."""
    for shape in ((2, 3, 4), (2, 3, 2, 1, 2)):
        targets = torch.arange(8).reshape(2, *shape[2:]) % 3
        targets[0, 0] = options.get("ignore_index", -100)
        given = {"target": targets, **options, "reduction": reduction}
        if torch.is_floating_point(given["target"]):
            given["target"] = given["target"].reshape(shape)
        assert_as_eager(_of_log_p(getattr(F, name), given), shape)


@pytest.mark.slow
def test_a_loss_of_sequences_peaks_as_in_eager():
    targets = torch.arange(512).reshape(4, 128)

    def turned(h, w):
        return F.cross_entropy((h @ w.t()).transpose(1, 2), targets)

    args = [torch.randn(4, 128, 16, requires_grad=True), torch.randn(1000, 16, requires_grad=True)]

    def peak(call):
        call(*args).backward()
        for x in args:
            x.grad = None
        used_bytes = measure_peak(lambda: call(*args).backward())
        for x in args:
            x.grad = None
        return used_bytes

    whole = thunder.jit(turned, executors=[], transforms=[MemEfficient(strict=True, chunk=False)])
    assert peak(whole) <= peak(turned)
    assert peak(_planned(turned)) < peak(turned) // 4  # in chunks
    assert abs(predict(whole, *args).measured_bytes - peak(whole)) <= 8  # the loss that the caller holds


@pytest.mark.sampled(7)
@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_stacked_tensors_get_their_gradients(name, shape):
    stack = STACKS[name]
    assert_as_eager(lambda x, y: stack([x.sin(), y]).cos() * stack((y, x)), shape, shape)


def test_a_stack_in_a_checkpoint_is_made_again():
    def body(x, y):
        return torch.hstack([x.sin(), y.cos()]).exp()

    def step(x, y):
        return checkpoint(body, x, y, use_reentrant=False).square()

    assert_as_eager(step, (3, 2), (3, 4))
    jitted, xs = _planned(step), [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    jitted(*xs)
    saved = thunder.last_traces(jitted)[-1].bound_symbols[-1].flat_proxy_args
    assert sum(p.numel for p in {p.name: p for p in saved}.values()) <= 6 * 64 * 64  # all but the stack and its parts


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_that_thunder_lacks(name):
    assert_as_eager(OTHERS[name], (6, 6))


@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1, -3, -7])
def test_a_row_of_padding_gets_no_gradient(padding_idx):
    tokens = torch.tensor([[0, 1, 4], [3, 0, 6]])

    def embedded(w):
        return F.embedding(tokens, w, padding_idx).sin()

    assert_as_eager(embedded, (7, 2))
    assert_as_eager(lambda w: checkpoint(embedded, w, use_reentrant=False), (7, 2))


@pytest.mark.parametrize("padding_idx", [7, -8])
def test_padding_outside_of_the_table_raises_as_in_eager(padding_idx):
    tokens, w = torch.tensor([0, 6]), torch.randn(7, 2, requires_grad=True)
    with pytest.raises(AssertionError, match="within num_embeddings"):
        _planned(lambda w: F.embedding(tokens, w, padding_idx))(w)


def test_thunder_alone_still_loses_them():
    """So that `torch_functions/mended_functions.py` goes when Thunder is repaired."""
    x = torch.randn(3, 3, requires_grad=True)
    lost = thunder.jit(lambda x: x.sum() + torch.hstack([x, x]).sin().sum(), executors=[])
    assert bool((torch.autograd.grad(lost(x), x)[0] == 1).all())
    padded = thunder.jit(lambda w: F.embedding(torch.tensor([2]), w, -1), executors=[])
    assert torch.autograd.grad(padded(x).sum(), x)[0][2].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="None had an unexpected type"):
        thunder.jit(LOSSES["default"], executors=[])(torch.randn(6, 3, requires_grad=True))
    targets = torch.zeros(2, 4, dtype=torch.long)
    sequences = thunder.jit(lambda x: F.cross_entropy(x, targets), executors=[])
    with pytest.raises(RuntimeError):
        sequences(torch.randn(2, 3, 4, requires_grad=True)).backward()


def test_cells_in_a_loop_have_the_gradients_of_their_states():
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(3, 4).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            h = c = torch.zeros(2, 4, dtype=x.dtype)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
            return h * c

    found = []
    for model in (Model(), thunder.jit(Model(), executors=[], transforms=[MemEfficient(strict=True)])):
        out = model(x)
        found.append((out, *torch.autograd.grad(out.sum(), list(cell.parameters()))))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


def test_a_grid_of_a_sequence_has_gradients():
    def fn(x, y):
        rows, columns = torch.meshgrid([x, y], indexing="ij")
        return rows * columns.sin()

    found = []
    for call in (fn, thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])):
        x, y = torch.arange(3.0).requires_grad_(), torch.arange(4.0).requires_grad_()
        found.append(torch.autograd.grad(call(x, y).square().sum(), [x, y]))
    for eager, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager)
