"""Programs written by hand, and all that a caller sees when one runs.

A case makes a function (or module) and its arguments anew each time, because running changes them.
`observe` records outputs, their structure and aliasing, gradients, arguments and buffers afterwards,
what was printed and the state of the random generator; `differences` compares two such records.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["Case", "Seen", "case", "differences", "observe", "randn"]

SEED = 11


@dataclass(frozen=True)
class Case:
    """A program and what it is held to.

    Attributes:
        make: returns (function, args) or (function, args, kwargs), each time new and the same.
        held_to: "both" eager, and Thunder alone bit for bit; "thunder" where Thunder alone is not eager
            (another order of random numbers, a defect of its own that stays); "eager" where Thunder alone
            is wrong and MemEfficient mends it.
        double: a float64 run of it means the same; otherwise eager runs as it is.
    """

    make: Callable[[], tuple]
    held_to: str = "both"
    double: bool = True


def case(table: dict[str, Case], held_to: str = "both", double: bool = True) -> Callable[[Callable], Callable]:
    """Enter the decorated function in the table under its name, underscores as spaces."""

    def enter(make: Callable[[], tuple]) -> Callable:
        name = make.__name__.strip("_").replace("_", " ")
        assert name not in table
        table[name] = Case(make, held_to, double)
        return make

    return enter


def randn(*shape: int, grad: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf of fixed values."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


@dataclass(frozen=True)
class Seen:
    """What a caller sees. Tensors by name: "output 0", "gradient 0", "argument 0", "buffer running_mean"."""

    tensors: Mapping[str, torch.Tensor]
    structure: str
    values: Sequence[Any]
    memory: Sequence[tuple]
    printed: str
    rng: torch.Tensor


def observe(made: tuple, compile_with: Callable[[Callable], Callable] = lambda fn: fn, double: bool = False) -> Seen:
    """Compile and call what a case made; go backward from every output that asks for a gradient."""
    fn, args, kwargs = (*made, {})[:3]
    if double:
        args, kwargs = _doubled((args, kwargs))
        fn = fn.double() if isinstance(fn, torch.nn.Module) else fn
    module = fn if isinstance(fn, torch.nn.Module) else None
    compiled = compile_with(fn)
    printed = io.StringIO()
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(printed):
        result = compiled(*args, **kwargs)
    leaves, structure = tree_flatten(result)
    outputs = [x for x in leaves if isinstance(x, torch.Tensor)]
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    memory = _memory([*given, *outputs])
    tensors = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    rng = torch.get_rng_state()

    wanted = list({id(t): t for t in (*given, *(_parameters(module))) if t.requires_grad and t.is_leaf}.values())
    roots = [t for t in outputs if t.requires_grad]
    if roots and wanted:
        grads = torch.autograd.grad(roots, wanted, [_tangent(t) for t in roots], allow_unused=True)
        for i, (t, grad) in enumerate(zip(wanted, grads, strict=True)):
            tensors[f"gradient {i}"] = torch.zeros_like(t) if grad is None else grad
    tensors |= {f"argument {i}": t.detach().clone() for i, t in enumerate(given)}
    if module is not None:
        tensors |= {f"buffer {name}": t.clone() for name, t in module.named_buffers()}
    values = [x for x in leaves if not isinstance(x, torch.Tensor)]
    return Seen(tensors, str(structure), values, memory, printed.getvalue(), rng)


def _parameters(module: torch.nn.Module | None) -> Sequence[torch.Tensor]:
    return () if module is None else tuple(module.parameters())


def _doubled(tree: Any) -> Any:
    """The float32 tensors of a tree in float64; those that share a storage, or are one tensor, still do."""
    bases: dict[int, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}

    def double(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.float32 and id(t) not in done:
            storage = t.untyped_storage()
            if storage.data_ptr() not in bases:
                bases[storage.data_ptr()] = torch.empty(0).set_(storage, 0, (storage.nbytes() // 4,)).double()
            base = bases[storage.data_ptr()]
            done[id(t)] = base.as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)
        return done.get(id(t), t)

    return tree_map_only(torch.Tensor, double, tree)


def _tangent(t: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/4, none of them symmetric."""
    return (((torch.arange(t.numel()) % 7) - 3) / 4 + 0.25).reshape(t.shape).to(t.dtype)


def _memory(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    """Who shares memory with whom, from where, in which strides; nothing for what is empty."""
    number: dict[int, int] = {}
    found: list[tuple] = []
    for t in tensors:
        storage = number.setdefault(t.untyped_storage().data_ptr(), len(number)) if t.numel() else -1
        found.append((storage, t.storage_offset(), t.stride()) if t.numel() else ())
    return found


def differences(expected: Seen, got: Seen, *, alike: bool, bits: bool) -> list[str]:
    """Every difference, in words.

    Args:
        expected: what `got` is held to; its floats may be float64 where `got` has float32.
        got: what was seen.
        alike: both came from Thunder, so memory and random numbers must agree too.
        bits: bit for bit; otherwise within the rounding of the dtype.
    """
    found = []
    if got.structure != expected.structure:
        found.append(f"structure {got.structure}, not {expected.structure}")
    if got.values != expected.values:
        found.append(f"values {got.values}, not {expected.values}")
    if got.printed != expected.printed:
        found.append(f"printed {got.printed!r}, not {expected.printed!r}")
    if alike and got.memory != expected.memory:
        found.append(f"memory {got.memory}, not {expected.memory}")
    if alike and not torch.equal(got.rng, expected.rng):
        found.append("random state")
    if got.tensors.keys() != expected.tensors.keys():
        return [*found, f"tensors {sorted(got.tensors)}, not {sorted(expected.tensors)}"]
    for name, want in expected.tensors.items():
        value = got.tensors[name]
        same_dtype = value.dtype == want.dtype or (
            not bits and (value.dtype, want.dtype) == (torch.float32, torch.float64)
        )
        if value.shape != want.shape or not same_dtype:
            found.append(f"{name}: {value.dtype}{tuple(value.shape)}, not {want.dtype}{tuple(want.shape)}")
        elif bits or not value.is_floating_point():
            if not _same_bits(value, want):
                found.append(f"{name}: off by {_distance(value, want):.3g}, and should be the same bits")
        elif not torch.allclose(value.double(), want.double(), **_TOLERANCE[value.dtype], equal_nan=True):
            found.append(f"{name}: off by {_distance(value, want):.3g}")
    return found


_TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() and not a.is_complex() else 0.0
