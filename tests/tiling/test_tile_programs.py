"""Random token-wise programs in forced tiles: values and gradients against float64 eager."""

from random import Random

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, Tiles, last_plan

WIDTHS = (6, 16)
TOKENS = ((23,), (4, 6), (2, 3, 4))


def cat_and_halve(a, b):
    return torch.cat((a, b), -1)[..., : a.shape[-1]]


def by_token(a, b):
    return a * b.mean(-1, keepdim=True)


def in_place(a, b):
    y = a * 2
    y.add_(b)
    return y


UNARY = (
    torch.sin,
    torch.relu,
    torch.sigmoid,
    F.silu,
    lambda a: torch.softmax(a, -1),
    lambda a: a.detach() + a,
    lambda a: F.layer_norm(a, a.shape[-1:]),
    lambda a: F.rms_norm(a, a.shape[-1:]),
    lambda a: a.double().to(a.dtype),
    lambda a: a.transpose(-1, -2).contiguous().transpose(-1, -2),
    lambda a: a.reshape(-1, a.shape[-1]).view(a.shape),
    lambda a: torch.where(a > 0, a, 0.1 * a),
)
BINARY = (torch.add, torch.mul, torch.maximum, cat_and_halve, by_token, in_place)
COUPLED = (lambda a: a.cumsum(-2), lambda a: a - a.mean(-2, keepdim=True), lambda a: a * a.sum(-2, keepdim=True))


def drawn_program(seed):
    """A function of an input and weights, with shapes of both; all of it follows from the seed."""
    rng = Random(seed)
    steps = []
    widths = [WIDTHS[0]]
    weights = []
    for _ in range(rng.randint(6, 14)):
        kind = rng.choices(["linear", "unary", "binary", "coupled"], [4, 4, 4, 0.5])[0]
        a = rng.randrange(max(0, len(widths) - 4), len(widths))
        if kind == "linear":
            target = rng.choice(WIDTHS)
            if weights and rng.random() < 0.2 and (widths[a], target) in [(i, o) for o, i in weights]:
                k = [(i, o) for o, i in weights].index((widths[a], target))  # a weight that is read twice
            else:
                k = len(weights)
                weights.append((target, widths[a]))
            steps.append((F.linear, (a,), k))
            widths.append(target)
            continue
        same = [i for i, w in enumerate(widths) if w == widths[a]]
        table = {"unary": UNARY, "binary": BINARY, "coupled": COUPLED}[kind]
        given = (a, rng.choice(same)) if kind == "binary" else (a,)
        steps.append((rng.choice(table), given, None))
        widths.append(widths[a])
    read = sorted({len(widths) - 1, *(i for i in range(1, len(widths)) if rng.random() < 0.15)})
    totals = [rng.choice((torch.mean, torch.sum)) for _ in read]
    inner = rng.choice((True, False))

    def body(x, *weights):
        values = [x]
        for fn, given, weight in steps:
            operands = [values[i] for i in given]
            values.append(fn(*operands) if weight is None else fn(*operands, weights[weight]))
        return tuple(values[i] for i in read)

    def program(x, *weights):
        found = checkpoint(body, x, *weights, use_reentrant=False) if inner else body(x, *weights)
        return sum(total(value.square()) for total, value in zip(totals, found, strict=True))

    return program, (*rng.choice(TOKENS), WIDTHS[0]), weights, rng.choice((1, 3, 5, 7, 64)), rng.random() < 0.5


def run(fn, x, weights, dtype):
    given = [t.detach().to(dtype).requires_grad_() for t in (x, *weights)]
    value = fn(*given)
    return value.detach(), *torch.autograd.grad(value, given, allow_unused=True, materialize_grads=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 150))])
def test_random_programs(seed):
    program, shape, shapes, rows, chunk = drawn_program(seed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    weights = [torch.randn(s, generator=g) / s[1] ** 0.5 for s in shapes]
    tile = Tiles(rows=rows)
    transform = MemEfficient(tile=tile, chunk=chunk, strict=True, verify=True)
    jitted = thunder.jit(program, executors=[], transforms=[transform])
    exact = run(program, x, weights, torch.float64)
    eager = run(program, x, weights, torch.float32)
    scale = max(e.norm().item() for e in exact)
    for ours, theirs, right in zip(run(jitted, x, weights, torch.float32), eager, exact, strict=True):
        error, allowed = ((result.double() - right).norm().item() for result in (ours, theirs))
        assert error <= 4 * allowed + 1e-6 * scale


@pytest.mark.slow
def test_most_of_them_have_tiles():
    """The programs above would prove nothing without any."""
    tiled = 0
    for seed in range(6):
        program, shape, shapes, rows, _ = drawn_program(seed)
        jitted = thunder.jit(program, executors=[], transforms=[MemEfficient(tile=Tiles(rows=rows), chunk=False)])
        run(jitted, torch.ones(shape), [torch.ones(s) for s in shapes], torch.float32)
        tiled += any(d.what == "tiles" for d in last_plan(jitted).decisions)
    assert tiled >= 2
