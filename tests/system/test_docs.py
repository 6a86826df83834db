"""What the documentation shows is so: code runs, commands exist, every module has its room, pictures are current."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import thunder_mem
from docs import python_blocks
from docs.pictures import IMAGES, PICTURES, ROOMS
from docs.python_blocks import Block, without_times
from thunder_mem.command_line import main as thunder_mem_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(thunder_mem.__path__, "thunder_mem.") if "__main__" not in m.name
)


def blocks(page: Path) -> list[Block]:
    return python_blocks.blocks(page.read_text(encoding="utf-8"))


def commands(block: Block) -> list[list[str]]:
    joined = block.text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _by_time(page: Path):
    """Most pages compile regions or models, which is slow; README's first lines always run."""
    return page if page.stem == "README" else pytest.param(page, marks=pytest.mark.slow)


WITH_PYTHON = [page for page in PAGES if any(b.kind == "python" for b in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if any(b.kind == "bash" for b in blocks(page))]


@pytest.mark.parametrize("page", [_by_time(page) for page in WITH_PYTHON], ids=name_of)
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for block, printed in python_blocks.run(page.read_text(encoding="utf-8"), name_of(page)):
        if block.shown is not None:
            fill = f"python -m docs.python_blocks --fill {name_of(page)}"
            assert without_times(block.shown) == without_times(printed), (
                f"line {block.line} prints another text: {fill}"
            )


def test_outputs_are_found_compared_and_filled_in():
    page = "```python\nprint('took 3.5 ms', 7)\n```\n\n```text\ntook 2 ms 7\n```\n\n```python\nprint(8)\n```\n"
    (first, took), (second, eight) = python_blocks.run(page, "page")
    assert (first.shown, second.shown) == ("took 2 ms 7\n", None)
    assert without_times(first.shown) == without_times(took)
    for shown, wrong in (
        ("9 steps 7", "9 steps 8"),
        ("gradients within 1e-07", "gradients within 0.5"),
        ("a difference of -1", "a difference of 1"),
        ("2 x 4", "3 x 4"),
    ):
        assert without_times(shown) != without_times(wrong)
    new = python_blocks.filled(page, {first.line: took, second.line: eight})
    assert new == page + "\n```text\n8\n```\n", "the same output, times aside, stays"
    assert python_blocks.filled(page, {first.line: "12 GiB"}).startswith(page.split("took 2")[0] + "12 GiB\n```\n")


def test_readme_shows_what_it_says():
    """Blocks that are not run have a reason, and README has none of them."""
    for page in PAGES:
        for block in blocks(page):
            assert block.why is None or len(block.why.split()) > 2, f"{name_of(page)}:{block.line}: why is it not run?"
    readme = [b for b in blocks(ROOT / "README.md") if b.kind == "python"]
    assert readme and all(b.why is None for b in readme)


@pytest.mark.parametrize("page", [_by_time(page) for page in WITH_COMMANDS], ids=name_of)
def test_commands_exist(page, tmp_path, monkeypatch, capsys):
    """`thunder-mem` runs, on the script that the page shows; of the others at least what they name is there."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = re.findall(r"^(\w+) = \[$", (ROOT / "pyproject.toml").read_text(), re.M)
    for block in (b for b in blocks(page) if b.kind == "bash" and b.why is None):
        for words in commands(block):
            while "=" in words[0]:  # variables of the environment
                words = words[1:]
            program, *rest = words
            if program == "thunder-mem":
                assert thunder_mem_command(rest) == 0, (words, capsys.readouterr().err)
            elif program == "make":
                assert {w for w in rest if "=" not in w} <= set(targets), words
            elif program in ("python", ".venv/bin/python") and rest[0] == "-m":
                assert importlib.util.find_spec(rest[1]) is not None or rest[1] == "pytest", words
            elif program == "bash":
                assert (ROOT / rest[0]).is_file(), words
            elif program == "pip":
                for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                    assert set(extra.split(",")) <= set(extras), words
            else:
                assert program in ("git", "cd", "source"), f"{name_of(page)}: what is {program}?"


def test_architecture_names_every_module():
    """Under the heading of a package stand the modules of its folder, under "doors" those beside the packages."""
    text = (DOCS / "architecture.md").read_text()
    there: dict[str, set[str]] = {}
    for path in (ROOT / "thunder_mem").rglob("*.py"):
        package = path.parent.name if path.parent != ROOT / "thunder_mem" else "doors"
        there.setdefault(package, set()).update({path.stem} - {"__init__"})
    sections = dict(re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert set(sections) == set(there) == {title for title, *_ in ROOMS}
    for package, section in sections.items():
        names = re.findall(r"^(?:`\w+`(?:, |$))+$", section, re.M)[-1]  # the line of nothing but names
        assert set(re.findall(r"\w+", names)) == there[package], f"docs/architecture.md: the modules of {package}"
        assert len(there[package]) <= 15, f"{package} is too large to see at a glance"
    for path in re.findall(r"`(\w+/\w+\.py)`", text):
        assert (ROOT / "thunder_mem" / path).is_file(), f"docs/architecture.md names {path}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_as_drawn(name):
    assert (IMAGES / name).read_text(encoding="utf-8") == PICTURES[name](), "run: python -m docs.pictures"


def test_links_of_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation():
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages <= listed, f"mkdocs.yml: add {sorted(pages - listed)} to nav"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    missing = [name for name in thunder_mem.__all__ if f">{name}<" not in api and f".{name}<" not in api]
    assert not missing, f"docs/api.md lacks {missing}"


_SLOW_MODULES = {  # their examples compile models
    "thunder_mem.analysis.frontier", "thunder_mem.frontend.thunderfx", "thunder_mem.integrations.transformers",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=pytest.mark.slow) if m in _SLOW_MODULES else m for m in MODULES]
)
def test_doctests(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
