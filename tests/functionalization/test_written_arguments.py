"""Writes to arguments that have a gradient: autograd sees them as in eager, inside of what is compiled and after."""

import warnings

import pytest
import thunder
import torch
from thunder.dynamo import thunderfx

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import MemEfficient, predict_step
from thunder_mem.transforms import before_autograd


def under_no_grad(s, r):
    with torch.no_grad():
        s.mul_(2)
    return (s * r).sum()


def under_no_grad_and_not(s, r):
    with torch.no_grad():
        s.add_(1)
    s.mul_(r)
    return s.sum()


def under_no_grad_and_returned(s, r):
    with torch.no_grad():
        s.add_(r)
    return s, r.sin()


def under_no_grad_alone(s, r):
    with torch.no_grad():
        s.add_(r)
    return r.sin()


def twice_under_no_grad(s, r):
    with torch.no_grad():
        s.add_(r)
        s.mul_(2)
    return r.sin()


def rows_under_no_grad(s, r):
    with torch.no_grad():
        s[0] = r[1]
    return (s * r).sum()


def both(s, r):
    s.mul_(r * 2)
    r.add_(s)
    return (s * r).sum()


def rows(s, r):
    s[0] = r[1]
    return s.pow(2).sum()


def beside_a_new_value(s, r):
    y = r.sin()
    y.mul_(2)
    s.add_(y)
    return y


WRITES = {
    "a sum": lambda s, r: (s.add_(r), s.pow(2).sum())[1],
    "a product, whose gradient needs the old value": lambda s, r: (s.mul_(r), s.pow(2).sum())[1],
    "two": lambda s, r: (s.mul_(r), s.add_(r.sin()), s.pow(2).sum())[2],
    "a constant": lambda s, r: (s.add_(1), (s * r).sum())[1],
    "an element": rows,
    "of both arguments": both,
    "returned": lambda s, r: s.mul_(r),
    "returned among others": lambda s, r: (s.mul_(r), s.sin(), s)[1:],
    "returned twice": lambda s, r: (s.mul_(r), s, s)[1:],
    "a view is returned": lambda s, r: (s.mul_(r), s[:2])[1],
    "nobody reads it": lambda s, r: (s.mul_(r), r.sum())[1],
    "under no_grad": under_no_grad,
    "under no_grad and not": under_no_grad_and_not,
    "under no_grad, returned": under_no_grad_and_returned,
    "under no_grad, nobody reads it": under_no_grad_alone,
    "under no_grad, twice": twice_under_no_grad,
    "under no_grad, an element": rows_under_no_grad,
    "beside a write to a new value": beside_a_new_value,
}


def results(fn, used_afterwards):
    """Outputs, what the arguments hold afterwards, and gradients of what they were computed from."""
    torch.manual_seed(0)
    x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    s, r = (torch.stack([t * 2]).squeeze(0).clone() for t in (x, y))
    out = fn(s, r)
    outs = list(out) if isinstance(out, tuple) else [out]
    loss = sum((o * (k + 1)).sum() for k, o in enumerate(outs))
    if used_afterwards:
        loss = loss + (s.sin() * torch.arange(12.0, dtype=torch.float64).view(4, 3)).sum()
    gradients = torch.autograd.grad(loss, (x, y), allow_unused=True)
    return [*outs, s, r, *(torch.zeros_like(x) if g is None else g for g in gradients)]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("used_afterwards", [False, True], ids=["inside", "afterwards"])
@pytest.mark.parametrize("fn", WRITES.values(), ids=WRITES.keys())
def test_gradients_are_those_of_eager(fn, used_afterwards):
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    for _ in range(2):
        for got, want in zip(results(jitted, used_afterwards), results(fn, used_afterwards), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fn", [fn for name, fn in WRITES.items() if name.startswith("under")])
def test_an_executor_may_run_a_write_inside_of_a_whole_operation(fn):
    """`torchcompile` takes `ltorch.add_` and does not look inside, where the write is."""
    jitted = thunder.jit(fn, executors=["torchcompile"], transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        for _ in range(2):
            for got, want in zip(results(jitted, True), results(fn, True), strict=True):
                torch.testing.assert_close(got, want)


def only_under_no_grad(s, r):
    with torch.no_grad():
        s.add_(r)


def under_no_grad_then_not(s, r):
    with torch.no_grad():
        s.mul_(2)
    r.add_(s)


@pytest.mark.parametrize("fn", [only_under_no_grad, under_no_grad_then_not])
def test_a_program_without_results_may_write(fn):
    def after(fn):
        torch.manual_seed(0)
        x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        s, r = x * 1, y * 1
        assert fn(s, r) is None
        return [s, r, *torch.autograd.grad((s.sin() * r).sum(), (x, y))]

    for got, want in zip(
        after(thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])), after(fn), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_failure_leaves_the_write_as_thunder_has_it(monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(before_autograd, "with_histories", fails)
    s, r = torch.ones(3, requires_grad=True) * 1, torch.ones(3)
    with pytest.warns(UserWarning, match="left writes to arguments as Thunder has them: RuntimeError: planted"):
        thunder.jit(only_under_no_grad, executors=[], transforms=[MemEfficient()])(s, r)
    assert s.tolist() == [2, 2, 2]


def test_thunder_alone_loses_them():
    """What the mend is for. Where this fails, Thunder has mended it, and the module `written_arguments` can go."""
    fn = WRITES["a sum"]
    got, want = results(thunder.jit(fn, executors=[]), False), results(fn, False)
    assert not torch.allclose(got[-2], want[-2])


def test_a_parameter_that_is_clamped_in_the_forward_has_its_gradient():
    class Clamped(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x).sin().sum()

    torch.manual_seed(0)
    eager = Clamped(4, 4)
    ours = Clamped(4, 4)
    ours.load_state_dict(eager.state_dict())
    x = torch.randn(3, 4)
    eager(x).backward()
    thunder.jit(ours, executors=[], transforms=[MemEfficient(strict=True)])(x).backward()
    torch.testing.assert_close(ours.weight, eager.weight)
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad)


def test_a_leaf_is_refused_as_in_eager():
    jitted = thunder.jit(WRITES["a sum"], executors=[], transforms=[MemEfficient(strict=True)])
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        jitted(torch.ones(4, 3, requires_grad=True), torch.ones(4, 3))


def test_without_gradients_nothing_is_asked_of_autograd():
    jitted = thunder.jit(WRITES["a sum"], executors=[], transforms=[MemEfficient(strict=True)])
    s, r = torch.ones(4, 3), torch.ones(4, 3)
    assert jitted(s, r).item() == 48 and torch.equal(s, torch.full((4, 3), 2.0)) and s.grad_fn is None


def test_one_tensor_for_two_arguments():
    def doubled(s, t):
        s.add_(t)
        return (s * t).sum()

    def gradient(fn):
        x = torch.arange(3.0, requires_grad=True)
        s = x * 2
        return torch.autograd.grad(fn(s, s) + s.sum(), x)

    jitted = thunder.jit(doubled, executors=[], transforms=[MemEfficient(strict=True)])
    torch.testing.assert_close(gradient(jitted), gradient(doubled))


def test_what_autograd_cannot_be_told_is_warned_of_with_its_line():
    def through_a_view(s):
        with torch.no_grad():
            s[0].mul_(2)
        return s.sum()

    jitted = thunder.jit(through_a_view, executors=[], transforms=[MemEfficient(strict=True)])
    line = through_a_view.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match=rf"write at .*test_written_arguments.py:{line}, .*it goes through a view"):
        jitted(torch.ones(3, requires_grad=True) * 2)


# ---- ThunderFX ----


def summed(x, b):
    s = x * 2
    r = torch.sinc(b)  # which Inductor compiles
    s += r
    return s.pow(2).sum()


def scaled_and_used_later(x, b):
    s = x * 2
    r = torch.sinc(b)
    s.mul_(r)
    t = torch.sinc(r)
    return (s.pow(2) * t).sum()


@pytest.mark.slow
@pytest.mark.parametrize("fn", [summed, scaled_and_used_later])
def test_sums_in_place_across_splits_of_thunderfx(fn):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, b = (torch.randn(4, requires_grad=True) for _ in range(2))
    compiled = thunderfx(fn, executors=[], transforms=[MemEfficient(strict=True)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Thunder's autograd")
        for _ in range(2):
            torch.testing.assert_close(
                torch.autograd.grad(compiled(x, b), (x, b)), torch.autograd.grad(fn(x, b), (x, b))
            )


def test_a_step_with_an_argument_that_has_a_history_is_no_step():
    jitted = thunder.jit(torch.sin, executors=[])
    with pytest.raises(ValueError, match=r"only a part of one: give predict_step t.detach\(\).requires_grad_\(\)"):
        predict_step(jitted, None, torch.sum, torch.ones(3, requires_grad=True) * 2)


def attended(x):
    return ATTENTION(x, x, x, need_weights=False)[0].relu_()


ATTENTION = torch.nn.MultiheadAttention(4, 1)
UPSAMPLED = torch.nn.Sequential(torch.nn.ConvTranspose2d(1, 1, 4, 2, 1), torch.nn.ReLU(inplace=True))


@pytest.mark.parametrize("model", [UPSAMPLED, attended], ids=["convolution", "attention"])
def test_a_write_to_what_a_function_computes_is_no_write_to_its_arguments(model):
    x = torch.randn((1, 1, 4, 4) if model is UPSAMPLED else (3, 2, 4), requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Thunder's autograd loses")
        thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])(x)
