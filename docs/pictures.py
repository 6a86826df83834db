"""The pictures of README and docs that are drawn by code: ``python -m docs.pictures`` writes them anew.

Plain SVG text, made of boxes, arrows and words, so that a change of a picture is a change of a few lines here,
and a test can see that the committed files are what this draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

INK, QUIET, LINE = "#1f2933", "#5b6770", "#9aa5b1"
GREY, BLUE, RED, GREEN, GOLD = "#eef1f4", "#e3edf7", "#fbe9ea", "#e6f4ec", "#fdf3e1"
EDGES = {GREY: "#9aa5b1", BLUE: "#4477aa", RED: "#bb3344", GREEN: "#228855", GOLD: "#c98a1b"}


@dataclass(frozen=True)
class Box:
    """A box with a title and lines of text below it; `x` and `y` are its top left corner."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    colour: str = GREY

    def svg(self) -> list[str]:
        middle = self.x + self.width / 2
        shapes = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="8" '
            f'fill="{self.colour}" stroke="{EDGES[self.colour]}" stroke-width="1.4"/>',
            f'<text x="{middle:g}" y="{self.y + 23}" text-anchor="middle" font-size="15" font-weight="600" '
            f'fill="{INK}">{escape(self.title)}</text>',
        ]
        for i, line in enumerate(self.lines):
            shapes.append(
                f'<text x="{middle:g}" y="{self.y + 43 + 17 * i}" text-anchor="middle" font-size="12.5" '
                f'fill="{QUIET}">{escape(line)}</text>'
            )
        return shapes


def arrow(x1: int, y1: int, x2: int, y2: int, text: str = "") -> list[str]:
    """A straight arrow, with words beside its middle."""
    shapes = [
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.8" marker-end="url(#tip)"/>'
    ]
    if text:
        x, y, anchor = ((x1 + x2) / 2 + 8, (y1 + y2) / 2 + 4, "start")
        if y1 == y2:
            x, y, anchor = (x1 + x2) / 2, y1 - 7, "middle"
        shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12" fill="{QUIET}">{escape(text)}</text>'
        )
    return shapes


def page(width: int, height: int, title: str, *parts: list[str]) -> str:
    """A whole picture, on white, so that it reads on a dark page too."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Inter, Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(shape for part in parts for shape in part),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def how_it_works() -> str:
    """What happens between `thunder.jit(model, transforms=[MemEfficient()])` and the first step."""
    steps = (
        Box(20, 60, 180, 100, "your function", ("traced by Thunder:", "every operation,", "shape and dtype"), GREY),
        Box(
            250,
            60,
            200,
            100,
            "computation trace",
            ("loss heads become", "chunk loops: logits", "never exist whole"),
            GOLD,
        ),
        Box(
            500,
            60,
            220,
            100,
            "joint trace",
            ("forward and backward:", "the one place where all", "decisions are made"),
            BLUE,
        ),
        Box(
            770,
            60,
            190,
            100,
            "final traces",
            ("run by PyTorch; their", "peak is known to the", "byte before they run"),
            GREY,
        ),
    )
    decisions = (
        Box(
            20,
            230,
            220,
            100,
            "saved or rebuilt",
            ("what the backward receives,", "recomputes or fetches", "from the host"),
            RED,
        ),
        Box(
            260,
            230,
            220,
            100,
            "regions",
            ("which operations fuse;", "amplifiers are duplicated,", "free paths stay apart"),
            RED,
        ),
        Box(
            500,
            230,
            220,
            100,
            "order",
            ("a portfolio of schedulers,", "or your own function,", "with a lower bound"),
            RED,
        ),
        Box(740, 230, 220, 100, "reuse", ("results are written", "over inputs that nobody", "reads any more"), RED),
    )
    judge = Box(
        20,
        380,
        940,
        66,
        "one exact timeline of live bytes judges every proposal",
        ("Thunder's own arrangement is always a candidate; each plan is verified to be the same program",),
        GREEN,
    )
    between = [arrow(a.x + a.width + 4, 110, b.x - 4, 110) for a, b in pairwise(steps)]
    down = [arrow(610, 164, d.x + d.width // 2, 224) for d in decisions]
    judged = [arrow(d.x + d.width // 2, 334, d.x + d.width // 2, 375) for d in decisions]
    heading = [
        f'<text x="20" y="36" font-size="17" font-weight="600" fill="{INK}">thunder.jit(model, '
        "transforms=[MemEfficient()])</text>"
    ]
    boxes = [box.svg() for box in (*steps, *decisions, judge)]
    return page(980, 466, "How thunder_mem works", heading, *between, *down, *judged, *boxes)


ROOMS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("command_line", ("the shell",), GREY),
    ("integrations", ("transformers, litgpt",), GREY),
    ("comparison", ("compilers compared",), GREY),
    ("report", ("explain, as data",), GREY),
    ("analysis", ("frontiers, what fits",), GREY),
    ("doors", ("imports of users",), GREY),
    ("transforms", ("options to calls",), BLUE),
    ("prediction", ("peaks of whole steps",), GREEN),
    ("fake_execution", ("traces on fake tensors",), GREEN),
    ("planning", ("which program runs",), BLUE),
    ("decisions", ("one program, in order",), BLUE),
    ("user_choices", ("policies, patterns",), BLUE),
    ("rewrites", ("trace in, trace out",), BLUE),
    ("tiling", ("stretches to loops",), GOLD),
    ("loop_body", ("one block of rows",), GOLD),
    ("loop_sizes", ("rows, and their price",), GOLD),
    ("frontend", ("what users mean",), BLUE),
    ("torch_functions", ("functions, written out",), BLUE),
    ("functionalization", ("writes become values",), BLUE),
    ("distributed", ("collectives, one plan",), BLUE),
    ("costs", ("roofline, measured",), GREEN),
    ("fusers", ("executors that fuse",), BLUE),
    ("attention", ("its kernels, chosen",), BLUE),
    ("regions", ("fused by Inductor",), BLUE),
    ("kernels", ("PyTorch's own",), BLUE),
    ("runtime", ("transfers, devices",), BLUE),
    ("chunk_loop", ("the loop that runs",), GOLD),
    ("optimizer", ("updates of parameters",), GOLD),
    ("trace", ("traces as graphs, and back",), BLUE),
    ("semantics", ("what operations do",), BLUE),
    ("partition", ("saved or recomputed",), RED),
    ("fusion", ("which operations fuse",), RED),
    ("schedule", ("orders and bounds",), RED),
    ("memory", ("graphs, live bytes, plans",), GREEN),
    ("sharding", ("splits along rows",), GOLD),
    ("rendering", ("text, page, picture",), GREY),
)
"""The packages, whose names are the headings of docs/architecture.md, with a few words and a colour for the picture."""


def rooms() -> str:
    """The packages as rows: each imports those below it."""
    by_title = {title: (lines, colour) for title, lines, colour in ROOMS}
    rows = (
        ("", ("doors", "command_line", "integrations", "comparison", "report", "analysis")),
        ("on Thunder's side", ("transforms", "prediction", "fake_execution", "planning", "decisions", "user_choices")),
        ("", ("tiling", "loop_body", "loop_sizes", "rewrites")),
        ("", ("frontend", "torch_functions", "functionalization", "distributed", "fusers", "attention")),
        ("", ("costs", "regions", "kernels", "chunk_loop", "optimizer")),
        ("", ("runtime", "trace", "semantics", "sharding")),
        ("without Thunder", ("partition", "fusion", "schedule")),
        ("", ("memory", "rendering")),
    )
    parts, y = [], 20
    for label, titles in rows:
        if label:
            parts.append([f'<text x="20" y="{y + 12}" font-size="12.5" fill="{QUIET}">{label}</text>'])
            y += 22
        per_row = len(titles)
        width = (940 - 16 * (per_row - 1)) // per_row
        for i, title in enumerate(titles):
            lines, colour = by_title[title]
            if i and not i % per_row:
                y += 72
            parts.append(Box(20 + (i % per_row) * (width + 16), y, width, 60, title, lines, colour).svg())
        y += 84
    return page(980, y - 4, "The packages of thunder_mem", *parts)


PICTURES = {"how-it-works.svg": how_it_works, "rooms.svg": rooms}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
