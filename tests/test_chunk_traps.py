"""What went wrong in other chunked losses, each as a test."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem.measure import measure_peak
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead


def head(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def inputs(n=37, d=16, v=101, dtype=torch.float32, scale=0.3):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g) * scale).to(dtype).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=g)


def chunked(fn, **options):
    transform = ChunkLossHead(**(options or {"chunks": 4}))
    return thunder.jit(fn, transforms=[transform]), transform


def exact(fn, *args, tangent=1.0):
    """Value and gradients in float64 eager."""
    args = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    out = fn(*args)
    wanted = [a for a in args if a.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, torch.full_like(out, tangent))


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# --- accuracy --------------------------------------------------------------------------------------


def dw_error(chunks, accumulate):
    x, w, t = inputs(512, 16, 512, torch.bfloat16, scale=0.05)
    fn, _ = chunked(head, chunks=chunks, accumulate=accumulate)
    (dw,) = torch.autograd.grad(fn(x, w, t), [w])
    return relative(dw, exact(head, x, w, t)[1][1])


def test_error_of_dw_is_flat_in_the_chunk_count():
    one = dw_error(1, "float32")
    errors = {chunks: dw_error(chunks, "float32") for chunks in (2, 8, 32, 128)}
    # A CPU that multiplies bfloat16 rounds each chunk's product once before it is added in float32.
    assert max(errors.values()) < 1.25 * one, (one, errors)
    assert max(errors.values()) < 1.05 * min(errors.values()), errors
    assert max(errors.values()) < 4e-3, errors
    assert dw_error(128, "input") > 2 * errors[128]  # what float32 is for


def test_bfloat16_loss_is_summed_in_float32():
    x, w, t = inputs(2048, 16, 64, torch.bfloat16)
    fn, transform = chunked(head, chunks=128)
    loss = fn(x, w, t).item()
    assert transform.record.loops[0].chunks == 128
    assert abs(loss - exact(head, x, w, t)[0].item()) < 2**-8 * loss  # one rounding to bfloat16


def test_float16_with_a_grad_scaler_keeps_small_gradients():
    """Gradients without the loss scale underflow in float16, so they wait for it."""
    x, w, t = inputs(4096, 16, 64, torch.float16, scale=0.05)
    fn, transform = chunked(head, chunks=4)
    scale = 2.0**14
    dx, dw = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(scale, dtype=torch.float16))
    assert transform.record.loops[0].mode == "recompute-in-backward"
    assert "float16" in transform.record.loops[0].why
    _, (ex, ew) = exact(head, x, w, t)
    assert relative(dx.double() / scale, ex) < 1e-3
    assert relative(dw.double() / scale, ew) < 1e-3


# --- tangents and outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("tangent", [1.0, -2.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tangents(tangent, dtype):
    x, w, t = inputs(64, 16, 300, dtype)
    fn, _ = chunked(head)
    grads = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(tangent, dtype=dtype))
    for got, want in zip(grads, exact(head, x, w, t, tangent=tangent)[1], strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=3e-4)


def test_infinite_tangent_is_not_finite_for_the_scaler_to_see():
    x, w, t = inputs()
    fn, _ = chunked(head)
    dx, dw = torch.autograd.grad(fn(x, w, t), (x, w), torch.tensor(float("inf")))
    assert not dx.isfinite().all() and not dw.isfinite().all()


def test_loss_and_its_multiple_are_one_scalar():
    def fn(x, w, t):
        loss = head(x, w, t)
        return loss, 3 * loss

    x, w, t = inputs()
    compiled, transform = chunked(fn)
    a, b = compiled(x, w, t)
    grads = torch.autograd.grad(a + b, (x, w))
    assert transform.record.loops[0].mode == "grads-in-forward"
    for got, want in zip(grads, exact(head, x, w, t, tangent=4.0)[1], strict=True):
        assert relative(got, want) < 1e-5


def test_several_losses_on_one_head_recompute():
    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t), torch.logsumexp(z, -1).square().mean()

    x, w, t = inputs()
    compiled, transform = chunked(fn)
    a, b = compiled(x, w, t)
    grads = torch.autograd.grad(a * 0.7 + b * b, (x, w))
    assert transform.record.loops[0].mode == "recompute-in-backward"

    def both(x, w, t):
        a, b = fn(x, w, t)
        return a * 0.7 + b * b

    for got, want in zip(grads, exact(both, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


def test_only_one_of_two_losses_is_used():
    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t), torch.logsumexp(z, -1).square().mean()

    x, w, t = inputs()
    compiled, _ = chunked(fn)
    grads = torch.autograd.grad(compiled(x, w, t)[1], (x, w))
    for got, want in zip(grads, exact(lambda *a: fn(*a)[1], x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


# --- autograd's own rules ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retain_graph_twice_leaves_the_first_gradients_alone(dtype):
    x, w, t = inputs(64, 64, 700, dtype)  # large enough for the accumulator to have two parts
    fn, _ = chunked(head)
    loss = fn(x, w, t)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(2.0, dtype=dtype), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, w), torch.tensor(-1.0, dtype=dtype))
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c * -2)
        assert a.untyped_storage().data_ptr() != c.untyped_storage().data_ptr()


def test_grad_is_accumulated_over_steps():
    x, w, t = inputs(64, 64, 700, torch.bfloat16)
    fn, _ = chunked(head)
    fn(x, w, t).backward()
    once = w.grad.clone()
    fn(x, w, t).backward()
    torch.testing.assert_close(w.grad, once * 2)


def test_backward_twice_without_retaining_raises():
    x, w, t = inputs()
    loss = chunked(head)[0](x, w, t)
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_double_backward_raises():
    x, w, t = inputs()
    loss = chunked(head)[0](x, w, t)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        dx.sum().backward()


def test_no_grad_does_no_gradient_work():
    x, w, t = inputs(256, 16, 1024)
    fn, transform = chunked(head, chunks=8)
    with torch.no_grad():
        loss = fn(x, w, t)
        peak = measure_peak(fn, x, w, t)
    assert transform.record.loops[0].mode == "forward"
    assert transform.record.loops[0].grads == ()
    assert peak < 256 * 1024 * 4 / 4
    torch.testing.assert_close(loss.double(), exact(head, x, w, t)[0])


# --- rows ------------------------------------------------------------------------------------------


def test_a_chunk_may_be_all_ignored():
    x, w, t = inputs()
    t[:20] = -100
    fn, _ = chunked(head)
    grads = torch.autograd.grad(fn(x, w, t), (x, w))
    for got, want in zip(grads, exact(head, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5
    assert not grads[0][:20].any()


def test_a_batch_all_ignored_is_nan_as_in_eager():
    x, w, t = inputs()
    t[:] = -100
    loss = chunked(head)[0](x, w, t)
    assert loss.isnan() and head(x, w, t).isnan()


@pytest.mark.parametrize(
    "n,d,v,chunks", [(5, 3, 40, 4), (2, 3, 40, 9), (40, 3, 40, 3), (9, 24, 24, 3), (24, 24, 24, 5)]
)
def test_awkward_sizes(n, d, v, chunks):
    """Fewer rows than chunks, N == V, D == V, all equal."""
    x, w, t = inputs(n, d, v)
    fn, transform = chunked(head, chunks=chunks)
    loss = fn(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    value, want = exact(head, x, w, t)
    assert relative(loss, value) < 1e-5
    for got, ref in zip(grads, want, strict=True):
        assert relative(got, ref) < 1e-5
    if v > d:
        assert transform.record.loops and transform.record.loops[0].chunks <= min(n, chunks)


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_or_one_row_runs_as_ever(n):
    x, w, t = inputs(n, 4, 50)
    fn, transform = chunked(lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="sum"))
    loss = fn(x, w, t)
    assert not transform.record.loops
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), t, reduction="sum"))


def test_strided_and_sliced_inputs():
    base = torch.randn(6, 11, 32, generator=torch.Generator().manual_seed(3))
    x = base[:, 2:, ::2].requires_grad_()
    w = torch.randn(16, 90, generator=torch.Generator().manual_seed(4)).T.requires_grad_()
    t = torch.randint(0, 90, (6, 9), generator=torch.Generator().manual_seed(5))

    def fn(x, w, t):
        return F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten())

    compiled, transform = chunked(fn, rows=7)
    grads = torch.autograd.grad(compiled(x, w, t), (x, w))
    assert transform.record.loops[0].chunks == 8
    for got, want in zip(grads, exact(fn, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


# --- refusals ----------------------------------------------------------------------------------------


def refuses(fn, *args, expect):
    compiled, transform = chunked(fn)
    got = compiled(*args)
    want = fn(*args)
    assert not transform.record.loops
    assert transform.record.refusals
    text = str(transform.record.refusals[0])
    assert expect in text, text
    assert "test_chunk_traps.py:" in text, text
    return got, want


def test_softmax_over_rows_is_refused():
    x, w, t = inputs()
    got, want = refuses(
        lambda x, w, t: torch.log_softmax(F.linear(x, w), 0).gather(1, t[:, None]).mean(), x, w, t, expect="rows"
    )
    torch.testing.assert_close(got, want)


def test_contrastive_loss_is_refused():
    def clip(x, y):
        z = x @ y.T * 10
        labels = torch.arange(x.shape[0])
        return (F.cross_entropy(z, labels) + F.cross_entropy(z.T, labels)) / 2

    g = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(64, 8, generator=g), dim=-1).requires_grad_() for _ in range(2))
    got, want = refuses(clip, x, y, expect="rows")
    torch.testing.assert_close(got, want)


def test_returned_logits_are_refused():
    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t), z

    x, w, t = inputs()
    got, want = refuses(fn, x, w, t, expect="returned whole")
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_dropout_on_logits_draws_the_same_numbers():
    """The mask is drawn whole, outside the loop, so that the generator's stream stays Thunder's."""

    def fn(x, w, t):
        return F.cross_entropy(F.dropout(F.linear(x, w), 0.5), t)

    x, w, t = inputs()
    compiled, transform = chunked(fn)
    results = []
    for step in (compiled, thunder.jit(fn)):
        torch.manual_seed(0)
        loss = step(x, w, t)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    assert transform.record.loops
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_random_numbers_made_from_logits_are_refused():
    x, w, t = inputs()
    refuses(
        lambda x, w, t: (torch.multinomial(torch.softmax(F.linear(x, w), -1), 1).squeeze(-1) == t).float().mean(),
        *(a.detach() for a in (x, w)), t, expect="random numbers",
    )  # fmt: skip


def test_logits_that_feed_a_projection_are_refused_or_right():
    """Soft embeddings: large values are contracted to rows as wide as the input."""

    def fn(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + (torch.softmax(z, -1) @ w).square().mean()

    x, w, t = inputs()
    compiled, _ = chunked(fn)
    grads = torch.autograd.grad(compiled(x, w, t), (x, w))
    for got, want in zip(grads, exact(fn, x, w, t)[1], strict=True):
        assert relative(got, want) < 1e-5


# --- surroundings ------------------------------------------------------------------------------------


def test_autocast_with_float32_weights():
    x, w, t = inputs(64, 32, 500)
    fn, transform = chunked(head)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fn(x, w, t)
        ref = head(x, w, t)
    dx, dw = torch.autograd.grad(loss, (x, w))
    ex, ew = torch.autograd.grad(ref, (x, w))
    assert transform.record.loops
    assert dw.dtype == torch.float32
    assert relative(loss, ref.double()) < 1e-2
    assert relative(dx, ex.double()) < 2e-2 and relative(dw, ew.double()) < 2e-2


def test_a_module_trains_like_its_eager_copy():
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(97, 12)
            self.norm = torch.nn.LayerNorm(12)
            self.head = torch.nn.Linear(12, 97, bias=True)

        def forward(self, i, t):
            return F.cross_entropy(self.head(self.norm(torch.tanh(self.embed(i)))).flatten(0, 1), t.flatten())

    torch.manual_seed(0)
    model = Tiny()
    twin = copy.deepcopy(model)
    i, t = torch.randint(0, 97, (2, 5, 7))
    compiled, transform = chunked(model)
    for _ in range(3):
        for m, step in ((model, compiled), (twin, twin)):
            m.zero_grad()
            step(i, t).backward()
            torch.optim.SGD(m.parameters(), 0.5).step()
    assert transform.record.loops
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "dtype,accumulate", [(torch.float32, "input"), (torch.bfloat16, "input"), (torch.bfloat16, "float32")]
)
def test_peak_is_the_lower_bound_and_a_chunk(dtype, accumulate):
    n, d, v, chunks = 512, 16, 8192, 4
    x, w, t = inputs(n, d, v, dtype)
    fn, transform = chunked(head, chunks=chunks, accumulate=accumulate)

    def step():
        return torch.autograd.grad(fn(x, w, t), (x, w))

    step()
    s = dtype.itemsize
    bound = s * (n + v) * d + (2 * v * d if accumulate == "float32" and s == 2 else 0)
    chunk = n // chunks * v * s
    assert transform.record.loops[0].logits_bytes == chunk
    assert measure_peak(step) <= bound + 1.15 * chunk
    assert measure_peak(step) < n * v * s


def test_options_are_checked():
    for bad in ({"chunks": 0}, {"rows": -1}, {"chunks": 2, "rows": 3}, {"accumulate": "bf16"}):
        with pytest.raises(ValueError):
            ChunkLossHead(**bad)
    for bad in ({"chunks": 2.0}, {"rows": "many"}, {"chunks": True}):
        with pytest.raises(TypeError):
            ChunkLossHead(**bad)
    assert eval(repr(ChunkLossHead(rows="auto"))).rows == "auto"


def test_small_heads_are_left_alone_in_automatic_mode():
    x, w, t = inputs()
    fn, transform = chunked(head, rows="auto")
    fn(x, w, t)
    assert not transform.record.loops and not transform.record.refusals
