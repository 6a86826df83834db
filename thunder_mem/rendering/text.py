"""A document as plain text and for a terminal: the one layouter of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thunder_mem.rendering.document import Document, Section

__all__ = ["WIDTH", "plain", "to_rich", "to_text", "wrapped"]

WIDTH = 100
"""The most columns of plain text."""

_WRAPPER = partial(textwrap.TextWrapper, break_on_hyphens=False)  # which paths and options may have


def to_text(document: Document) -> str:
    """A document in plain text: the headline, then one table per section."""
    return plain(document.lines, document.tables)


def plain(lines: Sequence[str], tables: Iterable[Section]) -> str:
    """Lines, all but the first indented, and tables, as text of at most 100 columns.

    Lines without tables stay whole: they may hold code to paste.
    """
    first, *rest = lines
    tables = tuple(tables)
    if not tables:
        return "\n  ".join(lines)
    parts = [*_filled(first, ""), *(part for line in rest for part in _filled(line, "  "))]
    for section in tables:
        parts += ["", section.title, *_plain_table(section)]
        if section.note:
            parts += _filled(section.note, "  ")
    return "\n".join(parts)


def _filled(line: str, indent: str) -> list[str]:
    """A line, broken where it is too long."""
    return _WRAPPER(WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ").wrap(line) or [line]


def _plain_table(section: Section) -> list[str]:
    widths = _widths(section)
    if sum(widths) > _room(widths):
        section = _stacked(section) if section.stack is not None else section
        widths = _narrowed(section)
    lines = []
    for row in (section.columns, *section.rows):
        cells = [_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = (
                part.rjust(width) if i in section.numeric else part.ljust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append(f"  {'  '.join(aligned)}".rstrip())
    return lines


def _widths(section: Section) -> list[int]:
    """The columns' natural widths."""
    rows = (section.columns, *section.rows)
    return [max(len(part) for row in rows for part in row[i].split("\n")) for i in range(len(section.columns))]


def _room(widths: Sequence[int]) -> int:
    """The characters that all columns together may take."""
    return WIDTH - 2 * len(widths)


def _narrowed(section: Section) -> list[int]:
    """Widths that fit: the widest columns of words give way, evenly."""
    widths = _widths(section)
    words = [i for i in range(len(widths)) if i not in section.numeric] or list(range(len(widths)))
    while sum(widths) > _room(widths) and max(widths[i] for i in words) > 1:
        widths[max(words, key=lambda i: widths[i])] -= 1
    return widths


def _cell(cell: str, width: int) -> list[str]:
    """The lines of a cell; continued ones are indented, as far as there is room."""
    indent = "  " if width > _INDENTED else ""
    wrapper = _WRAPPER(width, subsequent_indent=indent)
    return [part for line in cell.split("\n") for part in wrapper.wrap(line) or [""]]


_INDENTED = 20


def to_rich(document: Document) -> RenderableType:
    """A document for rich: the same content, with names and reasons wrapped to the width at hand."""
    return wrapped(document.lines, document.tables)


def wrapped(lines: Sequence[str], tables: Iterable[Section]) -> RenderableType:
    """The content of `plain`, for a terminal."""
    first, *rest = lines
    parts: list[RenderableType] = [Text(first, style="bold"), *(Text(f"  {line}") for line in rest)]
    for section in tables:
        # Text throughout: a name such as "t[0]" is not markup.
        section = _stacked(section) if section.stack is not None else section
        table = Table(
            box=box.SIMPLE_HEAD, title=Text(section.title, style="bold"), title_justify="left", pad_edge=False
        )
        for i, column in enumerate(section.columns):
            numeric = i in section.numeric
            table.add_column(Text(column), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))
        parts.append(table)
        if section.note:
            parts += [Padding(Text(section.note, style="dim"), (0, 0, 1, 2))]
    return Group(*parts)


def _stacked(section: Section) -> Section:
    """The same table, with the last columns as lines of one cell."""
    columns, rows, at = section.columns, section.rows, section.stack
    lines = tuple(
        (*row[:at], "\n".join(f"{c}: {cell}" for c, cell in zip(columns[at:], row[at:], strict=True))) for row in rows
    )
    return replace(section, columns=(*columns[:at], ""), rows=lines, stack=None)
