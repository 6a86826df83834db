"""Make a failing program smaller while it keeps failing: greedy search over small edits of the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.generate import validate
from tests.programs.programs import Input, Program, Region, Step, defined, free

__all__ = ["minimise"]

Body = tuple[Step | Region, ...]


def _rename(body: Body, old: str, new: str) -> Body:
    def name(n: str) -> str:
        return new if n == old else n

    return tuple(
        replace(item, args=tuple(map(name, item.args)))
        if isinstance(item, Step)
        else Region(item.kind, _rename(item.body, old, new), tuple(map(name, item.results)))
        for item in body
    )


def _substitute(program: Program, position: int, body: Body, names: dict[str, str]) -> Program:
    """`program` with `body` instead of the top statement at `position`, and `names` renamed after it."""
    rest = program.body[position + 1 :]
    for old, new in names.items():
        rest = _rename(rest, old, new)
    outputs = tuple(names.get(o, o) for o in program.outputs)
    return Program(program.inputs, (*program.body[:position], *body, *rest), outputs)


def _smaller_inputs(i: Input) -> Iterator[Input]:
    if i.layout != "contiguous":
        yield replace(i, layout="contiguous")
    if i.alias:
        yield replace(i, alias="")
    if i.grad and not i.alias:
        yield replace(i, grad=False)
    if i.dtype in ("bfloat16", "float16", "float64"):
        yield replace(i, dtype="float32")
    if i.shape and not i.alias:
        yield replace(i, shape=i.shape[1:])
        for d, n in enumerate(i.shape):
            for m in (1, 2):
                if m < n:
                    yield replace(i, shape=(*i.shape[:d], m, *i.shape[d + 1 :]))


def _edits(program: Program) -> Iterator[Program]:
    """Smaller programs, the largest cuts first; some are not valid."""
    size = len(program.body)
    width = size // 2
    while width > 1:
        for start in range(0, size - width + 1, width):
            yield replace(program, body=program.body[:start] + program.body[start + width :])
        width //= 2
    if len(program.outputs) > 1:
        for k in range(len(program.outputs)):
            yield replace(program, outputs=program.outputs[:k] + program.outputs[k + 1 :])
    for position in reversed(range(size)):
        item = program.body[position]
        if isinstance(item, Region):
            yield _substitute(program, position, item.body, {})
            for k in range(len(item.body)):
                yield _substitute(program, position, (replace(item, body=item.body[:k] + item.body[k + 1 :]),), {})
            for k in range(len(item.results) if len(item.results) > 1 else 0):
                kept = item.results[:k] + item.results[k + 1 :]
                yield _substitute(program, position, (replace(item, results=kept),), {})
            stand_ins = free(item.body)
        else:
            stand_ins = item.args
        yield _substitute(program, position, (), {})
        for name in dict.fromkeys((*stand_ins, *(i.name for i in program.inputs))):
            yield _substitute(program, position, (), dict.fromkeys(defined((item,)), name))
    used = {*free(program.body), *program.outputs, *(i.alias.split(".")[0].split("[")[0] for i in program.inputs)}
    for k, i in enumerate(program.inputs):
        if i.name not in used:
            yield replace(program, inputs=program.inputs[:k] + program.inputs[k + 1 :])
    for name in dict.fromkeys((*defined(program.body), *(i.name for i in program.inputs))):
        if program.outputs != (name,):
            yield replace(program, outputs=(name,))
    for k, i in enumerate(program.inputs):
        for smaller in _smaller_inputs(i):
            yield replace(program, inputs=(*program.inputs[:k], smaller, *program.inputs[k + 1 :]))


def _weight(program: Program) -> tuple[int, ...]:
    """What counts as smaller: fewer statements, then outputs, then simpler inputs."""

    def statements(body: Body) -> int:
        return sum(1 if isinstance(item, Step) else 2 + statements(item.body) for item in body)

    inputs = sum(
        10
        + sum(n + 2 for n in i.shape)
        + 3 * (i.layout != "contiguous")
        + 20 * bool(i.alias)
        + 2 * i.grad
        + (i.dtype in ("bfloat16", "float16", "float64"))
        for i in program.inputs
    )
    return statements(program.body), len(program.outputs), inputs


def minimise(program: Program, fails: Callable[[Program], bool], attempts: int = 400) -> Program:
    """The smallest program found that still `fails`, after at most `attempts` calls of `fails`.

    `fails` must return False for a program that is not valid.
    """
    tried = {program}
    found = True
    while found and attempts > 0:
        found = False
        for candidate in _edits(program):
            if candidate in tried or _weight(candidate) >= _weight(program):
                continue
            tried.add(candidate)
            try:
                validate(candidate)
            except ValueError:
                continue
            attempts -= 1
            if fails(candidate):
                program, found = candidate, True
                break
            if attempts <= 0:
                break
    return program
