"""The place of a bound symbol: a line of the user's code, or the name of a module."""

from __future__ import annotations

import os
import re

import thunder
import torch
from thunder.core.symbol import BoundSymbol

__all__ = ["MODULE", "node_line", "place_of"]

MODULE = "module "
"""What a place begins with that is no file but the name of a module."""

_FOLDERS = tuple(path + os.sep for library in (torch, thunder) for path in library.__path__)


def place_of(bsym: BoundSymbol) -> str:
    """The place of a bound symbol: "file:line", "module 2.0 (GELU)", or "" if unknown."""
    file, line = bsym.source_filename, getattr(bsym.source_positions, "lineno", None)
    if not file or line is None:
        return ""
    return file if file.startswith(MODULE) else f"{file}:{line}"


def node_line(node: torch.fx.Node) -> tuple[str, int] | None:
    """File and line of the user's innermost call for a node of Dynamo's graph; None if unknown."""
    calls = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return next(((file, int(line)) for file, line in reversed(calls) if not file.startswith(_FOLDERS)), None)
