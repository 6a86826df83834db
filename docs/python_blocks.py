"""The Python blocks of a page: as one program, and with what they print below them.

``python -m docs.python_blocks README.md > readme.py`` writes a page's program. ``python -m docs.python_blocks --fill
docs/guides/budget.md`` runs it, and writes what each block prints into the block ``text`` below it. The tests run the
pages too, and compare.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.*?) -->\n+)?```(?P<kind>\w+)(?P<title>[^\n]*)\n(?P<text>.*?)^```$"
    r"(?P<below>\n\n```text\n(?P<shown>.*?)^```$)?",
    re.S | re.M,
)
_TIME = re.compile(r"\d+(\.\d+)?(?=\s?(ms|s|times|seconds|milliseconds)\b|\s?x\b(?! \d))")
_DIFFERENCE = re.compile(r"within (\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_ROUNDING = 1e-3  # a larger difference is no rounding error, and is compared
_LINE = re.compile(r"(?<=\.md:)\d+")
_VALUE = re.compile(r"\bt\d+\b")
_WIDTH = re.compile(r"[ ─━]{2,}|-{3,}")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: its language.
        file: that its title names.
        text: without the fences.
        why: it is not run.
        shown: the block ``text`` directly below it, which says what it prints; None if there is none.
        line: of the page.
    """

    kind: str
    file: str
    text: str
    why: str | None
    shown: str | None
    line: int


def blocks(page: str) -> list[Block]:
    """All blocks with a language, in the order of the page."""
    return [_block(page, match) for match in BLOCK.finditer(page)]


def program(page: str) -> str:
    """The Python blocks in the order of the page."""
    return "\n".join(block.text for block in blocks(page) if block.kind == "python")


def run(page: str, name: str) -> Iterator[tuple[Block, str]]:
    """Each Python block that is run, and what it printed; `name` stands for the page in what it prints."""
    linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)  # lines are found from any folder
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks(page):
        if block.kind == "python" and block.why is None:
            source = "\n" * block.line + block.text  # so that a traceback names the page's line
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, name, "exec"), namespace)
            yield block, printed.getvalue()


def without_times(text: str) -> str:
    """What a machine prints again: without times, rounding errors, names of values, lines of the page, and widths.

    Signs and sizes (``2 x 4``) stay, and so do differences that are no rounding errors.

    Example:
        >>> without_times("eager    1.94 MiB   1.38 ms  1.31 x  results within 1e-07")
        'eager 1.94 MiB ~ ms ~ x results within ~'
    """
    plain = _VALUE.sub("t~", _LINE.sub("~", _DIFFERENCE.sub(_without_rounding, _TIME.sub("~", text))))
    return "\n".join(_WIDTH.sub(" ", line).strip() for line in plain.strip().splitlines())


def _without_rounding(match: re.Match[str]) -> str:
    return "within ~" if float(match[1]) <= _ROUNDING else match[0]


def filled(page: str, printed: dict[int, str]) -> str:
    """The page with what its blocks print, by their lines; a block that prints the same as before keeps its text."""

    def with_output(match: re.Match[str]) -> str:
        block = _block(page, match)
        text = printed.get(block.line)
        if text is None or without_times(text) == without_times(block.shown or ""):
            return match[0]
        above = match[0][: len(match[0]) - len(match["below"] or "")]
        lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        return f"{above}\n\n```text\n{lines}\n```" if lines else above

    return BLOCK.sub(with_output, page)


def _block(page: str, match: re.Match[str]) -> Block:
    title = re.search(r'title="([^"]+)"', match["title"])
    line = page.count("\n", 0, match.start("text"))
    return Block(match["kind"], title[1] if title else "", match["text"], match["why"], match["shown"], line)


def _fill(path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    page = path.read_text(encoding="utf-8")
    before = os.getcwd()
    with TemporaryDirectory() as folder:  # for what the blocks save
        os.chdir(folder)
        try:
            printed = {block.line: text for block, text in run(page, str(path))}
        finally:
            os.chdir(before)
    path.write_text(filled(page, printed), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--fill":
        for name in sys.argv[2:]:
            _fill(Path(name))
    else:
        sys.stdout.write(program(Path(sys.argv[1]).read_text(encoding="utf-8")))
