"""A chunked head ends where one number carries its gradient, and before that number is rounded."""

import torch
import torch.nn.functional as F

from tests.programs.chunk_tools import chunked, exact, inputs, relative


def test_a_loss_and_its_multiple_are_one_number():
    """So that the forward computes the gradients, and the backward makes no logits again."""

    def fn(x, w, t):
        loss = F.cross_entropy(F.linear(x, w), t)
        return loss, 3 * loss

    x, w, t = inputs()
    jitted, transform = chunked(fn)
    loss, multiple = jitted(x, w, t)
    assert [loop.mode for loop in transform.record.loops] == ["grads-in-forward"]
    found = torch.autograd.grad(loss + multiple, (x, w))
    for got, want in zip(found, exact(lambda *args: sum(fn(*args)), x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


def test_a_16_bit_loss_is_rounded_once():
    """Each chunk adds up to 257. Rounded to bfloat16 that is 256, and three of them 768."""
    x, w = (torch.ones(n, 1, dtype=torch.bfloat16) for n in (3, 257))
    jitted, transform = chunked(lambda x, w: F.linear(x, w).sum(), rows=1)
    assert jitted(x, w).item() == torch.tensor(3 * 257.0).bfloat16().item() == 772
    assert transform.record.loops[0].chunks == 3
