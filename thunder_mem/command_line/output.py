"""The output of the commands: lines and tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from thunder_mem.analysis.frontier_points import Frontier
from thunder_mem.command_line.program import in_words
from thunder_mem.command_line.questions import Outcome
from thunder_mem.memory.units import change, size
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.rendering.document import Section
from thunder_mem.report import Report
from thunder_mem.report.sections import about_library, sections

__all__ = [
    "frontier_json",
    "frontier_tables",
    "plan_json",
    "plan_tables",
    "predict_json",
    "predict_tables",
    "verdict",
    "verdict_json",
]


def verdict(found: Outcome) -> tuple[str, ...]:
    """One line for each limit: whether the peak fits, and the headroom."""
    lines = []
    for name, limit_bytes in found.limits:
        left_bytes = limit_bytes - found.peak_bytes
        answer = "fits" if left_bytes >= 0 else "does NOT fit"
        rest = f"headroom {size(left_bytes)}" if left_bytes >= 0 else f"{size(-left_bytes)} too much"
        lines.append(f"{answer} into {size(limit_bytes)} of {name}: {rest}")
    bought = found.plan.budget if found.plan is not None else None
    if bought is not None and bought.recompute_ms:
        least = f" (at least {bought.bound_ms:.3g} ms)" if bought.bound_ms else ""
        lines.append(
            f"bought by computing again what takes about {bought.recompute_ms:.3g} ms{least} by the cost model"
        )
    allocation = found.allocation
    if allocation is not None:
        lines.append(
            "blocks are rounded up to 512 B as the allocator does; "
            f"fragmentation, an estimate: {size(allocation.fragmentation_bytes)} more"
        )
    return tuple(lines)


def verdict_json(found: Outcome) -> dict[str, Any]:
    """The verdict as plain data."""
    allocation = found.allocation
    return {
        "fits": found.fits,
        "peak_bytes": found.peak_bytes,
        "limits": [
            {"name": name, "limit_bytes": nbytes, "headroom_bytes": nbytes - found.peak_bytes}
            for name, nbytes in found.limits
        ],
        "budget": None if found.plan is None or found.plan.budget is None else asdict(found.plan.budget),
        "allocated_peak_bytes": None if allocation is None else allocation.allocated_peak_bytes,
        "reserved_peak_bytes": None if allocation is None else allocation.reserved_peak_bytes,
    }


def predict_tables(found: Outcome) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """The lines and the table of `thunder-mem predict`."""
    p = found.prediction
    event = p.peak_event
    where = f" in the {event.phase}, at {event.name} #{event.index}" if event else ""
    lines = [
        f"Peak {size(p.peak_bytes)} ({p.peak_bytes:,} bytes){where}",
        *verdict(found),
        f"held by the caller throughout: {size(p.held_bytes)} (parameters, inputs and other tensors)",
    ]
    if event is not None and p.scratch_bytes:
        lines.append(f"scratch: {size(p.scratch_bytes)}, which {event.name} #{event.index} holds while it runs")
    lines += about_library(p)
    if (moved := p.state_transfers).link_s:
        lines.append(
            f"on the host: {size(p.host_bytes)}; in each step the optimizer's states take {moved.link_s * 1e3:.3g} ms "
            f"on the link, {moved.exposed_s * 1e3:.3g} ms of them not hidden"
        )
    lines += [f"assumed: {a}" for a in p.assumptions]
    rows = []
    for name in p.phases:
        part = p.phase(name)
        rows.append((name, f"{len(part.timeline):,}", size(part.peak_bytes), size(part.scratch_bytes)))
    return tuple(lines), (Section("Phases", ("phase", "ops", "peak", "of it scratch"), tuple(rows), (1, 2, 3)),)


def predict_json(found: Outcome) -> dict[str, Any]:
    """The object of `thunder-mem predict --json`."""
    p = found.prediction
    return {
        "scratch_bytes": p.scratch_bytes,
        "library_bytes": p.library_bytes,
        "held_bytes": p.held_bytes,
        "host_bytes": p.host_bytes,
        "state_transfers": asdict(p.state_transfers),
        "device": p.device_type,
        "assumptions": list(p.assumptions),
        "phases": {
            name: {
                "peak_bytes": p.phase(name).peak_bytes,
                "scratch_bytes": p.phase(name).scratch_bytes,
                "operations": len(p.phase(name).timeline),
            }
            for name in p.phases
        },
        **verdict_json(found),
    }


def plan_tables(alone: Outcome | PredictionError, planned: Outcome) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """The lines and tables of `thunder-mem plan`; `alone` may be why there is no prediction of it."""
    after = planned.prediction
    before = (alone.prediction,) if isinstance(alone, Outcome) else ()
    lines = [
        *_both_peaks(alone, after.peak_bytes),
        *about_library(after),
        *verdict(planned),
        *(f"assumed: {a}" for a in after.assumptions),
    ]
    rows = []
    for name in dict.fromkeys(phase for p in (*before, after) for phase in p.phases):
        peaks = [p.phase(name).peak_bytes if name in p.phases else None for p in (*before, after)]
        peaks = [*(None for _ in range(2 - len(peaks))), *peaks]
        by = change(*(nbytes or 0 for nbytes in peaks)) if None not in peaks else ""
        rows.append((name, *("" if nbytes is None else size(nbytes) for nbytes in peaks), by))
    phases = Section(
        "Phases, as predicted", ("phase", "Thunder alone", "MemEfficient", "change"), tuple(rows), (1, 2, 3)
    )
    titles = ("Before and after each decision", "Arrangements compared", "Left as it was")
    report = Report(after, planned.plan)
    return tuple(lines), (phases, *(s for s in sections(report) if s.title in titles))


def _both_peaks(alone: Outcome | PredictionError, after_bytes: int) -> Iterator[str]:
    after = f"{size(after_bytes)} with MemEfficient"
    if isinstance(alone, Outcome):
        before_bytes = alone.prediction.peak_bytes
        by = change(before_bytes, after_bytes)
        yield f"Peak {size(before_bytes)} by Thunder alone, {after}{f' ({by})' if by else ''}"
    else:
        yield f"Peak {after}; there is no figure for Thunder alone"
        yield f"Thunder alone: {in_words(alone)}"


def plan_json(alone: Outcome | PredictionError, planned: Outcome) -> dict[str, Any]:
    """The object of `thunder-mem plan --json`."""
    return {
        "thunder_alone": predict_json(alone) if isinstance(alone, Outcome) else None,
        "planned": predict_json(planned),
        "plan": None if planned.plan is None else planned.plan.to_json(),
        **verdict_json(planned),
    }


def frontier_tables(
    frontier: Frontier, limits: Sequence[tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """The lines and the table of `thunder-mem frontier`."""
    lines = [frontier.headline]
    for name, limit_bytes in limits:
        point = frontier.within(limit_bytes)
        if point is None:
            lines.append(f"nothing fits into {size(limit_bytes)} of {name}")
        else:
            lines.append(
                f"fits into {size(limit_bytes)} of {name}: at {size(point.peak_bytes)}, {point.step_ms:.4g} ms"
            )
    return tuple(lines), (frontier.table,)


def frontier_json(frontier: Frontier, limits: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The object of `thunder-mem frontier --json`."""
    fitting = [frontier.within(limit_bytes) for _, limit_bytes in limits]
    return {
        **frontier.to_json(),
        "fits": None not in fitting,
        "limits": [
            {"name": name, "limit_bytes": nbytes, "peak_bytes": None if point is None else point.peak_bytes}
            for (name, nbytes), point in zip(limits, fitting, strict=True)
        ],
    }
