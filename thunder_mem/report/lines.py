"""The source lines of operations, and of each tensor inside a fused region."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from thunder_mem.fake_execution.replay import Event
from thunder_mem.trace.source_lines import place_of

__all__ = [
    "gradient_inside",
    "is_library",
    "is_region",
    "making_line",
    "operands",
    "reading_line",
    "shorten",
    "sources",
]

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
# Lines of these packages do not show the purpose of an operation; any other package may be the model.
_LIBRARY = re.compile(_INSTALLED.pattern + r"(?:torch|thunder|thunder_mem)[/\\]")
_HERE = str(pathlib.Path(__file__).parents[1])


def operands(event: Event) -> tuple[str, ...]:
    """The names of an operation's operands, each once; none without a trace."""
    return _names(getattr(event.bsym, "flat_proxy_args", ()))


def sources(event: Event) -> tuple[str, ...]:
    """The lines of an operation: its own, or those of a fusion region's members."""
    if event.source or event.bsym is None:
        return (event.source,) if event.source else ()
    return tuple(dict.fromkeys(line for _, line in _members(event.bsym) if line))


def reading_line(event: Event, name: str) -> str:
    """The user's first line, inside a fused region, that reads one of its operands; "" if none does."""
    followed = {name}
    for member, line in _members(event.bsym):
        if followed.intersection(_names(member.flat_proxy_args)):
            if line and not is_library(line):
                return line
            followed.update(_names(member.flat_proxy_outs))
    return ""


def making_line(event: Event, name: str) -> str:
    """The user's last line, inside a fused region, that makes one of its results; "" if none does."""
    followed = {name}
    for member, line in reversed(list(_members(event.bsym))):
        if followed.intersection(_names(member.flat_proxy_outs)):
            if line and not is_library(line):
                return line
            followed.update(_names(member.flat_proxy_args))
    return ""


def gradient_inside(event: Event) -> bool:
    """Whether a fused region has operations without a source line: those of the backward."""
    return is_region(event) and any(not line for _, line in _members(event.bsym))


def is_region(event: Event) -> bool:
    """Whether an operation is a fused region."""
    return event.bsym is not None and bool(event.bsym.sym.is_fusion)


def _members(bsym: Any) -> Iterator[tuple[Any, str]]:
    """Each operation inside, down to the first that has a line, with that line."""
    for member in bsym.subsymbols:
        if place := place_of(member):
            yield member, place
        elif member.subsymbols:
            yield from _members(member)
        else:
            yield member, ""


def _names(proxies: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.name for p in proxies))


def is_library(source: str) -> bool:
    """Whether a line is PyTorch's, Thunder's or this package's."""
    return bool(_LIBRARY.match(source)) or source.startswith(_HERE)


def shorten(source: str) -> str:
    """An installed package's path from the package on, or the last two parts of any other path."""
    if _INSTALLED.match(source):
        return _INSTALLED.sub("", source)
    return "/".join(source.replace("\\", "/").split("/")[-2:])
