"""A plan as a file: what was reviewed and measured is what runs, on every rank and every machine, or nothing does.

Planning is deterministic, so a file does not replace it: the program is planned as always, verified as always,
and then held against the file. Another program, other versions, other options or a plan that came out
otherwise are refused, each by name. A file is read as data, strictly; nothing in it is ever evaluated.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.core.compile_data import _compile_data
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import TemporaryExecutor

from thunder_mem.fx import is_fx, only_subgraph
from thunder_mem.origins import symbol_name
from thunder_mem.outside import quoted, read_json, replace_file, shortened
from thunder_mem.plan import Plan

__all__ = [
    "PlanFile",
    "PlanFileError",
    "differing_part",
    "note_program",
    "noted_program",
    "plan_json",
    "program_of",
    "read_plan",
    "save_plan",
]

FORMAT = 1
MAX_BYTES = 2**26  # of a file; a plan of 100,000 operations takes about a tenth
_FIELDS = {"format": int, "versions": dict, "options": dict, "program": dict, "plan": dict}


class PlanFileError(ValueError):
    """A plan file that is none, or that belongs to another program, version or choice of options."""


@dataclass(frozen=True)
class PlanFile:
    """What a plan file says.

    Attributes:
        path: of the file.
        versions: of this package, Thunder and PyTorch.
        options: how `MemEfficient` was asked, and the executors.
        program: "digest" and "operations" of what Thunder traced.
        plan: `Plan.to_json()`, without places in source files.
    """

    path: str
    versions: Mapping[str, str]
    options: Mapping[str, str]
    program: Mapping[str, Any]
    plan: Mapping[str, Any]

    def check_program(self, program: Mapping[str, Any], options: Mapping[str, str]) -> None:
        """Refuse a program, options or versions that are not the file's.

        Raises:
            PlanFileError: names the first difference.
        """
        for what, here, there in (
            ("versions", _versions(), self.versions),
            ("options", options, self.options),
            ("a program", program, self.program),
        ):
            for key in sorted({*here, *there}):
                if here.get(key) != there.get(key):
                    raise PlanFileError(
                        f"{self.path} is for other {what}: {shortened(key, 60)} is "
                        f"{quoted(there.get(key), 140)} there, {quoted(here.get(key))} here"
                        if what != "a program"
                        else f"{self.path} is for another program: {there['operations']} operations with the digest "
                        f"{there['digest']} there, {here['operations']} with {here['digest']} here"
                    )

    def check_plan(self, plan: Plan | None, failure: str = "") -> None:
        """Refuse a plan that is not the file's.

        Raises:
            PlanFileError: names the first difference.
        """
        if plan is None:
            raise PlanFileError(f"{self.path} holds a plan, but here planning failed: {failure or 'there was none'}")
        if (difference := differing_part(plan_json(plan), self.plan)) is not None:
            what, mine, theirs = difference
            raise PlanFileError(f"{self.path} holds another plan: {what} is {theirs} there, {mine} here")


def save_plan(jitted: Callable[..., Any], path: str | os.PathLike[str]) -> None:
    """Write the plan of the last compilation, for `MemEfficient(plan=path)` with the same other options.

    Args:
        jitted: what `thunder.jit` made with `MemEfficient`, after a call.
        path: of the file, which is replaced as a whole.

    Raises:
        ValueError: nothing was planned yet, or planning failed.
        OSError: the path is a folder, or cannot be written.

    Example:
        >>> import pathlib, tempfile, thunder, torch
        >>> from thunder_mem import MemEfficient, save_plan
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "plan.json"
        >>> compile = lambda **options: thunder.jit(torch.sin, executors=[], transforms=[MemEfficient(**options)])
        >>> jitted = compile()
        >>> _ = jitted(torch.zeros(3))
        >>> save_plan(jitted, path)
        >>> compile(plan=path)(torch.zeros(3))
        tensor([0., 0., 0.])
        >>> compile(plan=path)(torch.zeros(4))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        thunder_mem.plan_file.PlanFileError: plan.json is for another program
    """
    stats: Any = thunder.compile_stats(only_subgraph(jitted) if is_fx(jitted) else jitted)
    plan = getattr(stats, "thunder_mem_plan", None)
    if plan is None:
        from thunder_mem.report.circumstances import why_no_plan  # which knows plans, as this module's users do

        raise ValueError(f"there is no plan to save: {why_no_plan(jitted)}")
    program, options = stats.thunder_mem_program
    data = {
        "format": FORMAT,
        "versions": _versions(),
        "options": options,
        "program": program,
        "plan": plan_json(plan),
    }
    replace_file(path, json.dumps(data, sort_keys=True) + "\n")


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read what `save_plan` wrote.

    Raises:
        PlanFileError: it is something else.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        data = read_json(path, MAX_BYTES)
    except ValueError as error:
        raise PlanFileError(f"{name} is no plan file: {error}") from error
    if not isinstance(data, dict) or data.keys() != _FIELDS.keys():
        raise PlanFileError(f"{name} is no plan file, which holds {', '.join(_FIELDS)} and nothing else")
    for key, kind in _FIELDS.items():
        if type(data[key]) is not kind:
            raise PlanFileError(f"{name} is no plan file: its {key} are no {kind.__name__}")
    if data["format"] != FORMAT:
        raise PlanFileError(
            f"{name} has the format {quoted(data['format'])}, and this version of thunder_mem reads {FORMAT}"
        )
    for key in ("versions", "options"):
        if not all(isinstance(v, str) for v in data[key].values()):
            raise PlanFileError(f"{name} is no plan file: its {key} are no texts")
    kinds = {key: type(value) for key, value in data["program"].items()}
    if kinds != {"digest": str, "operations": int} or not re.fullmatch("[0-9a-f]{16}", data["program"]["digest"]):
        raise PlanFileError(f"{name} is no plan file: its program is no digest and a number of operations")
    return PlanFile(name, data["versions"], data["options"], data["program"], data["plan"])


def note_program(program: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Keep what is being compiled, and how, with the compilation, where `save_plan` finds it."""
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_program = program, options


def noted_program() -> str:
    """The digest of what is being compiled; "" if nobody noted it."""
    noted: Any = getattr(_compile_data.get()[1], "thunder_mem_program", None)
    return noted[0]["digest"] if noted else ""


def program_of(trace: TraceCtx) -> dict[str, Any]:
    """What tells a trace from others: its operations, how they are wired, shapes, dtypes, devices and constants.

    Names of variables and places in source files play no part.
    """
    number: dict[str, int] = {}
    digest = hashlib.sha256()

    def text(x: Any) -> str:
        if isinstance(x, NumberProxy):
            return f"{type(x).__name__} {x.value}"
        if not isinstance(x, Proxy):
            return repr(x) if isinstance(x, int | float | complex | bool | str | None) else _plain(x)
        i = number.setdefault(x.name, len(number))
        if isinstance(x, TensorProxy):
            return f"%{i} {tuple(map(int, x.shape))} {x.dtype} {x.device} {x.requires_grad}"
        return f"%{i}"

    def add(symbols: Iterable[BoundSymbol]) -> None:
        for bsym in symbols:
            flat = tree_flatten((bsym.args, bsym.kwargs, bsym.output))[0]
            digest.update(f"{symbol_name(bsym.sym)}({', '.join(map(text, flat))})\n".encode())
            if isinstance(bsym.sym.executor, TemporaryExecutor):  # two functions may have one name
                add(bsym.subsymbols)
                for inner in _gradient_traces(bsym.sym):
                    add(inner.bound_symbols)

    add(trace.bound_symbols)
    return {"digest": digest.hexdigest()[:16], "operations": len(trace.bound_symbols)}


def _gradient_traces(sym: Symbol) -> Iterator[TraceCtx]:
    """What Thunder traced of a `torch.autograd.Function`'s forward and backward, which its gradient's closure holds."""
    functions = [sym.executor.get_grad_transform(sym)]
    for function in functions:
        for value in inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ():
            if isinstance(value, TraceCtx):
                yield value
            elif inspect.isfunction(value) and value not in functions:
                functions.append(value)


def _plain(x: Any) -> str:
    """A dtype, a device, ... without an address in memory."""
    said = str(x)
    return type(x).__name__ if " at 0x" in said else said


def _versions() -> dict[str, str]:
    from thunder_mem import __version__

    return {"thunder_mem": __version__, "thunder": str(thunder.__version__), "torch": str(torch.__version__)}


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, without places in source files."""
    found = plan.to_json()
    for decision in found["decisions"]:
        del decision["source"]
    found["refused"] = [refused["what"] for refused in found["refused"]]  # whose reasons name places
    return json.loads(json.dumps(found))


def differing_part(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """What is the first to differ between two plans as `plan_json` gives them, and what it is in each; None if equal.

    Example:
        >>> differing_part({"sort": "lpmf", "regions": [1, 2]}, {"sort": "lpmf", "regions": [1, 3]})
        ('number 1 of its regions', '2', '3')
    """
    for key in sorted({*mine, *theirs}):
        here, there = mine.get(key), theirs.get(key)
        if _text(here) == _text(there):  # which tells 1 from True
            continue
        if isinstance(here, list) and isinstance(there, list):
            pairs = enumerate(zip(here, there, strict=False))
            at = next((i for i, (a, b) in pairs if _text(a) != _text(b)), None)
            if at is None:
                return f"the number of its {key}", str(len(here)), str(len(there))
            return f"number {at} of its {key}", shortened(_text(here[at])), shortened(_text(there[at]))
        return f"its {shortened(key, 60)}", shortened(_text(here)), shortened(_text(there))
    return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
