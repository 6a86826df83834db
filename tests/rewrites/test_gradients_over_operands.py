"""Gradients of stretches in tiles over the rows that they belong to, where nobody reads the rows later."""

import subprocess
import sys
from pathlib import Path

import pytest
import thunder
import torch

from tests.tiling.test_tiles import Stack, assert_as_exact_as_eager, compiled, gradients, made
from thunder_mem import MemEfficient, Tiles, measure_peak, predict
from thunder_mem.chunk_loop.symbols import overwritten
from thunder_mem.rewrites import gradients_over_operands
from thunder_mem.trace import value_numbers, verification


def written_over(jitted):
    """Per backward of a stretch, the number of operands under its gradients."""
    bsyms = thunder.last_backward_traces(jitted)[-1].bound_symbols
    return [len(overwritten(b)) for b in bsyms if b.sym.name.startswith("chunk_loop_backward")]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_tiles_gradient_lies_over_its_rows(checkpoints):
    module, x = made(Stack(blocks=2, checkpoints=checkpoints), (2, 12, 16))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 2)
    jitted = compiled(module, Tiles(rows=5))
    gradients(jitted, module, x)
    assert written_over(jitted) == [1, 0]  # the first block's rows are the caller's


@pytest.mark.slow
def test_rows_that_autograd_keeps_stay():
    module, x = made(Stack(blocks=2), (2, 12, 16))
    jitted = compiled(module, Tiles(rows=5))
    loss = jitted(x.requires_grad_())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss.backward()
    assert written_over(jitted) == [1, 0]
    assert all(torch.equal(a, p.grad) for a, p in zip(first, module.parameters(), strict=True))


class ReadTwice(Stack):
    """The gradient of a norm's input needs the stretch's rows once more."""

    def forward(self, x):
        h = torch.tanh(x)
        return self.blocks[0](h).square().mean() + torch.sin(h).mean()


@pytest.mark.slow
def test_rows_with_another_reader_stay():
    module, x = made(ReadTwice(blocks=1), (2, 12, 16))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 1)
    jitted = compiled(module, Tiles(rows=5))
    gradients(jitted, module, x)
    assert written_over(jitted) == [0]


class ReadBefore(Stack):
    """The gradient that the stretch gets is a product with its rows."""

    def forward(self, x):
        h = torch.sin(x)
        return (h @ self.blocks[0](h).transpose(1, 2)).square().mean()


@pytest.mark.slow
def test_rows_that_are_read_before_in_every_order_are_overwritten():
    module, x = made(ReadBefore(blocks=1), (2, 12, 16))
    assert_as_exact_as_eager(module, x, Tiles(rows=5), 1)
    jitted = compiled(module, Tiles(rows=5))
    gradients(jitted, module, x)
    assert written_over(jitted) == [1]


def no_memory_as_predicted():
    module, x = made(Stack(blocks=2), (1, 4096, 16))
    jitted = compiled(module, Tiles(rows=1024))

    def step():
        module.zero_grad()
        jitted(x).backward()

    step()
    predicted = predict(jitted)
    backwards = [e for e in predicted.timeline if e.name.startswith("chunk_loop_backward")]
    assert [e.name for e in backwards] == ["chunk_loop_backward_over", "chunk_loop_backward"]
    assert backwards[0].allocated_bytes < x.nbytes  # only the gradients of weights
    assert abs(measure_peak(step) - predicted.measured_bytes) <= 8


@pytest.mark.slow
def test_such_a_gradient_takes_no_memory_as_predicted():
    """In a process of its own: among other tests some values of 4 KiB of a tile are sometimes gone sooner."""
    module = "tests.rewrites.test_gradients_over_operands"
    program = f"import tests.pinned; from {module} import no_memory_as_predicted as check; check()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("always", [2000, 0], ids=["a short program", "a program of any length"])
def test_the_check_finds_a_later_reader(monkeypatch, always):
    """Without the rule, rows that are read later would be overwritten: nothing but the check would say so."""
    monkeypatch.setattr(gradients_over_operands, "readers_in_regions", lambda source, storage: frozenset())
    monkeypatch.setattr(verification, "ALWAYS_UP_TO_OPS", always)
    module, x = made(ReadTwice(blocks=1), (2, 12, 16))
    jitted = thunder.jit(module, executors=[], transforms=[MemEfficient(tile=Tiles(rows=5), strict=True)])
    with pytest.raises(value_numbers.VerificationError, match="chunk_loop_backward_over"):
        gradients(jitted, module, x)


def test_a_weights_gradient_reads_the_rows_before_they_are_overwritten():
    """Without a norm, the operand of the weight's gradient is a view of the rows."""

    def program(x, w):
        return torch.tanh((torch.sin(x) + x) @ w).square().sum()

    given = [torch.randn(23, 6, requires_grad=True), torch.randn(6, 16, requires_grad=True)]
    jitted = compiled(program, Tiles(rows=5), chunk=False)
    found = torch.autograd.grad(jitted(*given), given)
    exact = torch.autograd.grad(program(*(t.double() for t in given)), given)
    assert written_over(jitted) == [1]
    for ours, right in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, right)
