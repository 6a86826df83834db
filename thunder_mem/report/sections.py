"""The content of a report as headline and tables; text, terminal and page only lay it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thunder_mem.fusion.arrangement import THUNDERS_OWN
from thunder_mem.memory.units import change, ranges, size
from thunder_mem.prediction.library_memory import LibraryMemory
from thunder_mem.prediction.predict import Prediction
from thunder_mem.rendering.document import Section
from thunder_mem.report.advice import advice
from thunder_mem.report.facts import CATEGORIES
from thunder_mem.report.lines import shorten
from thunder_mem.report.optimality import Optimality

if TYPE_CHECKING:
    from thunder_mem.report.report import Moment, Report, Tenant

__all__ = ["about_library", "headline", "sections", "verdict"]


def headline(report: Report) -> tuple[str, ...]:
    """The first lines: the peak, its operation and source line, its parts, and the assumptions."""
    prediction, peak = report.prediction, report.peak
    if peak is None:
        return (f"Nothing runs: the caller's {size(report.peak_bytes)} are all there is", *report.notes)
    lines = [
        f"Peak {size(report.peak_bytes)} ({report.peak_bytes:,} bytes) in the {peak.phase}, at {peak.op} #{peak.index}",
        *report.above_eager,
    ]
    if peak.place.source:
        lines.append(f"{peak.place}{': ' + peak.place.code if peak.place.code else ''}")
    else:
        lines.append("the trace names no line of source for it")
    parts = sorted(zip(peak.by_category, CATEGORIES, strict=True), key=lambda part: -part[0])
    lines.append(", ".join(f"{name} {size(b)} ({b / report.peak_bytes:.0%})" for b, name in parts if b))
    if any(o.proven and o.phase == peak.phase for o in report.optimality):
        lines.append("no order of these operations is lower: what remains is to save less, recompute more, or chunk")
    lines += about_library(report.prediction)
    lines += verdict(report)
    lines += [f"assumed: {a}" for a in prediction.assumptions]
    return (*lines, *report.notes)


def verdict(report: Report) -> tuple[str, ...]:
    """Whether the peak fits the budget, and the headroom; nothing without a budget."""
    if report.headroom_bytes is None or report.budget_bytes is None:
        return ()
    given = report.plan.budget if report.plan is not None else None
    whose = " of MemEfficient" if given is not None and given.budget_bytes == report.budget_bytes else ""
    answer = "fits" if report.headroom_bytes >= 0 else "does not fit"
    how = "" if report.prediction.device_type == "cpu" else ", every block rounded up to 512 B as its allocator does"
    headroom = f"headroom {size(report.headroom_bytes)}"
    return (f"{answer} into the budget{whose}, {size(report.budget_bytes)}: {headroom}{how}",)


def about_library(prediction: Prediction) -> tuple[str, ...]:
    """The memory that libraries keep on the device in addition; nothing without any."""
    of: dict[str, list[LibraryMemory]] = {}
    for kept in prediction.library:
        of.setdefault(kept.library, []).append(kept)
    return tuple(
        f"beside all tensors {name} keeps {size(sum(k.nbytes for k in kept))}: {', '.join(k.purpose for k in kept)}"
        for name, kept in of.items()
    )


def sections(report: Report, most: int = 25) -> tuple[Section, ...]:
    """The tables of a report, without empty ones.

    Args:
        report: the report.
        most: the most rows in a table of storages; its note sums up the rest.
    """
    found = [_decisions(report), _candidates(report), _phases(report), _tenants(report, most), _runner_ups(report)]
    found += [_refused(report), _advice(report)]
    return tuple(s for s in found if s is not None and s.rows)


def _decisions(report: Report) -> Section | None:
    if report.plan is None:
        return None
    rows = []
    for d in report.plan.decisions:
        how = f"{d.how} ({shorten(d.source)})" if d.source else d.how
        rows.append(
            (d.what, how, d.figure, size(d.before_bytes), size(d.after_bytes), change(d.before_bytes, d.after_bytes))
        )
    note = (
        "The planner's own figures, before the final traces exist, with an estimate of the kernels' scratch. "
        "Each peak builds on the one above."
    )
    return Section("Before and after each decision", _DECISION_COLUMNS, tuple(rows), (3, 4, 5), note)


_DECISION_COLUMNS = ("decision", "what was decided", "figure", "before", "after", "change")


def _candidates(report: Report) -> Section | None:
    plan = report.plan
    if plan is None:
        return None
    before = next((c for c in plan.candidates if c.name == THUNDERS_OWN), None)
    rows = []
    for c in plan.candidates:
        than = change(before.peak_bytes, c.peak_bytes) if before else ""
        chosen = "chosen" if c.name == plan.chosen else ""
        name = f"{c.name} (as Thunder would)" if c is before else c.name
        peaks = map(size, (c.forward_peak_bytes, c.backward_peak_bytes, c.peak_bytes))
        rows.append((name, *peaks, than, str(c.regions), chosen))
    columns = ("arrangement", "forward", "backward", "peak", "change", "steps", "")
    return Section("Arrangements compared", columns, tuple(rows[::-1]), (1, 2, 3, 4, 5))


def _phases(report: Report) -> Section:
    bounds = {o.phase: o for o in report.optimality}
    rows: list[tuple[str, ...]] = []
    for phase in report.phases:
        o = bounds.get(phase.name)
        rows.append((phase.name, f"{phase.ops:,}", size(phase.peak_bytes), *_bound(o)))
    note = ""
    if any(o.bound_bytes is not None for o in report.optimality):
        note = "A bound holds for every order of the same operations, with the same regions and saved values."
    reasons = [f"No bound for the {o.phase}: {o.reason}." for o in report.optimality if o.reason]
    columns: tuple[str, ...] = ("phase", "ops", "peak", "lower bound", "gap", "")
    if not note:  # without bounds, omit their columns
        columns, rows = columns[:3], [row[:3] for row in rows]
    return Section("Phases", columns, tuple(rows), (1, 2, 3, 4), " ".join([note, *reasons]).strip())


def _bound(o: Optimality | None) -> tuple[str, str, str]:
    if o is None or o.bound_bytes is None or o.gap is None:
        return "", "", ""
    return size(o.bound_bytes), f"{o.gap:.1%}", "no order is lower" if o.proven else f"by {o.method}"


def _tenants(report: Report, most: int) -> Section | None:
    if report.peak is None:
        return None
    rows = tuple(_tenant(t) for t in report.tenants[:most])
    rest = report.tenants[most:]
    shares = ", ".join(f"{c} {size(b)}" for c, b in zip(CATEGORIES, report.peak.by_category, strict=True) if b)
    note = f"In all: {shares}."
    if rest:
        note += f" And {sum(t.count for t in rest):,} smaller ones, {size(sum(t.nbytes for t in rest))} together."
    columns = ("size", "share", "storage", "tensor", "made by", "alive", "why")
    return Section("Alive at the peak", columns, rows, (0, 1, 5), note, stack=2)


_NAMES = 3  # of tensors alike


def _tenant(t: Tenant) -> tuple[str, ...]:
    names = ", ".join(t.names[:_NAMES]) + (", …" if t.count > _NAMES else "")
    if t.count > 1:
        layers = f" in layers {ranges(t.layers)}" if len(t.layers) > 1 else ""
        names = f"{t.count} × {size(t.nbytes // t.count)}{layers}: {names}"
    elif t.aliases:
        names += f" (= {', '.join(t.aliases[:4])}{', …' if len(t.aliases) > 4 else ''})"
    made = ", ".join(filter(None, (t.producer, str(t.place)))) or "the caller"
    alive = f"{'start' if t.born < 0 else t.born} → {t.last}"
    shape = "×".join(map(str, t.shape)) or "scalar"
    return size(t.nbytes), f"{t.share:.1%}", names, f"{t.dtype} {shape}", made, alive, t.why


def _runner_ups(report: Report) -> Section:
    columns = ("peak", "phase", "operation", "line")
    rows = tuple((size(m.device_bytes), m.phase, f"{m.op} #{m.index}", _line(m)) for m in report.runner_ups)
    return Section("Next highest hills", columns, rows, (0,))


def _line(moment: Moment) -> str:
    return f"{moment.place}: {moment.place.code}" if moment.place.code else str(moment.place)


def _refused(report: Report) -> Section | None:
    if report.plan is None:
        return None
    return Section("Left as it was", ("what", "why"), tuple((r.what, r.reason) for r in report.plan.refused))


def _advice(report: Report) -> Section:
    rows = tuple((size(way.nbytes), way.text) for way in advice(report))
    note = "The bytes are what a line is about: at most so much, as far as the next highest hill allows."
    return Section("How to get lower", ("at stake", "what can be done"), rows, (0,), note)
