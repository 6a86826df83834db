"""A document as plain text and for a terminal: the one layouter of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from thunder_mem.rendering.document import Document, Section

__all__ = ["plain", "to_rich", "to_text", "wrapped"]


def to_text(document: Document) -> str:
    """A document in plain text: the headline, then one table per section."""
    return plain(document.lines, document.tables)


def plain(lines: Sequence[str], tables: Iterable[Section]) -> str:
    """Lines, all but the first indented, and tables, as text of any width."""
    first, *rest = lines
    parts = [first, *(f"  {line}" for line in rest)]
    for section in tables:
        parts += ["", section.title, *_plain_table(section)]
        if section.note:
            parts += [f"  {section.note}"]
    return "\n".join(parts)


def _plain_table(section: Section) -> list[str]:
    table = [section.columns, *section.rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(section.columns))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if i in section.numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


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
