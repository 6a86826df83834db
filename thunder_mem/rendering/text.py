"""Documents and tables as plain text and for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thunder_mem.rendering.document import Document, Section

__all__ = ["WIDTH", "aligned", "rich_table", "to_rich", "to_text"]

WIDTH = 100
"""The most columns of plain text."""

_WRAPPER = partial(textwrap.TextWrapper, break_on_hyphens=False)  # which paths and options may have


def to_text(document: Document) -> str:
    """A document's lines, all but the first indented, and its tables, as text of at most 100 columns.

    Lines without tables stay whole: they may hold code to paste.
    """
    first, *rest = document.lines
    if not document.tables:
        return "\n  ".join(document.lines)
    parts = [*_filled(first, ""), *(part for line in rest for part in _filled(line, "  "))]
    for section in document.tables:
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
    return [f"  {line}".rstrip() for line in aligned(section, widths)]


def aligned(section: Section, widths: Sequence[int] = ()) -> list[str]:
    """A table in plain text, with its columns as wide as their cells.

    Args:
        section: the table; neither its title nor its note is printed.
        widths: of the columns instead; a longer cell continues below.
    """
    widths = widths or _widths(section)
    lines = []
    for row in (section.columns, *section.rows):
        cells = [_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (
                part.rjust(width) if i in section.numeric else part.ljust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
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
    first, *rest = document.lines
    parts: list[RenderableType] = [Text(first, style="bold"), *(Text(f"  {line}") for line in rest)]
    for section in document.tables:
        parts.append(rich_table(section))
        if section.note:
            parts += [Padding(Text(section.note, style="dim"), (0, 0, 1, 2))]
    return Group(*parts)


def rich_table(section: Section, *, figures_wrap: bool = False) -> Table:
    """A table with its title for rich; `figures_wrap` lets figures give way, too, where a table is mostly figures."""
    # Text throughout: a name such as "t[0]" is not markup.
    section = _stacked(section) if section.stack is not None else section
    table = Table(box=box.SIMPLE_HEAD, title=Text(section.title, style="bold"), title_justify="left", pad_edge=False)
    for i, column in enumerate(section.columns):
        numeric = i in section.numeric
        whole = numeric and not figures_wrap
        table.add_column(Text(column), justify="right" if numeric else "left", no_wrap=whole, overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def _stacked(section: Section) -> Section:
    """The same table, with the last columns as lines of one cell."""
    columns, rows, at = section.columns, section.rows, section.stack
    lines = tuple(
        (*row[:at], "\n".join(f"{c}: {cell}" for c, cell in zip(columns[at:], row[at:], strict=True))) for row in rows
    )
    return replace(section, columns=(*columns[:at], ""), rows=lines, stack=None)
