"""`Report`: the memory of one compiled function, as plain data."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from thunder_mem.memory.hills import hills
from thunder_mem.memory.plan import Plan
from thunder_mem.prediction.predict import Prediction
from thunder_mem.rendering.document import Document
from thunder_mem.rendering.endings import REPORT_ENDINGS
from thunder_mem.rendering.html import to_html, to_page
from thunder_mem.rendering.matplotlib import draw
from thunder_mem.rendering.text import to_rich, to_text
from thunder_mem.report.brief import brief
from thunder_mem.report.dataflow import dataflow_svg
from thunder_mem.report.facts import CATEGORIES, Facts, Place, label
from thunder_mem.report.layout import document, timeline_view
from thunder_mem.report.optimality import Optimality
from thunder_mem.report.snapshot import snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["CompiledBy", "Moment", "PhasePeak", "Report", "Tenant"]

CompiledBy = Literal["thunder.jit", "thunderfx", "memory_efficient"]


@dataclass(frozen=True)
class Moment:
    """One operation of the timeline and the device's bytes while it runs.

    Attributes:
        index: of its event.
        phase: "forward", "backward", ...
        op: the operation, as the trace prints it.
        place: its source line.
        device_bytes: all bytes, including scratch and the caller's tensors.
        by_category: their parts, one for each of `CATEGORIES`.
    """

    index: int
    phase: str
    op: str
    place: Place
    device_bytes: int
    by_category: tuple[int, ...]


@dataclass(frozen=True)
class Tenant:
    """A storage alive at the peak, or several similar ones, such as those of equal layers.

    Attributes:
        count: their number.
        nbytes: of all of them together.
        share: `nbytes` as a share of the peak, 0..1.
        names: the first tensor of each, up to eight; the rest are only counted.
        aliases: the other tensors on the first storage.
        shape, dtype, device: of the first tensor of each.
        category: one of `CATEGORIES`.
        kind: of the storage, see `thunder_mem.prediction.predict.Held`.
        producer: the operation that made it (or the first of them); "" for the caller's storages.
        place: the producer's source line.
        born, last: indices of the first and the last event in which it is alive; -1: before the first. For
            several storages, the earliest and the latest.
        why: why it is alive.
        layers: numbers of their layers in the model, if they have any.
    """

    count: int
    nbytes: int
    share: float
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    device: str
    category: str
    kind: str
    producer: str
    place: Place
    born: int
    last: int
    why: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PhasePeak:
    """The peak of one phase: its name, its number of operations, and the most bytes on the device."""

    name: str
    ops: int
    peak_bytes: int


@dataclass(frozen=True)
class Report:
    """The memory of a compiled function: what, when, and why. Use `str()`, print it with rich, or save it.

    Attributes:
        prediction: the timeline that all figures come from.
        plan: MemEfficient's decisions; None if it made no plan.
        optimality: per phase, a lower bound or the reason why there is none; empty if not requested.
        budget_bytes: the budget to compare the peak with, if any.
        notes: further notes, in sentences.
        above_eager: a sentence if eager PyTorch is known to need less, with the reason; else empty.
        eager_bytes, thunder_bytes: the peak of eager PyTorch and of Thunder alone for the same call; None where it is
            not known. `explain` looks for the latter only for the five lines, as it takes another compilation.
        paths: a parameter's name in the trace -> its path in the module.
        options: of `MemEfficient` (or `memory_efficient`) that the user gave, by name, as code.
        cuttable: the source line and the number of elements of each value that tiles could cut; none if the user
            gave ``tile=``.
        may_fuse: whether the program was compiled with a general fusion executor.
        compiled_by: which of the functions `thunder.jit`, `thunderfx` and `memory_efficient` (of
            `thunder_mem.integrations.transformers`) the user called.
        detail: print everything, instead of five lines. Files have everything.
    """

    prediction: Prediction
    plan: Plan | None = None
    optimality: tuple[Optimality, ...] = ()
    budget_bytes: int | None = None
    notes: tuple[str, ...] = ()
    above_eager: tuple[str, ...] = ()
    eager_bytes: int | None = None
    thunder_bytes: int | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    cuttable: frozenset[tuple[str, int]] = frozenset()
    may_fuse: bool = True
    compiled_by: CompiledBy = "thunder.jit"
    detail: bool = True
    _facts: Facts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_facts", Facts(self.prediction))

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device, see `Prediction.peak_bytes`; `fits` and budgets use the same figure."""
        return self.prediction.peak_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """The budget less the peak; negative if the budget is exceeded, None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.peak_bytes

    @cached_property
    def peak(self) -> Moment | None:
        """The operation at the peak; None if nothing runs."""
        event = self.prediction.peak_event
        return None if event is None else self.moment(self._facts.position[event.index])

    @cached_property
    def runner_ups(self) -> tuple[Moment, ...]:
        """The other hills of the timeline, highest first: the next peaks once this one is gone."""
        if self.peak is None:
            return ()
        positions = hills(self.prediction.device_bytes)
        return tuple(m for m in map(self.moment, positions) if m.index != self.peak.index)

    @cached_property
    def phases(self) -> tuple[PhasePeak, ...]:
        """The phases in the order they run."""
        parts = (self.prediction.phase(name) for name in self.prediction.phases)
        return tuple(PhasePeak(p.timeline[0].phase, len(p.timeline), p.peak_bytes) for p in parts)

    @cached_property
    def tenants(self) -> tuple[Tenant, ...]:
        """The storages alive at the peak, largest first; those that differ only in their layer are one entry.

        Together with the scratch they add up to the peak.
        """
        if self.peak is None:
            return ()
        facts, timeline = self._facts, self.prediction.timeline
        at = facts.position[self.peak.index]
        folded: dict[tuple[Any, ...], list[Tenant]] = {}
        for storage in self.prediction.held_at_peak:
            made = storage.kind not in ("argument", "tangent", "parameter")
            born = facts.position.get(storage.born) if made else None
            tenant = Tenant(
                count=1,
                nbytes=facts.device_bytes(storage),
                share=facts.device_bytes(storage) / self.peak_bytes if self.peak_bytes else 0.0,
                names=(storage.name,),
                aliases=storage.aliases,
                shape=storage.shape,
                dtype=str(storage.dtype).removeprefix("torch."),
                device=str(storage.device),
                category=facts.category(storage),
                kind=storage.kind,
                producer=label(timeline[born]) if born is not None else "",
                place=facts.place_of(storage) if born is not None else Place(),
                born=storage.born,
                last=storage.last,
                why=facts.why(storage, at),
                layers=facts.layers_of_storage(storage),
            )
            op = timeline[born].name if born is not None else storage.kind
            reason = "".join(c for c in tenant.why if not c.isdigit())
            key = (
                storage.nbytes,
                storage.shape,
                storage.dtype,
                tenant.category,
                storage.kind,
                op,
                tenant.place,
                reason,
            )
            folded.setdefault(key, []).append(tenant)
        return tuple(sorted(map(_fold, folded.values()), key=lambda t: (-t.nbytes, t.born, t.names)))

    def moment(self, position: int) -> Moment:
        """The live bytes at a position of the timeline.

        Raises:
            IndexError: there is no such position.
        """
        event = self.prediction.timeline[position]
        return Moment(
            index=event.index,
            phase=event.phase,
            op=event.name,
            place=self._facts.places[position],
            device_bytes=self.prediction.device_bytes[position],
            by_category=tuple(layer[position] for layer in self._facts.layers),
        )

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Per category of `CATEGORIES`, the device's bytes at each operation."""
        return self._facts.layers

    def __str__(self) -> str:
        return to_text(self._printed())

    def __rich__(self) -> RenderableType:
        return to_rich(self._printed())

    def _repr_html_(self) -> str:
        return to_html(self._printed())

    def _printed(self) -> Document:
        return document(self) if self.detail else Document(brief(self), ())

    def to_page(self) -> str:
        """One self-contained HTML page: no scripts, nothing from the network."""
        return to_page(document(self, most=200, with_flow=True))

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; the timeline as columns of equal length."""
        timeline = self.prediction.timeline
        return {
            "peak_bytes": self.peak_bytes,
            "scratch_bytes": self.prediction.scratch_bytes,
            "library_bytes": self.prediction.library_bytes,
            "held_bytes": self.prediction.held_bytes,
            "budget_bytes": self.budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "device": self.prediction.device_type,
            "assumptions": list(self.prediction.assumptions),
            "notes": list(self.notes),
            "above_eager": list(self.above_eager),
            "eager_bytes": self.eager_bytes,
            "thunder_bytes": self.thunder_bytes,
            "peak": None if self.peak is None else asdict(self.peak),
            "runner_ups": [asdict(m) for m in self.runner_ups],
            "phases": [asdict(p) for p in self.phases],
            "optimality": [asdict(o) for o in self.optimality],
            "tenants": [asdict(t) for t in self.tenants],
            "plan": None if self.plan is None else self.plan.to_json(),
            "categories": list(CATEGORIES),
            "timeline": {
                "op": [e.name for e in timeline],
                "phase": [e.phase for e in timeline],
                "source": [str(p) for p in self._facts.places],
                "device_bytes": list(self.prediction.device_bytes),
                "live_bytes": [e.live_bytes for e in timeline],
                "scratch_bytes": [e.scratch_bytes for e in timeline],
            },
        }

    def dataflow_svg(self, most: int = 200) -> str:
        """A picture of a small program as SVG.

        It has one box for each operation or region in execution order, coloured by live bytes. Each tensor has a
        lane from its birth to its last use.

        Args:
            most: the most operations to draw; for a longer program those around the peak.

        Raises:
            ValueError: `most` below 1.
        """
        return dataflow_svg(self, most)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the report to a file, in the form that its ending names.

        `.html` is one self-contained page. `.txt` holds `str()` with `detail`, and `.json` `to_json()`. `.pickle`
        opens in PyTorch's memory viewer (https://pytorch.org/memory_viz). `.png` and `.svg` are drawn by `plot`,
        and `.flow.svg` by `dataflow_svg`.

        Raises:
            ValueError: another ending.
            ImportError: a picture, without matplotlib.
        """
        path = pathlib.Path(path)
        if path.suffix not in REPORT_ENDINGS:
            raise ValueError(f"cannot save a report as {path.name!r}: the ending is one of {', '.join(REPORT_ENDINGS)}")
        if path.suffix == ".pickle":
            path.write_bytes(pickle.dumps(snapshot(self.prediction), protocol=4))  # the viewer reads no later protocol
            return
        texts: dict[str, Callable[[], str]] = {
            ".html": self.to_page,
            ".txt": lambda: to_text(document(self)) + "\n",
            ".json": lambda: json.dumps(self.to_json(), indent=1) + "\n",
        }
        if path.name.endswith(".flow.svg"):
            texts[".svg"] = self.dataflow_svg
        if path.suffix in texts:
            path.write_text(texts[path.suffix](), encoding="utf-8")
        else:
            self.plot(path)

    def plot(self, path: str | pathlib.Path) -> None:
        """Draw the timeline, and the storages alive at its peak, as a `.png` or `.svg`.

        Raises:
            ValueError: another ending, or nothing runs.
            ImportError: matplotlib is not installed.
        """
        path = pathlib.Path(path)
        if path.suffix not in (".png", ".svg"):
            raise ValueError(f"cannot plot {path.name!r}: the ending is .png or .svg")
        draw(timeline_view(self), path)


def _fold(alike: list[Tenant]) -> Tenant:
    alike = sorted(alike, key=lambda t: (t.born, t.layers, t.names))
    first = alike[0]
    return replace(
        first,
        count=len(alike),
        nbytes=sum(t.nbytes for t in alike),
        share=sum(t.share for t in alike),
        names=tuple(t.names[0] for t in alike[:8]),
        born=min(t.born for t in alike),
        last=max(t.last for t in alike),
        why=first.why if all(t.why == first.why for t in alike) else f"e.g. {first.why}",
        layers=tuple(sorted({n for t in alike for n in t.layers})),
    )
