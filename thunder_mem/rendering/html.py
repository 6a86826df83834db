"""A document as one self-contained page: no scripts, nothing from the network, everything shown escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from thunder_mem.rendering.document import Document, Section, TimelineView
from thunder_mem.rendering.matplotlib import COLOURS
from thunder_mem.rendering.svg import lives_svg, timeline_svg

__all__ = ["fragment", "page", "picture", "timeline_html", "to_html", "to_page"]

_SHORT = 24
# All rules stand under one class, so that a notebook around the report keeps its own looks.
_STYLE = """
.thunder-mem { --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --paper: #ffffff; --mark: #c2410c;
  color: var(--ink); background: var(--paper); font: 14px/1.45 system-ui, sans-serif; max-width: 1200px; padding: 12px }
@media (prefers-color-scheme: dark) {
  .thunder-mem { --ink: #e6edf3; --dim: #9aa5b1; --line: #373e47; --paper: #0d1117; --mark: #ff8c5a } }
.thunder-mem h1 { font-size: 20px; margin: 0 0 4px } .thunder-mem h1, .thunder-mem li { overflow-wrap: anywhere }
.thunder-mem h2 { font-size: 15px; margin: 22px 0 4px }
.thunder-mem ul { margin: 0; padding-left: 18px } .thunder-mem .note, .thunder-mem ul { color: var(--dim) }
.thunder-mem .wide { overflow-x: auto }
.thunder-mem table { border-collapse: collapse; font-size: 13px; margin: 4px 0 }
.thunder-mem th, .thunder-mem td { border-bottom: 1px solid var(--line); padding: 3px 10px 3px 0; text-align: left;
  vertical-align: top; color: var(--ink); background: none }
.thunder-mem th { color: var(--dim); font-weight: 600 } .thunder-mem tbody td { overflow-wrap: anywhere }
.thunder-mem tbody .s { overflow-wrap: normal } .thunder-mem tbody .l { min-width: 12em }
.thunder-mem .n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; overflow-wrap: normal }
.thunder-mem svg { display: block; width: 100%; min-width: 900px; height: auto;
  font: 11px system-ui, sans-serif; margin: 6px 0 }
.thunder-mem svg text { fill: var(--dim) } .thunder-mem svg .strong { fill: var(--ink); font-weight: 600 }
.thunder-mem .grid { stroke: var(--line); stroke-width: .5 } .thunder-mem .mark { fill: var(--mark) }
.thunder-mem .loop { fill: var(--ink); fill-opacity: .22 }
.thunder-mem .phase { stroke: var(--ink); stroke-dasharray: 2 3 }
.thunder-mem .mark-line { stroke: var(--mark); stroke-width: 1.2 }
.thunder-mem .hover { fill: transparent } .thunder-mem .hover:hover { fill: var(--ink); fill-opacity: .18 }
.thunder-mem .key i { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px }
""" + "".join(f".thunder-mem .c{i} {{ fill: {colour}; background: {colour} }}\n" for i, colour in enumerate(COLOURS))

# The picture of the dataflow stays light on every page.
_PAGE_STYLE = """:root { color-scheme: light dark } body { margin: 0 }
@media (prefers-color-scheme: dark) { body { background: #0d1117 } }
details { padding: 12px; color: #1b1f24; background: #fff; font: 14px/1.45 system-ui, sans-serif }
details div { overflow-x: auto } summary { font-size: 15px; font-weight: 600; cursor: pointer }"""


def to_page(document: Document) -> str:
    """A document as a whole HTML page."""
    return page(document.lines[0], f"{to_html(document)}\n{_flow(document.flow)}")


def page(title: str, body: str) -> str:
    """A whole HTML document without external references."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{_PAGE_STYLE}</style>\n"
        f"</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _flow(drawn: str) -> str:
    """The picture of the dataflow, folded away."""
    if not drawn:
        return ""
    drawn = drawn.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return f"<details><summary>Every operation, and the tensors between them</summary>\n<div>{drawn}</div></details>\n"


def to_html(document: Document) -> str:
    """A document as a fragment of HTML, for a notebook."""
    pictures = []
    if document.timeline is not None:
        pictures.append(timeline_html(document.timeline))
        pictures.append(f"<h2>The lives of those alive at the peak</h2>\n{picture(lives_svg(document.timeline))}")
    return fragment(document.lines, pictures, document.tables)


def timeline_html(
    view: TimelineView, title: str = "Live bytes, operation by operation", top_bytes: int | None = None
) -> str:
    """The timeline's picture with its title and its key.

    Args:
        view: of a program with at least one operation.
        title: above it.
        top_bytes: the top of the picture's axis, so that two can be compared; by default the peak.
    """
    used = [c for c, layer in enumerate(view.layers) if any(layer)]
    keys = "".join(f'<i class="c{c}"></i>{escape(view.categories[c])}' for c in used)
    return f'<h2>{escape(title)}</h2>\n<div class="key">{keys}</div>\n{picture(timeline_svg(view, top_bytes))}'


def picture(svg: str) -> str:
    """A picture of a page, which scrolls in a narrow window: scaled down, its text would be too small to read."""
    return f'<div class="wide">{svg}</div>'


def fragment(lines: Sequence[str], pictures: Iterable[str], tables: Iterable[Section]) -> str:
    """Headline, pictures (as HTML) and tables in the style of a report."""
    first, *rest = lines
    parts = [f"<style>{_STYLE}</style>", '<div class="thunder-mem">', f"<h1>{escape(first)}</h1>"]
    parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in rest)}</ul>")
    return "\n".join([*parts, *pictures, *map(_table, tables), "</div>"])


def _table(section: Section) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        # Long names may break anywhere, but keep a column that can be read; figures and shapes stay in one piece.
        marks = (
            ' class="n"' if i in section.numeric else ' class="s"' if len(c) <= _SHORT else ' class="l"'
            for i, c in enumerate(cells)
        )
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    body = "\n".join(row(r, "td") for r in section.rows)
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return (
        f'<h2>{escape(section.title)}</h2>\n<div class="wide"><table>\n<thead>{row(section.columns, "th")}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n{note}"
    )
