"""What a prediction knows about each operation and each storage: source lines, readers, reasons, categories.

A backward operation has no line of its own in the user's code. It gets the line of the forward
operation that it undoes, found through the data: the latest forward value among its operands, or
what the operand that it did compute from was undoing.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_mem.accumulate import ACCUMULATE
from thunder_mem.predict import Held, Prediction
from thunder_mem.replay import Event
from thunder_mem.report.layers import layers_of
from thunder_mem.report.lines import (
    gradient_inside,
    is_library,
    is_region,
    making_line,
    operands,
    reading_line,
    shorten,
    sources,
)

__all__ = ["CATEGORIES", "Facts", "Place"]

# From the bottom of every picture to its top.
CATEGORIES = ("held by the caller", "saved for the backward", "gradients", "working memory")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the source something comes from.

    Attributes:
        source: "file:line", or "".
        undoes: the line is that of the forward operation that this one differentiates.
        used_at: where the line is a library's, the first line outside of PyTorch and Thunder
            that uses the result, or "".
    """

    source: str = ""
    undoes: bool = False
    used_at: str = ""

    def __str__(self) -> str:
        if not self.source:
            return ""
        text = f"gradient of {shorten(self.source)}" if self.undoes else shorten(self.source)
        return f"{text}, used at {shorten(self.used_at)}" if self.used_at else text

    @property
    def code(self) -> str:
        """The text of the line, or "" where the file cannot be read."""
        file, _, line = (self.used_at or self.source).rpartition(":")
        return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


@dataclass(frozen=True)
class Facts:
    """Answers about one prediction, each computed once and in time linear in its size."""

    prediction: Prediction

    @cached_property
    def storage_of(self) -> dict[str, int]:
        """Tensor name -> index of its storage among `prediction.storages`; the first one if a name recurs."""
        found: dict[str, int] = {}
        for i, storage in enumerate(self.prediction.storages):
            for name in (storage.name, *storage.aliases):
                found.setdefault(name, i)
        return found

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage, the timeline's positions of the operations that take it as an operand, in order."""
        readers: list[list[int]] = [[] for _ in self.prediction.storages]
        for position, event in enumerate(self.prediction.timeline):
            seen = dict.fromkeys(self.storage_of[n] for n in operands(event) if n in self.storage_of)
            for storage in seen:
                readers[storage].append(position)
        return tuple(map(tuple, readers))

    @cached_property
    def position(self) -> dict[int, int]:
        """Event index -> position in the timeline (they differ in a single phase of a prediction)."""
        return {event.index: i for i, event in enumerate(self.prediction.timeline)}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Per operation of the timeline, where it comes from."""
        storages, lines = self.prediction.storages, [sources(e) for e in self.prediction.timeline]
        used_at: list[str] = [""] * len(lines)
        first_use: dict[int, str] = {}
        for i in range(len(lines) - 1, -1, -1):
            event = self.prediction.timeline[i]
            own = next((s for s in lines[i] if not is_library(s)), "")
            made = [first_use.get(self.storage_of.get(n, -1), "") for n in event.outputs]
            used_at[i] = own or next(filter(None, made), "")
            if used_at[i] and event.phase == "forward":
                for name in operands(event):
                    if name in self.storage_of:
                        line = reading_line(event, name) if is_region(event) else ""
                        first_use[self.storage_of[name]] = line or used_at[i]
        found: list[Place] = []
        place_of: dict[int, tuple[int, Place]] = {}  # storage -> (whether it is a forward value and when, place)
        for i, event in enumerate(self.prediction.timeline):
            if lines[i]:
                own = next((s for s in lines[i] if not is_library(s)), lines[i][0])
                if is_region(event):
                    own = next(filter(None, (making_line(event, n) for n in event.outputs)), own)
                undoes = event.phase == "backward" and gradient_inside(event)
                place = Place(own, undoes, "" if own == used_at[i] or not is_library(own) else used_at[i])
                if event.phase == "backward" and is_library(own) and not place.used_at:
                    place = replace(place, used_at=self._undone(event, place_of).used_at)
            elif event.phase == "backward":
                best = self._undone(event, place_of)
                place = Place(best.source, bool(best.source), best.used_at)
            else:
                place = Place()
            found.append(place)
            if not place.source:
                continue
            rank = i + len(lines) if event.phase == "forward" else i
            for name in event.outputs:
                storage = self.storage_of.get(name)
                if storage is not None and storages[storage].born == event.index:
                    place_of.setdefault(storage, (rank, place))
        return tuple(found)

    def _undone(self, event: Event, place_of: Mapping[int, tuple[int, Place]]) -> Place:
        """Where the latest forward value comes from that a backward operation takes, see the top of the file."""
        inputs = [place_of[s] for n in operands(event) if (s := self.storage_of.get(n, -1)) in place_of]
        return max(inputs, key=lambda known: known[0], default=(0, Place()))[1]

    def place_of(self, storage: Held) -> Place:
        """Where a storage that an operation of the timeline made comes from; inside a fused region, its own line."""
        at = self.position[storage.born]
        event, place = self.prediction.timeline[at], self.places[at]
        line = making_line(event, storage.name) if is_region(event) else ""
        return replace(place, source=line, used_at="") if line else place

    @cached_property
    def layer_of(self) -> dict[int, int]:
        """Storage -> number of the model's layer that it belongs to; those of no layer are missing."""
        return layers_of(self.prediction, [operands(e) for e in self.prediction.timeline], self.storage_of)

    def layers_of_storage(self, storage: Held) -> tuple[int, ...]:
        """The number of its layer, or nothing."""
        layer = self.layer_of.get(self.storage_of.get(storage.name, -1))
        return () if layer is None else (layer,)

    @cached_property
    def _phases(self) -> dict[int, str]:
        return {event.index: event.phase for event in self.prediction.timeline}

    def category(self, storage: Held) -> str:
        """One of `CATEGORIES`."""
        if storage.born < 0:
            return CATEGORIES[0]
        if storage.kind == "gradient":
            return CATEGORIES[2]
        if storage.kind == "optimizer state":
            return CATEGORIES[0]
        born, last = self._phases.get(storage.born), self._phases.get(storage.last)
        if born == "forward" and last == "backward":
            return CATEGORIES[1]
        if born in ("backward", ACCUMULATE) and storage.kind == "computed" and self._stays(storage):
            return CATEGORIES[2]
        return CATEGORIES[3]

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Per category, the live bytes at each position of the timeline; they sum to `live_bytes`."""
        count = len(self.prediction.timeline)
        steps = [[0] * (count + 1) for _ in CATEGORIES]
        for storage in self.prediction.storages:
            first, end = self.span(storage)
            if first <= end:
                layer = steps[CATEGORIES.index(self.category(storage))]
                layer[first] += storage.nbytes
                layer[end + 1] -= storage.nbytes
        layers = []
        for layer in steps:
            total, live = 0, []
            for step in layer[:count]:
                total += step
                live.append(total)
            layers.append(tuple(live))
        return tuple(layers)

    def span(self, storage: Held) -> tuple[int, int]:
        """First and last position in the timeline at which a storage is alive; (0, -1) if at none."""
        timeline = self.prediction.timeline
        if not timeline or storage.last < timeline[0].index or storage.born > timeline[-1].index:
            return 0, -1
        first = self.position[max(storage.born, timeline[0].index)]
        return first, self.position[min(storage.last, timeline[-1].index)]

    def why(self, storage: Held, at: int) -> str:
        """Why a storage is alive at a position of the timeline, in words."""
        timeline = self.prediction.timeline
        event = timeline[at]
        readers = self.readers[self.storage_of[storage.name]] if storage.name in self.storage_of else ()
        readers = tuple(r for r in readers if timeline[r].index > storage.born or storage.born < 0)
        later = [r for r in readers if r > at]
        if storage.born < 0:
            kind = {"argument": "an argument"}.get(storage.kind, f"of kind {storage.kind}")
            return f"{kind}: the caller holds it throughout"
        if storage.born == event.index:
            use = f"; next used by {label(timeline[later[0]])}" if later else ""
            return f"made here{use}"
        if at in readers:
            return "an operand here" + (
                f", and of {label(timeline[later[-1]])} later" if later else ", for the last time"
            )
        if later:
            if self._phases.get(storage.born) == "forward" and timeline[later[-1]].phase == "backward":
                return f"saved for the backward: {label(timeline[later[0]])} needs it"
            return f"waits for {label(timeline[later[0]])}"
        if self._stays(storage):
            if self.category(storage) == CATEGORIES[2]:
                return "a gradient, handed to the caller at the end"
            return "nobody reads it any more, but it stays to the end: it is returned, or the step keeps it"
        if storage.kind == "tangent":
            return "the gradient of an output"
        if not readers:
            return "no operation reads it: it is returned, or code outside of the trace holds it"
        return f"nobody reads it after {label(timeline[readers[-1]])}, yet it is released only later"

    def _stays(self, storage: Held) -> bool:
        return storage.last >= self.prediction.timeline[-1].index


def label(event: Event) -> str:
    return f"{event.name} #{event.index}"
