"""The arguments of random programs: drawing them, and making the tensors.

A few inputs may be a kit: shapes that fit together as in a loss head, attention, a norm or an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import torch

from tests.programs.programs import Input

__all__ = ["KITS", "LAYOUTS", "draw_inputs", "inputs_on", "materialise", "storage"]

LAYOUTS = ("transposed", "strided", "offset", "expanded")


_device = "cpu"


@contextmanager
def inputs_on(device: str) -> Iterator[None]:
    """Within, `materialise` makes its tensors on this device, such as "cuda"."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def materialise(inputs: tuple[Input, ...], double: bool = False) -> dict[str, torch.Tensor]:
    """The arguments, in order, the same at each call; `double` widens every float to float64.

    Values are multiples of 1/8 in [-2, 2], exact in every float dtype here.
    """
    generator = torch.Generator().manual_seed(len(inputs))
    tensors: dict[str, torch.Tensor] = {}
    for i in inputs:
        if i.alias:
            t = eval(i.alias, dict(tensors))
        else:
            t = _fresh(i, generator, double)
        tensors[i.name] = t if i.alias else t.requires_grad_(i.grad)
    return tensors


def _fresh(i: Input, generator: torch.Generator, double: bool) -> torch.Tensor:
    dtype = getattr(torch, i.dtype)
    shape = list(i.shape)
    if i.layout == "transposed":
        shape[-1], shape[-2] = shape[-2], shape[-1]
    elif i.layout == "strided":
        shape[-1] *= 2
    elif i.layout == "offset":
        shape[0] += 2
    elif i.layout == "expanded":
        shape[0] = 1
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator)
    elif dtype.is_floating_point:
        values = torch.randint(-16, 17, shape, generator=generator) / 8
    else:
        values = torch.randint(0, 3, shape, generator=generator)
    t = values.to(_device, torch.float64 if double and dtype.is_floating_point else dtype)
    if i.layout == "transposed":
        return t.transpose(-1, -2)
    if i.layout == "strided":
        return t[..., ::2]
    if i.layout == "offset":
        return t[1:-1]
    if i.layout == "expanded":
        return t.expand(i.shape)
    return t


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


Kit = list[tuple[tuple[int, ...], str]]  # shapes, and "float", "int64" or "bool"


def _head(rng: Random) -> Kit:
    width, classes = rng.choice([2, 4, 8]), rng.choice([3, 5, 8])
    rows = rng.choice([(4,), (6,), (9,), (16,), (2, 3), (2, 4)])
    return [((*rows, width), "float"), ((classes, width), "float"), (rows, "int64")]


def _attention(rng: Random) -> Kit:
    batch, heads, rows, columns, width = rng.choice([1, 2]), rng.choice([1, 2]), 3, rng.choice([3, 3, 4]), 4
    keys = ((batch, heads, columns, width), "float")
    return [((batch, heads, rows, width), "float"), keys, keys, ((rows, columns), rng.choice(["bool", "float"]))]


def _shared_attention(rng: Random) -> Kit:
    batch, keys, times, rows, width = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 3]), 5, 4
    key = ((batch, keys, rows, width), "float")
    return [((batch, keys * times, rows, width), "float"), key, key, ((rng.choice([6, 9]), width), "float")]


def _norm(rng: Random) -> Kit:
    width = rng.choice([2, 3, 4])
    # The vectors fit as scale and shift of the last dim, or of the second, whose running statistics are overwritten.
    shape = rng.choice([(5, width), (3, width, 2), (2, 3, width), (4, width)])
    return [(shape, "float"), *[((width,), "float")] * rng.choice([2, 3])]


def _embedding(rng: Random) -> Kit:
    return [(rng.choice([(5,), (2, 3)]), "int64"), ((rng.choice([3, 4, 8]), rng.choice([2, 4])), "float")]


def _indices(rng: Random) -> Kit:
    rows, columns = rng.choice([3, 4]), rng.choice([3, 4])
    return [((rows, columns), "float"), ((rows,), "int64"), ((rng.choice([1, 2]), columns), "int64")]


def _mlp(rng: Random) -> Kit:
    width, wide = rng.choice([2, 3]), rng.choice([5, 6, 8])
    rows = rng.choice([(4,), (7,), (13,), (2, 4), (1, 5), (5, 1)])
    return [((*rows, width), "float"), ((wide, width), "float"), ((width, wide), "float"), ((wide,), "float")]


# By name, the family of operations that they fit, and their shapes.
KITS: dict[str, tuple[str, Callable[[Random], Kit]]] = {
    "loss head": ("head", _head),
    "attention": ("attention", _attention),
    "shared attention": ("attention", _shared_attention),
    "norm": ("norm", _norm),
    "embedding": ("attention", _embedding),
    "indices": ("join", _indices),
    "mlp": ("matmul", _mlp),
}


def draw_inputs(
    rng: Random, aliases: bool = True, layouts: tuple[str, ...] = LAYOUTS, kit: str = ""
) -> tuple[Input, ...]:
    """A program's inputs: those of the kit, if any, and others."""
    sizes = [rng.choice([1, 2, 3, 4, 4, 6, 8, 8]) for _ in range(3)]
    if rng.random() < 0.06:
        sizes[rng.randrange(3)] = 0
    main = rng.choices(["float32", "bfloat16", "float64", "float16"], [6, 3, 2, 1])[0]
    wanted = [(shape, main if kind == "float" else kind) for shape, kind in (KITS[kit][1](rng) if kit else ())]
    inputs: list[Input] = []
    for k in range(len(wanted) + (rng.randint(0, 2) if kit else rng.randint(1, 4))):
        name = f"x{k}"
        earlier = [i for i in inputs if not i.alias]
        if k >= len(wanted) and aliases and earlier and rng.random() < 0.12:
            inputs.append(_draw_alias(rng, name, rng.choice(earlier)))
            continue
        if k < len(wanted):
            shape, dtype = wanted[k]
        else:
            dtype = rng.choices([main, "float32", "int64", "bool"], [8, 2, 1, 1])[0]
            shape = tuple(rng.choice([*sizes, 1]) if rng.random() < 0.3 else sizes[d] for d in range(3))
            ranks = rng.choice([0, 1, 2, 2, 2, 3, 3]), 3 - rng.choice([1, 2, 3])
            shape = shape[: ranks[0]] if rng.random() < 0.5 else shape[ranks[1] :]
        layout = rng.choice(layouts) if layouts and rng.random() < 0.2 else "contiguous"
        if len(shape) < (2 if layout == "transposed" else 1) or (layout == "expanded" and shape[0] == 0):
            layout = "contiguous"
        grad = dtype not in ("int64", "bool") and rng.random() < (0.5 if kit == "norm" else 0.6)
        inputs.append(Input(name, shape, dtype, grad, layout))
    return tuple(inputs)


def _draw_alias(rng: Random, name: str, base: Input) -> Input:
    views = [base.name, f"{base.name}.detach()"]
    if base.shape and not base.grad:
        views += [f"{base.name}[..., ::2]", f"{base.name}[:1]", f"{base.name}.transpose(0, -1)"]
    alias = rng.choice(views)
    shape = tuple(materialise((base, Input(name, (), alias=alias)))[name].shape)
    return Input(name, shape, base.dtype, base.grad and alias == base.name, alias=alias)
