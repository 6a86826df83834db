"""Plan files: the reviewed and measured plan runs on every rank and machine, or compilation fails.

Planning is deterministic, so a file does not replace it. The program is planned and verified as always, and then
compared with the file. Another program, other versions, other options or another plan are refused, each by name. A file
is read strictly, as data; nothing in it is ever evaluated.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import thunder
import torch
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import TemporaryExecutor

from thunder_mem.memory.outside_input import quoted, read_json, replace_file, shortened
from thunder_mem.memory.plan import Plan, differing_part, plan_json
from thunder_mem.trace.origins import symbol_name

__all__ = [
    "PlanFile",
    "PlanFileError",
    "program_of",
    "read_plan",
    "write_plan",
]

FORMAT = 1
MAX_BYTES = 2**26  # the largest file; a plan of 100,000 operations takes about a tenth
_FIELDS = {"format": int, "versions": dict, "options": dict, "program": dict, "plan": dict}


class PlanFileError(ValueError):
    """The file is no plan file, or belongs to another program, version or choice of options."""


@dataclass(frozen=True)
class PlanFile:
    """The content of a plan file.

    Attributes:
        path: of the file.
        versions: of this package, Thunder and PyTorch.
        options: of `MemEfficient`, and the executors.
        program: "digest" and "operations" of Thunder's trace.
        plan: `Plan.to_json()`, without source lines.
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
        found = plan_json(plan)
        here, there = _has_backward(found), _has_backward(self.plan)
        if here != there:
            without = "without a backward (a call under torch.no_grad(), or no argument that requires a gradient)"
            held, made = (without, "with a backward") if here else ("with a backward", without)
            raise PlanFileError(f"{self.path} holds a plan {held}, and this one is {made}")
        if (difference := differing_part(found, self.plan)) is not None:
            what, mine, theirs = difference
            raise PlanFileError(f"{self.path} holds another plan: {what} is {theirs} there, {mine} here")


def _has_backward(plan: Mapping[str, Any]) -> bool:
    """Whether a plan, which a file may hold in any form, is of a forward and a backward."""
    regions = plan.get("regions")
    return isinstance(regions, list) and any(isinstance(r, dict) and r.get("backward") is True for r in regions)


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read a file that `save_plan` wrote.

    Raises:
        PlanFileError: it is no plan file.
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


def write_plan(
    path: str | os.PathLike[str], plan: Plan, program: Mapping[str, Any], options: Mapping[str, str]
) -> None:
    """Write a plan to a file that is replaced as a whole, with the program and options that `note_program` kept.

    Raises:
        OSError: the path is a folder, or cannot be written.
    """
    data = {
        "format": FORMAT,
        "versions": _versions(),
        "options": options,
        "program": program,
        "plan": plan_json(plan),
    }
    replace_file(path, json.dumps(data, sort_keys=True) + "\n")


def program_of(trace: TraceCtx) -> dict[str, Any]:
    """The digest of a trace: its operations and their connections, shapes, dtypes, devices and constants.

    Names of variables and source lines do not matter.
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
    """Thunder's traces of a `torch.autograd.Function`'s forward and backward, found in its gradient's closure."""
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
    return {"thunder_mem": version("thunder-mem"), "thunder": str(thunder.__version__), "torch": str(torch.__version__)}
