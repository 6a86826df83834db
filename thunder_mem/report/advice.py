"""Advice on how to lower the peak further, with figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from thunder_mem.memory.units import size
from thunder_mem.report.facts import CATEGORIES, NO_PLAN
from thunder_mem.report.layers import ranges

if TYPE_CHECKING:
    from thunder_mem.report.report import Report, Tenant

__all__ = ["advice"]

# The least share of the peak that is worth advice.
_WORTH = 0.05


def advice(report: Report) -> tuple[tuple[int, str], ...]:
    """Sentences, each with the bytes at stake in the peak, the largest first.

    The bytes are those of the storages or of the gap that a sentence is about. They limit its gain, because
    another operation may then hold the peak (see the next highest hills).
    """
    if report.peak is None or not report.peak_bytes:
        return ()
    found = [*_order(report), *_saved(report), *_held(report), *_gradients(report), *_optimizer(report)]
    found += [*_working(report), *_unplanned(report), *_scratch(report)]
    worth = [entry for entry in found if entry[0] >= _WORTH * report.peak_bytes]
    return tuple(sorted(worth, key=lambda entry: -entry[0]))


def _order(report: Report) -> Iterator[tuple[int, str]]:
    assert report.peak is not None
    for o in report.optimality:
        if o.phase == report.peak.phase and o.bound_bytes is not None and not o.proven:
            yield (
                o.peak_bytes - o.bound_bytes,
                f"the gap to the bound: another order of the {o.phase} may exist, "
                "and MemEfficient(sort='exact') searches longer for it",
            )


def _saved(report: Report) -> Iterator[tuple[int, str]]:
    saved_bytes = _of(report, CATEGORIES[1])
    if not saved_bytes:
        return
    largest = max((t for t in report.tenants if t.category == CATEGORIES[1]), key=lambda t: t.nbytes)
    yield (
        saved_bytes,
        f"saved for the backward, most of it ({size(largest.nbytes)}) {_what(largest)}: "
        "torch.utils.checkpoint around a block keeps its inputs only, and smaller microbatches need less in proportion",
    )


def _held(report: Report) -> Iterator[tuple[int, str]]:
    state_bytes = sum(t.nbytes for t in report.tenants if t.category == CATEGORIES[0] and t.kind == "optimizer state")
    kept_bytes = sum(t.nbytes for t in report.tenants if t.category == CATEGORIES[0] and t.kind == "gradient")
    rest_bytes = _of(report, CATEGORIES[0]) - state_bytes - kept_bytes
    yield (
        rest_bytes,
        "parameters and inputs that the caller holds: no plan changes them; a smaller dtype, parameters sharded "
        "over GPUs (FSDP) or inputs that the caller lets go of would",
    )
    yield (
        state_bytes,
        "the optimizer's state: others keep less, or in fewer bits, or sharded",
    )
    yield kept_bytes, "gradients from before: zero_grad(set_to_none=True) frees them"


def _gradients(report: Report) -> Iterator[tuple[int, str]]:
    gradient_bytes = _of(report, CATEGORIES[2])
    yield (
        gradient_bytes,
        "gradients that wait for the optimizer: one that steps in the backward "
        "(register_post_accumulate_grad_hook) frees each at once",
    )


def _optimizer(report: Report) -> Iterator[tuple[int, str]]:
    assert report.peak is not None
    if report.peak.phase == "optimizer":
        nbytes = _of(report, CATEGORIES[3])
        yield (
            nbytes,
            "the optimizer's temporaries: fused=True needs none, foreach=False fewer",
        )


def _working(report: Report) -> Iterator[tuple[int, str]]:
    assert report.peak is not None
    if report.peak.phase == "optimizer":
        return
    working = [t for t in report.tenants if t.category == CATEGORIES[3]]
    if working:
        largest = max(working, key=lambda t: t.nbytes)
        yield (
            largest.nbytes,
            f"the largest working tensor, {_what(largest)}: can its line work in pieces, or in a smaller dtype?",
        )


def _unplanned(report: Report) -> Iterator[tuple[int, str]]:
    movable_bytes = _of(report, CATEGORIES[1]) + _of(report, CATEGORIES[3])
    if report.plan is None and NO_PLAN in report.notes:
        yield movable_bytes, "compile with transforms=[MemEfficient()]: nothing was planned here"
    elif report.plan and len(report.plan.regions) > 1 and not any(r.executor for r in report.plan.regions):
        yield (
            movable_bytes,
            "nothing is fused, so every intermediate result is a tensor: leave `executors` out, or add 'mem_pointwise'",
        )


def _scratch(report: Report) -> Iterator[tuple[int, str]]:
    scratch_bytes = report.prediction.scratch_bytes
    if scratch_bytes:
        most = report.prediction.peak_event
        assert most is not None
        yield scratch_bytes, f"scratch inside {most.name} #{most.index}, held only while it runs"


def _of(report: Report, category: str) -> int:
    assert report.peak is not None
    return report.peak.by_category[CATEGORIES.index(category)]


def _what(t: Tenant) -> str:
    """The tenant in a few words: its number, layers and source line."""
    count = f"{t.count} × {t.names[0]}" if t.count > 1 else t.names[0]
    layers = f" of layers {ranges(t.layers)}" if len(t.layers) > 1 else ""
    the = "the " if t.place.undoes else ""
    return f"{count}{layers}" + (f", from {the}{t.place}" if t.place.source else "")
