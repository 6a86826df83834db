"""Checkpoints that Thunder alone gets wrong, and those around them, against eager PyTorch's own checkpoint.

Everything runs in float64, and the reference draws random numbers as Thunder does (a uniform in index
order), so the two agree to rounding: another mask, or an overwritten operand, would be off by far more.
"""

import functools
import warnings
from collections.abc import Callable

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential, create_selective_checkpoint_contexts

from tests.checking.defects import BEYOND, DEFECTS
from tests.checking.oracle import check
from tests.fuzzing.command import CONFIGS, uncompiled_regions
from thunder_mem import MemEfficient, measure_peak
from thunder_mem.frontend.checkpoint_tags import CHECKPOINTED
from thunder_mem.prediction.predict import predict

EXECUTORS = {
    "no fusion": [],
    "torch": ["torch"],
    "mem_pointwise": ["mem_pointwise"],
    "torchcompile": ["torchcompile"],
    "default": None,
}


def checkpoint(fn: Callable, *args):
    return torch_checkpoint(fn, *args, use_reentrant=False)


def drop(x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """Dropout that draws as Thunder's decomposition does."""
    return x * (torch.rand_like(x) < 1 - p) * (1 / (1 - p))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return drop(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)) @ v


class Ops:
    """The functions whose random numbers eager and Thunder draw differently."""

    def __init__(self, reference: bool) -> None:
        self.dropout = drop if reference else F.dropout
        self.attention = attend if reference else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def dropout(ops, x, w):
    return checkpoint(lambda x, w: ops.dropout((x @ w).sin()).exp() @ w, x, w)


def two_dropouts(ops, x, w):
    # The second is needed first in the backward: a repetition in order of need would swap the masks.
    return checkpoint(lambda x, w: (ops.dropout(ops.dropout(x @ w).sin()) @ w).exp(), x, w).sin()


def masks_of_two_checkpoints(ops, x, w):
    for _ in range(2):
        x = checkpoint(lambda x, w: ops.dropout((x @ w).sin()) * w, x, w)
    return x.exp()


def rand_like(ops, x, w):
    return checkpoint(lambda x, w: (torch.rand_like(x) * (x @ w)).sin(), x, w)


def randn_like(ops, x, w):
    return checkpoint(lambda x, w: torch.randn_like(x) * (x @ w).sin() * w, x, w)


def attention_dropout(ops, x, w):
    def region(x, w):
        y = (x @ w)[None, None]
        return ops.attention(y, y * 0.5, y * 2)

    return checkpoint(region, x, w).sin()


def nested(ops, x, w):
    def inner(x, w):
        return ops.dropout((x @ w).sin()).exp()

    return checkpoint(lambda x, w: checkpoint(inner, x, w).cos() @ w, x, w)


def in_place(ops, x, w):
    return checkpoint(lambda x, w: (x @ w).add_(1).sin().mul_(2).exp(), x, w)


def in_place_through_views(ops, x, w):
    def region(x, w):
        y = x @ w
        rows, turned = y[:2], y.transpose(0, 1)
        y.mul_(w).sin_()
        return (rows @ turned).exp()

    return checkpoint(region, x, w)


def in_place_on_an_activation(ops, x, w):
    return checkpoint(lambda x, w: F.relu(x @ w, inplace=True) @ w, x, w)


def copied_and_set(ops, x, w):
    def region(x, w):
        y = (x @ w).sin()
        y[1:] = x[1:] * 2
        z = torch.zeros_like(y)
        z.copy_(y)
        z += w
        return z.exp() * y

    return checkpoint(region, x, w)


def dropout_and_in_place(ops, x, w):
    return checkpoint(lambda x, w: ops.dropout(x @ w).add_(w).sin_() * 2, x, w)


def autocast(ops, x, w):
    def region(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.dropout((x.float() @ w.float()).double()).sin()

    return checkpoint(region, x, w)


def topk(ops, x, w):
    def region(x, w):
        values, places = torch.topk(x @ w, 2, -1)
        return values.sin() * torch.gather(x, 1, places)

    return checkpoint(region, x, w)


def alive_anyway(ops, x, w):
    y = x @ w
    return y.cos() + checkpoint(lambda y, w: (y @ w).sin() * y.exp(), y, w)


def plain(ops, x, w):
    return checkpoint(lambda x, w: ((x @ w).sin() @ w).exp(), x, w)


PROGRAMS = [
    dropout, two_dropouts, masks_of_two_checkpoints, rand_like, randn_like, attention_dropout, nested, in_place,
    in_place_through_views, in_place_on_an_activation, copied_and_set, dropout_and_in_place, autocast, topk,
    alive_anyway, plain,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _uncompiled():
    """Regions run one operation at a time, whoever fuses them: what is planned is tested, not Inductor."""
    torch.compiler.set_stance("force_eager")
    with uncompiled_regions():
        yield
    torch.compiler.set_stance("default")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))


def run(fn: Callable, ops: Ops | None = None) -> list[torch.Tensor]:
    x, w = inputs()
    torch.manual_seed(7)
    out = fn(x, w) if ops is None else fn(ops, x, w)
    state = torch.get_rng_state()
    grads = torch.autograd.grad((out * torch.arange(out.numel()).view(out.shape)).sum(), (x, w))
    return [out.detach(), *grads, state, torch.get_rng_state()]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("executors", EXECUTORS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients_are_eagers(program: Callable, executors: str):
    options = {} if EXECUTORS[executors] is None else {"executors": EXECUTORS[executors]}
    jitted = thunder.jit(lambda x, w: program(Ops(False), x, w), transforms=[MemEfficient(strict=True)], **options)
    for got, expected in zip(run(jitted), run(program, Ops(True)), strict=True):
        close(got, expected)


@pytest.mark.parametrize("program", [dropout, rand_like, in_place], ids=lambda p: p.__name__)
def test_thunder_alone_is_wrong(program: Callable):
    """When it is right, what is done here for it can go."""
    jitted = thunder.jit(lambda x, w: program(Ops(False), x, w), executors=[])
    found, expected = run(jitted), run(program, Ops(True))
    assert any(not torch.allclose(g, e) for g, e in zip(found[1:3], expected[1:3], strict=True))


def saved(fn: Callable, **options) -> dict[str, torch.Tensor]:
    """What the forward keeps for the backward, the inputs apart, by name."""
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)], **options)
    args = inputs()
    jitted(*args)
    last = thunder.last_traces(jitted)[-1].bound_symbols[-1]
    return {p.name: p for p in last.args[1][0] if p.name not in ("x", "w")}


def test_of_a_dropout_the_mask_is_kept():
    kept = saved(lambda x, w: dropout(Ops(False), x, w))
    assert [p.dtype for p in kept.values()] == [thunder.bool8]


def test_a_checkpoint_keeps_nothing_where_all_can_be_rebuilt():
    assert saved(lambda x, w: checkpoint(lambda x, w: ((x @ w).sin() @ w).cos() * 2, x, w)) == {}


def test_what_is_alive_anyway_is_not_rebuilt():
    """The checkpoint's first product is also returned: its caller keeps it."""

    def fn(x, w):
        def region(x, w):
            y = x @ w
            return y, (y.sin() @ w).exp()

        return checkpoint(region, x, w)

    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    jitted(*inputs())
    backward = thunder.last_backward_traces(jitted)[-1]
    forward = thunder.last_traces(jitted)[-1]
    products = [sum(b.sym.name == "matmul" for b in t.bound_symbols) for t in (forward, backward)]
    assert products == [2, 5 - 1]  # two of each product's gradient, and none again


def test_a_smaller_value_inside_a_checkpoint_is_kept_rather_than_its_source():
    def fn(x, w):
        big = (x @ w).exp()
        return checkpoint(lambda b: b.sum(0).sin().cos(), big * 2)

    kept = saved(fn)
    shapes = sorted(tuple(p.shape) for p in kept.values())
    assert (4,) in shapes


def test_a_norm_at_the_end_of_a_checkpoint_is_kept_as_any_other_result():
    """Its last sum, which its result shows, was repeated from the checkpoint's start, beside all later checkpoints."""

    def layer(x, up, down):
        return F.layer_norm(F.gelu(x @ up) @ down + x, (16,))

    def layers(x, up, down, count):
        for _ in range(count):
            x = checkpoint(layer, x, up, down)
        return x

    def peak_bytes(count):
        jitted = thunder.jit(layers, executors=["mem_pointwise"], transforms=[MemEfficient(strict=True)])
        x, up, down = (torch.randn(*s) for s in ((64, 16), (16, 256), (256, 16)))
        return predict(jitted, x.requires_grad_(), up, down, count).phase("backward").peak_bytes

    result_bytes, inner_bytes = 64 * 16 * 4, 64 * 256 * 4
    assert peak_bytes(3) - peak_bytes(1) <= 4 * result_bytes < inner_bytes


def test_a_small_view_that_a_checkpoint_returns_keeps_no_large_value():
    def layer(x, up, down):
        hidden = torch.tanh(x @ up)
        return hidden[:, :16] * 2 + hidden @ down, hidden[:, :16]

    def layers(x, up, down):
        for _ in range(4):
            x, part = checkpoint(layer, x, up, down)
            x = x * part
        return x

    jitted = thunder.jit(layers, executors=[], transforms=[MemEfficient(strict=True)])
    args = [torch.randn(*s) for s in ((64, 16), (16, 512), (512, 16))]
    hidden_bytes = 64 * 512 * 4
    assert predict(jitted, args[0].requires_grad_(), *args[1:]).phase("backward").peak_bytes < 5 * hidden_bytes


class Normed(torch.nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4)
        ).double()

    def forward(self, x):
        return checkpoint(self.layers, x) if self.checkpointed else self.layers(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("executors", EXECUTORS)
def test_batch_norm_counts_a_step_once(executors: str):
    """As without the checkpoint. Eager's checkpoint runs the forward again and counts twice; its gradients agree."""
    options = {} if EXECUTORS[executors] is None else {"executors": EXECUTORS[executors]}
    model, once, twice = Normed(True), Normed(False), Normed(True)
    jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)], **options)
    for step in range(2):
        for module in (jitted, once, twice):
            x = inputs()[0] + step
            module(x).sin().sum().backward()
        for (name, p), (_, q), (_, r) in zip(
            model.named_parameters(), once.named_parameters(), twice.named_parameters(), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
            torch.testing.assert_close(p.grad, r.grad, msg=name)
        for (name, a), (_, b) in zip(model.named_buffers(), once.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert twice.get_buffer("layers.1.num_batches_tracked") == 2 * once.get_buffer("layers.1.num_batches_tracked")


def test_a_plan_that_fails_leaves_the_checkpoint(monkeypatch):
    from thunder_mem.decisions import partition_choice

    def fails(*args, **kwargs):
        raise RuntimeError("no plan")

    monkeypatch.setattr(partition_choice, "arrange", fails)
    jitted = thunder.jit(lambda x, w: dropout(Ops(False), x, w), executors=[], transforms=[MemEfficient()])
    with pytest.warns(UserWarning, match="no plan"):
        got = run(jitted)
    for mine, expected in zip(got, run(dropout, Ops(True)), strict=True):
        close(mine, expected)
    assert any(CHECKPOINTED in b.tags for b in thunder.last_backward_traces(jitted)[-1].bound_symbols)


@pytest.mark.slow
def test_a_checkpoint_saves_memory_as_in_thunder():
    def layers(x, w, region):
        for _ in range(6):
            x = region(lambda x, w: (x @ w).sin().mul(w.sum()).exp().log() @ w, x, w)
        return x

    def peaks(region, transforms):
        jitted = thunder.jit(lambda x, w: layers(x, w, region), executors=[], transforms=transforms)
        args = [torch.randn(256, 256, requires_grad=True) for _ in range(2)]
        return predict(jitted, *args).phase("backward").peak_bytes

    without = peaks(lambda fn, *args: fn(*args), [])
    ours, thunders = peaks(checkpoint, [MemEfficient(strict=True)]), peaks(checkpoint, [])
    assert ours <= thunders < without


def test_through_torch_compile():
    """ThunderFX's checkpoint is one operation around the others."""
    from thunder.dynamo import ThunderCompiler

    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    backend = ThunderCompiler(executors=[], transforms=[MemEfficient(strict=True)])

    def fn(x, w):
        return torch_checkpoint(lambda x, w: drop((x @ w).sin()).exp() @ w, x, w, use_reentrant=False)

    compiled = torch.compile(fn, backend=backend)
    for got, expected in zip(run(compiled)[:3], run(lambda x, w: dropout(Ops(True), x, w))[:3], strict=True):
        close(got, expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("executors", ["mem", "mem-no-fusion"])
@pytest.mark.parametrize("name", BEYOND)
def test_what_thunder_alone_gets_wrong_is_right(name: str, executors: str):
    assert check(DEFECTS[name].program, CONFIGS[executors].compile) == []


def keywords(x, w):
    return torch_checkpoint(lambda a, b=None: (a @ w).tanh() * b, x, b=x, use_reentrant=False, determinism_check="none")


def reentrant(x, w):
    return torch_checkpoint(lambda a: (a @ w).tanh().exp(), x.sin(), use_reentrant=True, preserve_rng_state=False) @ w


def one_in_another(x, w):
    inner = functools.partial(torch_checkpoint, lambda b: (b @ w).sin().exp(), use_reentrant=False)
    return torch_checkpoint(lambda a: inner((a @ w).sin().exp()) + a, x, use_reentrant=False).tanh()


def structures(x, w):
    first, rest = torch_checkpoint(
        lambda a, more: (a * more["w"], {"x": a.exp()}), x, {"w": x.sin()}, use_reentrant=False
    )
    return first @ w + rest["x"]


def in_sequence(x, w):
    layers = [lambda a: (a @ w).sin(), torch.tanh, lambda a: (a @ w).exp(), torch.sigmoid]
    return checkpoint_sequential(layers, 2, x, use_reentrant=False)


@pytest.mark.parametrize("executors", [[], None], ids=["unfused", "fused"])
@pytest.mark.parametrize("fn", [keywords, reentrant, one_in_another, structures, in_sequence])
def test_checkpoints_are_called_as_in_pytorch(fn, executors):
    """Thunder refuses the first three, or puts the inner one before the outer one."""
    given = [torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    jitted = thunder.jit(
        fn, transforms=[MemEfficient(strict=True)], **({} if executors is None else {"executors": executors})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = jitted(*mine)
    expected = fn(*theirs)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    result.backward(weight)
    expected.backward(weight)
    for ours, eager in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-12, atol=1e-12)


def test_nested_checkpoints_peak_below_eagers():
    def deep(x, w):
        for _ in range(4):
            x = one_in_another(x, w)
        return x.sum()

    x, w = torch.randn(512, 32, requires_grad=True), (torch.randn(32, 32) / 8).requires_grad_()
    jitted = thunder.jit(deep, executors=[], transforms=[MemEfficient(strict=True)])

    def step(fn):
        torch.autograd.grad(fn(x, w), (x, w))

    step(jitted)
    assert measure_peak(step, jitted) < measure_peak(step, deep)


def test_a_choice_of_what_to_recompute_is_ignored_with_a_warning():
    chooses = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def fn(x, w):
        return torch_checkpoint(lambda a: (a @ w).sin(), x, use_reentrant=False, context_fn=chooses)

    with pytest.warns(UserWarning, match="context_fn= of a checkpoint is ignored"):
        thunder.jit(fn, transforms=[MemEfficient(strict=True)])(torch.ones(2, 2), torch.ones(2, 2))
