"""Which lines of source an operation comes from, and inside a fused region each of its tensors."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from thunder_mem.prediction.replay import Event
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
# Lines of these packages say how, but not for what, something is computed; any other package may be the model.
_LIBRARY = re.compile(_INSTALLED.pattern + r"(?:torch|thunder|thunder_mem)[/\\]")
_HERE = str(pathlib.Path(__file__).parents[1])


def operands(event: Event) -> tuple[str, ...]:
    """The names an operation takes, each once; none where there is no trace."""
    return _names(getattr(event.bsym, "flat_proxy_args", ()))


def sources(event: Event) -> tuple[str, ...]:
    """The lines an operation comes from: its own, or for a fusion region those of its members."""
    if event.source or event.bsym is None:
        return (event.source,) if event.source else ()
    return tuple(dict.fromkeys(line for _, line in _members(event.bsym) if line))


def reading_line(event: Event, name: str) -> str:
    """The first line of the user's, inside a fused region, that works with one of its operands; "" if none does."""
    followed = {name}
    for member, line in _members(event.bsym):
        if followed.intersection(_names(member.flat_proxy_args)):
            if line and not is_library(line):
                return line
            followed.update(_names(member.flat_proxy_outs))
    return ""


def making_line(event: Event, name: str) -> str:
    """The last line of the user's, inside a fused region, that makes one of its results; "" if none does."""
    followed = {name}
    for member, line in reversed(list(_members(event.bsym))):
        if followed.intersection(_names(member.flat_proxy_outs)):
            if line and not is_library(line):
                return line
            followed.update(_names(member.flat_proxy_args))
    return ""


def gradient_inside(event: Event) -> bool:
    """Whether a fused region has operations that no line of source wrote: those of the backward."""
    return is_region(event) and any(not line for _, line in _members(event.bsym))


def is_region(event: Event) -> bool:
    """Whether an operation is several, fused."""
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
    """An installed package's path from the package on, any other by its last two parts."""
    if _INSTALLED.match(source):
        return _INSTALLED.sub("", source)
    return "/".join(source.replace("\\", "/").split("/")[-2:])
