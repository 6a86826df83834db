"""The files of the commands: pages with the timelines as pictures, and a check that a file can be written."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
from collections.abc import Sequence

from thunder_mem.analysis.frontier_points import FRONTIER_ENDINGS
from thunder_mem.command_line.program import UsageError
from thunder_mem.command_line.questions import Outcome
from thunder_mem.rendering.document import Section
from thunder_mem.rendering.html import fragment, page, timeline_html
from thunder_mem.report import Report
from thunder_mem.report.layout import timeline_view
from thunder_mem.report.report import REPORT_ENDINGS
from thunder_mem.report.sections import sections

__all__ = ["check_files", "plan_page", "predict_page"]


def check_files(options: argparse.Namespace) -> None:
    """Check before the work that the command's files can be written.

    Raises:
        UsageError: a folder does not exist or is not writable, a file's ending is unknown, or a picture needs
            matplotlib, which is not installed.
    """
    pictures = REPORT_ENDINGS if options.command == "explain" else FRONTIER_ENDINGS
    asked: list[tuple[str, tuple[str, ...]]] = [(name, pictures) for name in getattr(options, "save", ())]
    if options.html is not None:
        asked.append((options.html, (".html", ".htm")))
    for name, endings in asked:
        path = pathlib.Path(name)
        if path.suffix not in endings:
            raise UsageError(f"cannot write {name!r}: the ending is one of {', '.join(endings)}")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {str(path.parent)!r} to write {path.name} to")
        if path.is_dir():
            raise UsageError(f"cannot write {name!r}: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {name!r}: permission denied")
        drawn = path.suffix in (".png", ".svg", ".pdf") and not path.name.endswith(".flow.svg")
        if drawn and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"cannot draw {name!r} without matplotlib: pip install 'thunder-mem[plot]'")


def predict_page(found: Outcome, lines: Sequence[str], tables: Sequence[Section]) -> str:
    """The page of `thunder-mem predict`: its lines and tables, the timeline, and the storages alive at the peak."""
    report = Report(found.prediction, found.plan)
    view = timeline_view(report)
    pictures = [timeline_html(view)] if view is not None else []
    return page(lines[0], f"{fragment(lines, pictures, [*tables, *_at_the_peak(report)])}\n")


def plan_page(alone: Outcome, planned: Outcome, lines: Sequence[str], tables: Sequence[Section]) -> str:
    """The page of `thunder-mem plan`: its lines and tables, and both timelines to one scale."""
    reports = {"Thunder alone": Report(alone.prediction), "MemEfficient": Report(planned.prediction, planned.plan)}
    top_bytes = max(report.peak_bytes for report in reports.values())
    pictures = [
        timeline_html(view, f"Live bytes, operation by operation: {name}", top_bytes)
        for name, report in reports.items()
        if (view := timeline_view(report)) is not None
    ]
    return page(lines[0], f"{fragment(lines, pictures, tables)}\n")


def _at_the_peak(report: Report) -> list[Section]:
    return [s for s in sections(report) if s.title in ("Alive at the peak", "Next highest hills")]
