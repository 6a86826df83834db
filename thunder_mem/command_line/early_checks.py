"""Checks of the options that need the disk, but neither PyTorch nor Thunder, whose imports take seconds."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from difflib import get_close_matches
from pathlib import Path

from thunder_mem.memory.outside_input import quoted
from thunder_mem.rendering.endings import FRONTIER_ENDINGS, REPORT_ENDINGS
from thunder_mem.user_choices.written import ONLY, offload_pattern, read_entries

__all__ = ["check_files", "check_optimizer", "check_patterns"]


def check_files(options: argparse.Namespace) -> None:
    """Check before the work that the command's files can be written.

    Raises:
        ValueError: a folder does not exist or is not writable, a file's ending is unknown, or a picture needs
            matplotlib, which is not installed.
    """
    pictures = REPORT_ENDINGS if options.command == "explain" else FRONTIER_ENDINGS
    asked: list[tuple[str, tuple[str, ...]]] = [(name, pictures) for name in getattr(options, "save", ())]
    if options.html is not None:
        asked.append((options.html, (".html", ".htm")))
    for name, endings in asked:
        path = Path(name)
        if path.suffix not in endings:
            raise ValueError(f"cannot write {name!r}: the ending is one of {', '.join(endings)}")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} to")
        if path.is_dir():
            raise ValueError(f"cannot write {name!r}: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"cannot write {name!r}: permission denied")
        drawn = path.suffix in (".png", ".svg", ".pdf") and not path.name.endswith(".flow.svg")
        if drawn and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"cannot draw {name!r} without matplotlib: pip install 'thunder-mem[plot]'")


def check_optimizer(name: str) -> None:
    """Check that the text of `torch.optim` imports a class of that name.

    Raises:
        ValueError: it does not; the message has the names that it imports, the nearest first.
    """
    torch = importlib.util.find_spec("torch")  # imports nothing
    for folder in (torch and torch.submodule_search_locations) or ():
        file = Path(folder) / "optim" / "__init__.py"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        known = sorted({*re.findall(r"^from \S+ import ([A-Z]\w*) as \1$", text, re.MULTILINE)} - {"Optimizer"})
        if known and name not in known:
            near = get_close_matches(name, known, n=1)
            names = ", ".join([*near, *(other for other in known if other not in near)])
            raise ValueError(f"torch.optim has no optimizer {quoted(name)}; it has {names}")


def check_patterns(options: argparse.Namespace) -> None:
    """Check `--recompute` and `--offload`; give the latter the form for `MemEfficient`.

    Raises:
        ValueError: a text is malformed, or a file cannot be read.
    """
    if (recompute := getattr(options, "recompute", None)) is not None:
        try:
            read_entries(recompute)
        except OSError as error:
            raise ValueError(f"--recompute {recompute} cannot be read: {error.strerror}") from error
    if isinstance(given := getattr(options, "offload", False), str):
        options.offload = f"{ONLY}{given.removeprefix(ONLY)}"
        offload_pattern(options.offload)
