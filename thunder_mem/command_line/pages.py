"""The pages of the commands, with the timelines as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_mem.command_line.questions import Outcome
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.rendering.document import Section
from thunder_mem.rendering.html import fragment, page, timeline_html
from thunder_mem.report import Report
from thunder_mem.report.layout import timeline_view
from thunder_mem.report.sections import sections

__all__ = ["plan_page", "predict_page"]


def predict_page(found: Outcome, lines: Sequence[str], tables: Sequence[Section]) -> str:
    """The page of `thunder-mem predict`: its lines and tables, the timeline, and the storages alive at the peak."""
    report = Report(found.prediction, found.plan)
    view = timeline_view(report)
    pictures = [timeline_html(view)] if view is not None else []
    return page(lines[0], f"{fragment(lines, pictures, [*tables, *_at_the_peak(report)])}\n")


def plan_page(
    alone: Outcome | PredictionError, planned: Outcome, lines: Sequence[str], tables: Sequence[Section]
) -> str:
    """The page of `thunder-mem plan`: its lines and tables, and both timelines to one scale."""
    reports = {"Thunder alone": Report(alone.prediction)} if isinstance(alone, Outcome) else {}
    reports["MemEfficient"] = Report(planned.prediction, planned.plan)
    top_bytes = max(report.peak_bytes for report in reports.values())
    pictures = [
        timeline_html(view, f"Live bytes, operation by operation: {name}", top_bytes)
        for name, report in reports.items()
        if (view := timeline_view(report)) is not None
    ]
    return page(lines[0], f"{fragment(lines, pictures, tables)}\n")


def _at_the_peak(report: Report) -> list[Section]:
    return [s for s in sections(report) if s.title in ("Alive at the peak", "Next highest hills")]
