"""Random PyTorch programs as small immutable trees that print as runnable Python.

A `Program` is inputs, straight-line steps and regions (checkpoint, no_grad, autocast), and outputs.
It holds names and literals only, so it compares, hashes, shrinks and survives in a test file by its
`repr`. `source` prints it for eager and for `thunder.jit`; `reference_source` prints the same program
for a float64 run without checkpoints, in which every fresh value passes through `_r`.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch.utils.checkpoint import checkpoint

from tests.programs.program_functions import FUNCTIONS
from tests.programs.program_ops import OPS
from tests.programs.program_splits import parted

__all__ = ["SCOPE", "Input", "Program", "Region", "Step", "constructs", "function", "reference_source", "source"]

INDENT = "    "

# What a printed program refers to.
SCOPE = {"torch": torch, "F": torch.nn.functional, "checkpoint": checkpoint, "parted": parted, **FUNCTIONS}


@dataclass(frozen=True)
class Input:
    """One argument of a program.

    Attributes:
        name: the argument's name, `x0`, `x1`, ...
        shape: its sizes, as the program sees it.
        dtype: a torch dtype by name, such as "bfloat16".
        grad: it is a leaf that asks for a gradient.
        layout: "contiguous", "transposed", "strided", "offset" or "expanded" (stride 0).
        alias: an expression over an earlier input whose memory this one shares, or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    grad: bool = False
    layout: str = "contiguous"
    alias: str = ""


@dataclass(frozen=True)
class Step:
    """One statement: `targets = OPS[op](args, params)`.

    An op in place has no targets, or one: a method's result, another name for what it overwrote.
    """

    op: str
    targets: tuple[str, ...]
    args: tuple[str, ...]
    params: tuple[object, ...] = ()


@dataclass(frozen=True)
class Region:
    """Statements under "checkpoint", "no_grad" or "autocast"; only `results` are seen outside."""

    kind: str
    body: tuple[Step | Region, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A function of `inputs` that returns the tuple `outputs`."""

    inputs: tuple[Input, ...]
    body: tuple[Step | Region, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return source(self)


def walk(body: tuple[Step | Region, ...]) -> Iterator[Step | Region]:
    """Every step and region, outermost first, in source order."""
    for item in body:
        yield item
        if isinstance(item, Region):
            yield from walk(item.body)


def defined(body: tuple[Step | Region, ...]) -> tuple[str, ...]:
    """The names that the statements of `body` define at its own level, in order."""
    return tuple(name for item in body for name in (item.targets if isinstance(item, Step) else item.results))


def free(body: tuple[Step | Region, ...]) -> tuple[str, ...]:
    """The names that `body` uses and does not define, in order of use."""
    own: set[str] = set()
    used: dict[str, None] = {}
    for item in body:
        names = item.args if isinstance(item, Step) else free(item.body)
        used.update(dict.fromkeys(name for name in names if name not in own))
        own.update(defined((item,)))
    return tuple(used)


def constructs(program: Program) -> tuple[str, ...]:
    """What a program is made of, by name, sorted: op kinds, regions, and what happens inside checkpoints."""
    found: set[str] = set()

    def visit(body: tuple[Step | Region, ...], inside: tuple[str, ...]) -> None:
        for item in body:
            kind = item.kind if isinstance(item, Region) else OPS[item.op].kind
            found.add(kind)
            if isinstance(item, Step):
                found.add(f"{OPS[item.op].family} op")
            found.update(f"{kind} in {outer}" for outer in inside)
            if isinstance(item, Region):
                visit(item.body, (*inside, item.kind))

    visit(program.body, ())
    found.update(f"{i.layout} input" for i in program.inputs if i.layout != "contiguous")
    found.update(f"{i.dtype} input" for i in program.inputs)
    if any(i.alias for i in program.inputs):
        found.add("aliased inputs")
    if any(0 in i.shape for i in program.inputs):
        found.add("zero-size input")
    if any(i.grad for i in program.inputs):
        found.add("gradient")
    if set(program.outputs) & {i.name for i in program.inputs}:
        found.add("input is output")
    if len(set(program.outputs)) < len(program.outputs):
        found.add("repeated output")
    return tuple(sorted(found))


def _lines(body: tuple[Step | Region, ...], fresh: Iterator[int], reference: bool) -> Iterator[str]:
    for item in body:
        if isinstance(item, Step):
            yield OPS[item.op].statement(item.targets, item.args, item.params, reference)
        elif reference and item.kind == "checkpoint":
            yield from _lines(item.body, fresh, reference)
        elif item.kind == "checkpoint":
            name, args = f"region{next(fresh)}", ", ".join(free(item.body))
            yield f"def {name}({args}):"
            yield from (INDENT + line for line in _lines(item.body, fresh, reference))
            yield f"{INDENT}return {', '.join(item.results)}"
            yield f"{', '.join(item.results)} = checkpoint({name}, {args}, use_reentrant=False)"
        else:
            yield {"no_grad": "with torch.no_grad():", "autocast": 'with torch.autocast("cpu", torch.bfloat16):'}[
                item.kind
            ]
            yield from (INDENT + line for line in _lines(item.body, fresh, reference))


def _print(program: Program, reference: bool) -> str:
    outputs = "".join(f"{name}, " for name in program.outputs).strip()
    lines = [f"def program({', '.join(i.name for i in program.inputs)}):"]
    lines += [INDENT + line for line in _lines(program.body, count(), reference)]
    return "\n".join([*lines, f"{INDENT}return ({outputs})", ""])


def source(program: Program) -> str:
    """The program as a Python function `program`; it needs `SCOPE`."""
    return _print(program, reference=False)


def reference_source(program: Program) -> str:
    """The program for the float64 run: no checkpoints, no float casts, `_r(value, name)` around fresh values."""
    return _print(program, reference=True)


_files = count()


def function(text: str, **extra: object) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile printed source into the function `program`, with its lines known to tracebacks."""
    file = f"<program {next(_files)}>"
    scope: dict = {**SCOPE, **extra}
    exec(compile(text, file, "exec"), scope)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return scope["program"]
