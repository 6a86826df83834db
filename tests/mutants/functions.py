"""Functions of the package that do nothing: what each is, and what it returns in place of its result.

A function is emptied in place, its code object exchanged, so that whoever imported it by name gets the empty one too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

__all__ = ["PACKAGE", "empty", "functions_of", "module_name", "named_functions", "nothing"]

PACKAGE = Path(__file__).parents[2] / "thunder_mem"

# By the annotation of the result: what is least of its kind. What is no container is handed through, or None.
_LEAST = {
    "bool": "False", "int": "0", "float": "0.0", "str": "''", "bytes": "b''", "set": "set()",
    "frozenset": "frozenset()",
    "tuple": "()", "list": "[]", "dict": "{}", "Mapping": "{}", "Sequence": "()", "Iterable": "()", "Collection": "()",
    "Iterator": "iter(())",
}  # fmt: skip


def functions_of(packages: list[str]) -> Iterator[str]:
    """``module:qualified.name`` of each function and method that has a body, but for protocols and dunders."""
    for package in packages:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from (f"{module_name(path)}:{name}" for name, _ in named_functions(tree.body))


def module_name(path: Path) -> str:
    """The name by which a file of the package is imported."""
    return ".".join(("thunder_mem", *path.relative_to(PACKAGE).with_suffix("").parts))


def named_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names, but for those of protocols, dunders and inner functions."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
            yield from named_functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            yield prefix + node.name, node


def nothing(function: FunctionType) -> str:
    """What stands for the function's result, as an expression of its arguments `args`.

    Example:
        >>> def names(trace: dict) -> tuple[str, ...]: ...
        >>> nothing(names)
        '()'
        >>> def sorted_trace(trace: list, sort: str) -> list: ...
        >>> nothing(sorted_trace)
        'args[0]'
    """
    said = {name: str(kind) for name, kind in inspect.get_annotations(function).items()}
    result = said.pop("return", "None").removeprefix("<class '").removesuffix("'>")
    given = [kind.removeprefix("<class '").removesuffix("'>") for kind in said.values()]
    if result in given:  # a rewriting that rewrites nothing
        first = next(iter(inspect.signature(function).parameters))
        return f"args[{given.index(result) + (first not in said)}]"
    return _LEAST.get(result.partition("[")[0], "None")


def empty(name: str) -> bool:
    """Take the body of a function away; False of what cannot be exchanged (a closure's, a property's own class)."""
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    for kind in ("func", "fget", "__func__"):
        found = getattr(found, kind, None) or found
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType) or found.__code__.co_freevars:
        return False
    body = "yield" if inspect.isgeneratorfunction(found) else f"return {nothing(found)}"
    scope: dict[str, Any] = {}
    exec(f"def emptied(*args, **kwargs):\n    {body}\n", scope)
    found.__code__ = scope["emptied"].__code__
    return True
