"""Every loss that must work: loss and all gradients against float64 eager, and the peak."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.programs import chunk_cases
from tests.programs.chunk_cases import CASES, Case, N, V, loss_and_grads, prepare
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_peak(case: Case):
    transform = ChunkLossHead(chunks=5)
    compiled = thunder.jit(case.fn, transforms=[transform])
    tensors = prepare(case, torch.float32)
    values, grads = loss_and_grads(compiled, tensors, case.grads)
    exact_values, exact_grads = loss_and_grads(case.fn, prepare(case, torch.float64), case.grads)

    assert not transform.record.refusals, transform.record.refusals
    assert len(transform.record.loops) == case.loops
    assert transform.record.loops[0].mode == case.mode, transform.record.loops[0].why
    for value, exact in zip(values, exact_values, strict=True):
        torch.testing.assert_close(value.double(), exact.double(), rtol=2e-5, atol=1e-6)
    for name, grad, exact in zip(case.grads, grads, exact_grads, strict=True):
        assert grad.dtype == torch.float32
        error = (grad.double() - exact).norm() / exact.norm()
        assert error < 2e-5, f"gradient of {name} is off by {error}"

    peak = measure_peak(loss_and_grads, compiled, tensors, case.grads)
    assert peak < N * V * 4, f"{peak} bytes, the logits would be {N * V * 4}"


def test_eager_peaks_are_above_the_logits():
    """The bound of the table is one that plain autograd breaks."""
    case = next(c for c in CASES if c.name == "ce_mean")
    tensors = prepare(case, torch.float32)
    assert measure_peak(loss_and_grads, case.fn, tensors, case.grads) > 2 * chunk_cases.N * chunk_cases.V * 4


def test_nll_loss_ignores_what_eager_ignores():
    """-100 where nothing is said; -1 is an error as in eager."""

    def head(x, w, t):
        return F.nll_loss(F.linear(x, w).log_softmax(-1), t)

    x, w, t = torch.randn(37, 8).requires_grad_(), torch.randn(41, 8).requires_grad_(), torch.randint(0, 41, (37,))
    t[3] = -100
    compiled = thunder.jit(head, executors=[], transforms=[ChunkLossHead(chunks=3)])
    torch.testing.assert_close(compiled(x, w, t), head(x, w, t))
    t[3] = -1
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        compiled(x, w, t)
