"""Advice on how to lower the peak further, with figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from thunder_mem.memory.units import ranges, size
from thunder_mem.report.facts import CATEGORIES, NO_PLAN

if TYPE_CHECKING:
    from thunder_mem.optimizer.variants import StepVariant
    from thunder_mem.report.report import Report, Tenant

__all__ = ["Advice", "about_step", "advice"]

# The least share of the peak that is worth advice.
_WORTH = 0.05
# A budget that advice names, as a share of the peak, and in how many tiles a tensor may be cut.
_LESS, _TILES = 0.8, 8
_EXACT = '"exact"'


@dataclass(frozen=True)
class Advice:
    """A way to a lower peak.

    Attributes:
        nbytes: the bytes at stake in the peak, which limit its gain: another operation may then hold the peak (see
            the next highest hills).
        text: the advice, with the reason.
        code: the same as a line of code to paste, or "".
        short: what the code does, in a few words.
        share: the part of `nbytes` that the code can free at most.
    """

    nbytes: int
    text: str
    code: str = ""
    short: str = ""
    share: float = 1.0


def advice(report: Report) -> tuple[Advice, ...]:
    """Ways to a lower peak, the one with the most at stake first."""
    if report.peak is None or not report.peak_bytes:
        return ()
    found = [*_order(report), *_saved(report), *_held(report), *_gradients(report), *_optimizer(report)]
    found += [*_working(report), *_unplanned(report), *_scratch(report)]
    worth = [way for way in found if way.nbytes >= _WORTH * report.peak_bytes]
    return tuple(sorted(worth, key=lambda way: -way.nbytes))


def _order(report: Report) -> Iterator[Advice]:
    assert report.peak is not None
    for o in report.optimality:
        if o.phase == report.peak.phase and o.bound_bytes is not None and not o.proven:
            searched = report.options.get("sort") == _EXACT
            yield Advice(
                o.peak_bytes - o.bound_bytes,
                f"the gap to the bound: another order of the {o.phase} may exist"
                + ("" if searched else ", and MemEfficient(sort='exact') searches longer for it"),
                "" if searched else _planned(report, sort=_EXACT),
                "searches longer for an order",
            )


def _saved(report: Report) -> Iterator[Advice]:
    saved_bytes = _of(report, CATEGORIES[1])
    if not saved_bytes:
        return
    largest = max((t for t in report.tenants if t.category == CATEGORIES[1]), key=lambda t: t.nbytes)
    target = size(round(_LESS * report.peak_bytes)).replace(" ", "")
    budgeted = report.plan is None or report.plan.budget is not None
    yield Advice(
        saved_bytes,
        f"saved for the backward, most of it ({size(largest.nbytes)}) {_what(largest)}: "
        "torch.utils.checkpoint around a block keeps its inputs only, and smaller microbatches need less in proportion",
        "" if budgeted else _planned(report, budget=f'"{target}"', on_infeasible='"warn"'),
        "costs time",
    )


def _held(report: Report) -> Iterator[Advice]:
    held = [t for t in report.tenants if t.category == CATEGORIES[0]]
    state_bytes = sum(t.nbytes for t in held if t.kind == "optimizer state")
    kept_bytes = sum(t.nbytes for t in held if t.kind == "gradient")
    rest_bytes = _of(report, CATEGORIES[0]) - state_bytes - kept_bytes
    wide_bytes = sum(t.nbytes for t in held if t.kind in ("parameter", "argument") and t.dtype == "float32")
    yield Advice(
        rest_bytes,
        "parameters and inputs that the caller holds: no plan changes them; a smaller dtype, parameters sharded "
        "over GPUs (FSDP) or inputs that the caller lets go of would",
        "model.bfloat16()" if report.paths and wide_bytes > rest_bytes // 2 else "",
        "half the bytes, fewer digits",
        wide_bytes / (2 * rest_bytes) if rest_bytes else 0.0,
    )
    yield Advice(
        state_bytes,
        "the optimizer's state: others keep less, or in fewer bits, or sharded",
        "torch.optim.Adafactor(model.parameters())",
        "an optimizer with less state",
    )
    yield Advice(
        kept_bytes,
        "gradients from before: zero_grad(set_to_none=True) frees them",
        "optimizer.zero_grad(set_to_none=True)",
        "frees gradients from before",
    )


def _gradients(report: Report) -> Iterator[Advice]:
    gradient_bytes = _of(report, CATEGORIES[2])
    if any(event.name == "update_parameter" for event in report.prediction.timeline):
        yield Advice(
            gradient_bytes,
            "gradients until their updates: those that max_norm or a scaler keeps waiting are gone earlier with "
            "two_pass=True, which takes a second backward",
        )
        return
    yield Advice(
        gradient_bytes,
        "gradients that wait for the optimizer: with StepInBackward the compiled backward uses each at once",
        _planned(report, optimizer="StepInBackward(optimizer)"),
        "steps in the backward",
    )


def _optimizer(report: Report) -> Iterator[Advice]:
    assert report.peak is not None
    if report.peak.phase == "optimizer":
        variants = report.prediction.step_variants
        used = next((v for v in variants if v.is_used), None)
        least = min(variants, key=attrgetter("temporary_bytes"), default=None)
        if used is not None and least is not None and least.temporary_bytes < used.temporary_bytes:
            yield Advice(
                used.temporary_bytes - least.temporary_bytes,
                about_step(variants),
                f"torch.optim.{used.kind}(model.parameters(), {least.option})",
                f"{_temporaries(least)} temporaries",
            )


def about_step(variants: Sequence[StepVariant]) -> str:
    """What a step holds beside parameters, gradients and states, and what its other variants would; "" if unknown."""
    used = next((v for v in variants if v.is_used), None)
    if used is None:
        return ""
    ranked = sorted(variants, key=attrgetter("temporary_bytes"))
    others = ", ".join(f"{v.option} {_temporaries(v)}" for v in ranked if v is not used)
    return f"the step of {used.kind}({used.option}) holds {_temporaries(used)} temporaries: {others}"


def _temporaries(variant: StepVariant) -> str:
    return size(variant.temporary_bytes) if variant.temporary_bytes else "no"


def _working(report: Report) -> Iterator[Advice]:
    assert report.peak is not None
    if report.peak.phase == "optimizer":
        return
    working = [t for t in report.tenants if t.category == CATEGORIES[3]]
    if working:
        largest = max(working, key=lambda t: t.nbytes)
        rows = math.prod(largest.shape[:-1]) // _TILES
        yield Advice(
            largest.nbytes,
            f"the largest working tensor, {_what(largest)}: can its line work in pieces, or in a smaller dtype?",
            _planned(report, tile=f"Tiles(rows={rows})") if rows and _is_cut_by_tiles(report, largest) else "",
            "token-wise stretches in pieces",
        )


def _is_cut_by_tiles(report: Report, t: Tenant) -> bool:
    """Whether tiles, which the user has not chosen, would cut the tensor or the value whose gradient it is."""
    return (t.place.source, math.prod(t.shape)) in report.cuttable


def _unplanned(report: Report) -> Iterator[Advice]:
    movable_bytes = _of(report, CATEGORIES[1]) + _of(report, CATEGORIES[3])
    if report.plan is None and NO_PLAN in report.notes:
        yield Advice(
            movable_bytes,
            "compile with transforms=[MemEfficient()]: nothing was planned here",
            _compiled(report),
            "nothing was planned here",
        )
    elif report.plan and not report.may_fuse and len(report.plan.regions) > 1:
        yield Advice(
            movable_bytes,
            "nothing is fused, so every intermediate result is a tensor: leave `executors` out, or add 'mem_pointwise'",
            _compiled(report),
            "without executors=",
        )


def _scratch(report: Report) -> Iterator[Advice]:
    scratch_bytes = report.prediction.scratch_bytes
    if scratch_bytes:
        most = report.prediction.peak_event
        assert most is not None
        yield Advice(scratch_bytes, f"scratch inside {most.name} #{most.index}, held only while it runs")


def _compiled(report: Report) -> str:
    """The code that compiles with `MemEfficient`, without `executors`."""
    given = {name: code for name, code in report.options.items() if name != "executors"}
    planned = _planned(replace(report, options=given))
    return (
        planned if report.compiled_by == "memory_efficient" else f"{report.compiled_by}(model, transforms=[{planned}])"
    )


def _planned(report: Report, **options: str) -> str:
    """The code that gives further options to `MemEfficient`, beside those that the user gave."""
    written = [f"{name}={code}" for name, code in {**report.options, **options}.items()]
    if report.compiled_by == "memory_efficient":
        return f"memory_efficient({', '.join(['model', *written])})"
    return f"MemEfficient({', '.join(written)})"


def _of(report: Report, category: str) -> int:
    assert report.peak is not None
    return report.peak.by_category[CATEGORIES.index(category)]


def _what(t: Tenant) -> str:
    """The tenant in a few words: its number, layers and source line."""
    count = f"{t.count} × {t.names[0]}" if t.count > 1 else t.names[0]
    layers = f" of layers {ranges(t.layers)}" if len(t.layers) > 1 else ""
    the = "the " if t.place.undoes else ""
    return f"{count}{layers}" + (f", from {the}{t.place}" if t.place.source else "")
