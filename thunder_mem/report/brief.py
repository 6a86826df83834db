"""A report in five lines: how much, when, held by whom, and the two best ways to less, as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.units import size
from thunder_mem.prediction.predict import Held
from thunder_mem.report.advice import advice
from thunder_mem.report.facts import CATEGORIES, NO_PLAN, Facts, Place
from thunder_mem.report.lines import shorten
from thunder_mem.report.notes import NOT_FUSED
from thunder_mem.report.owners import modules_of
from thunder_mem.report.sections import verdict

if TYPE_CHECKING:
    from thunder_mem.report.report import Report

__all__ = ["brief"]

_WIDTH, _HOLDERS, _WAYS = 98, 3, 2
_SHORT = dict(zip(CATEGORIES, ("the caller's", "saved", "gradients", "working", "scratch"), strict=True))


def brief(report: Report) -> tuple[str, ...]:
    """The lines; further ones only for a budget, and for what went wrong in the compilation."""
    notes = tuple(note for note in report.notes if note not in (NO_PLAN, NOT_FUSED))
    if report.peak is None:
        return (f"Nothing runs: the caller's {size(report.peak_bytes)} are all there is", *notes)
    lines = [_amount(report), _moment(report), _holders(report)]
    return (*(shortened(line, _WIDTH) for line in lines), *_ways(report), *verdict(report), *notes)


def _amount(report: Report) -> str:
    """The peak, against eager PyTorch's and Thunder's where they are known."""
    alone = " under Thunder alone" if NO_PLAN in report.notes else ""
    where = "the CPU" if report.prediction.device_type == "cpu" else "the GPU"
    against = [("eager PyTorch", report.eager_bytes), ("Thunder alone", report.thunder_bytes)]
    known = [f"{name} {size(nbytes)}" for name, nbytes in against if nbytes is not None]
    return "; ".join([f"At most {size(report.peak_bytes)} on {where}{alone}", *known])


def _moment(report: Report) -> str:
    peak = report.peak
    assert peak is not None
    line = f"in the {peak.phase}, at {peak.op} #{peak.index}"
    return f"{line}, {peak.place}: {peak.place.code}".removesuffix(": ") if peak.place.source else line


def _holders(report: Report) -> str:
    """The modules that hold most, each with the category of most of its bytes; as much as a line takes."""
    held: dict[str, dict[str, int]] = {}
    for name, category, nbytes in _storages(report):
        of = held.setdefault(name, {})
        of[category] = of.get(category, 0) + nbytes
    totals = {name: sum(of.values()) for name, of in held.items()}
    largest = sorted(totals, key=lambda name: (-totals[name], name))

    def line(count: int, with_category: bool) -> str:
        named, rest = largest[:count], largest[count:]
        words = [f"{name} {size(totals[name])}{_mostly(held[name]) if with_category else ''}" for name in named]
        more = [f"{len(rest)} more {size(sum(map(totals.__getitem__, rest)))}"] if rest else []
        return f"held by {', '.join([*words, *more])}"

    lines = [line(count, with_category) for count in range(_HOLDERS, 0, -1) for with_category in (True, False)]
    return next((text for text in lines if len(text) <= _WIDTH), lines[-1])


def _mostly(of: dict[str, int]) -> str:
    largest = max(of, key=lambda category: (of[category], category))
    if largest == CATEGORIES[0]:
        return ""
    return f" ({'mostly ' if len(of) > 1 else ''}{_SHORT[largest]})"


def _storages(report: Report) -> Iterator[tuple[str, str, int]]:
    """Whose, which category, and how many bytes: of each storage alive at the peak, and of its scratch."""
    prediction, facts = report.prediction, Facts(report.prediction)
    modules = modules_of(facts, report.paths)
    number = {id(storage): i for i, storage in enumerate(prediction.storages)}
    for storage in prediction.held_at_peak:
        module = modules.get(number[id(storage)])
        name = _nameless(storage, facts) if module is None else _named(module)
        yield name, facts.category(storage), facts.device_bytes(storage)
    event = prediction.peak_event
    if event is not None and prediction.scratch_bytes:
        yield event.name, CATEGORIES[-1], prediction.scratch_bytes


def _named(module: str) -> str:
    """A module by its path, with # for the number of its layer, so that equal layers have one name."""
    if not re.search(r"[^\d.]", module):
        return f"module {module}" if module else "the model"
    return re.sub(r"\d+", "#", module, count=1)


def _nameless(storage: Held, facts: Facts) -> str:
    """What to call a storage of no module."""
    if storage.kind in _KINDS:
        return _KINDS[storage.kind]
    born = facts.position.get(storage.born)
    phase = "" if born is None else facts.prediction.timeline[born].phase
    if phase in _PHASES:
        return _PHASES[phase]
    place = Place() if born is None else facts.place_of(storage)
    return shorten(place.used_at or place.source) or storage.name


_KINDS = {
    "argument": "the arguments",
    "parameter": "the parameters",
    "tangent": "the results' gradients",
    "optimizer state": "the optimizer's state",
    "gradient": "gradients from before",
}
_PHASES = {"optimizer": "the optimizer's step", "loss": "the loss"}


def _ways(report: Report) -> list[str]:
    """The advice with the most at stake that is code, with its reason where the line is wide enough."""
    ways = [(round(way.share * way.nbytes), way) for way in advice(report) if way.code]
    ways.sort(key=lambda entry: -entry[0])
    lines = ((f"up to {size(nbytes)} less: {way.code}", f"  # {way.short}") for nbytes, way in ways[:_WAYS])
    return [line + short if len(line + short) <= _WIDTH else line for line, short in lines]
