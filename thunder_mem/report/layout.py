"""A report in the form for renderers: lines, tables, and the timeline for pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thunder_mem.attention.head_groups import groups_of, runs_in_groups
from thunder_mem.chunk_loop.symbols import loop_of, runs_rows
from thunder_mem.fake_execution.replay import Event
from thunder_mem.memory.units import counted, size
from thunder_mem.rendering.document import Document, Life, TimelineView
from thunder_mem.report.dataflow import dataflow_svg
from thunder_mem.report.facts import CATEGORIES, label
from thunder_mem.report.sections import headline, sections

if TYPE_CHECKING:
    from thunder_mem.report.report import Report

__all__ = ["document", "timeline_view"]

# The most operations for which the picture of the dataflow helps.
_FLOW_OPS = 200


def document(report: Report, most: int = 25, with_flow: bool = False) -> Document:
    """The report as a document.

    Args:
        report: the report.
        most: the most rows in a table of storages.
        with_flow: add the picture of the dataflow, for a program of up to 200 operations.
    """
    small = 0 < len(report.prediction.timeline) <= _FLOW_OPS
    flow = dataflow_svg(report) if with_flow and small else ""
    return Document(headline(report), sections(report, most), timeline_view(report), flow)


def timeline_view(report: Report) -> TimelineView | None:
    """The timeline for pictures; None if nothing runs."""
    if report.peak is None:
        return None
    timeline = report.prediction.timeline
    first, end = timeline[0].index, len(timeline) - 1
    lives = tuple(
        Life(
            nbytes=t.nbytes,
            name=t.names[0],
            count=t.count,
            category=CATEGORIES.index(t.category),
            born=max(t.born - first, 0),
            last=min(t.last - first, end),
            title=f"{size(t.nbytes)}, {', '.join(t.names)}\n{t.why}",
        )
        for t in report.tenants
    )
    return TimelineView(
        first=first,
        device_bytes=report.prediction.device_bytes,
        categories=CATEGORIES,
        layers=report.layers,
        phases=tuple((phase.name, phase.ops) for phase in report.phases),
        peak=report.peak.index - first,
        peak_phase=report.peak.phase,
        label=lambda position: label(timeline[position]),
        place=lambda position: str(report.moment(position).place),
        lives=lives,
        loops=tuple((p, parts) for p, event in enumerate(timeline) if (parts := _parts_of(event))),
    )


def _parts_of(event: Event) -> str:
    """The parts in which an operation runs, such as "8 tiles of 2,048 rows"; "" if it runs whole."""
    if event.bsym is None:
        return ""
    if runs_rows(event.bsym):
        return loop_of(event.bsym).plan.sizes
    return f"{counted(groups_of(event.bsym), 'group')} of heads" if runs_in_groups(event.bsym) else ""
