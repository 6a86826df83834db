"""Facts of a prediction about each operation and each storage: source lines, readers, reasons, categories.

A backward operation has no line of its own in the user's code. It gets the line of the forward operation that it
differentiates, found through the data: the latest forward value among its operands, or the line of the operand that it
computes from.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from thunder_mem.fake_execution.grad_accumulation import ACCUMULATE
from thunder_mem.fake_execution.replay import Event
from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.prediction.predict import Held, Prediction
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
from thunder_mem.trace.origins import layer_numbers

__all__ = ["CATEGORIES", "NO_PLAN", "Facts", "Place"]

_Known = TypeVar("_Known", int, tuple[int, str])

NO_PLAN = "MemEfficient made no plan for this function: this is the memory of what Thunder alone compiled"

# From the bottom of every picture to its top.
CATEGORIES = ("held by the caller", "saved for the backward", "gradients", "working memory", "scratch")


@dataclass(frozen=True, slots=True)
class Place:
    """The source line of an operation or a storage.

    Attributes:
        source: "file:line", or "".
        undoes: the line is that of the forward operation that this one differentiates.
        used_at: for a library's line, the first line outside PyTorch and Thunder that uses the result, or "".
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
        """The text of the line, or "" if the file cannot be read."""
        file, _, line = (self.used_at or self.source).rpartition(":")
        return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


@dataclass(frozen=True)
class Facts:
    """Answers about one prediction, each computed once and in time linear in its size."""

    prediction: Prediction

    @cached_property
    def _named(self) -> dict[str, list[int]]:
        """Tensor name -> all its storages, by birth: each microbatch of a step uses the name anew."""
        found: dict[str, list[int]] = {}
        for i, storage in enumerate(self.prediction.storages):
            for name in dict.fromkeys((storage.name, *storage.aliases)):
                found.setdefault(name, []).append(i)
        return found

    def storage_of(self, name: str, event: Event) -> int | None:
        """The index in `prediction.storages` of a tensor's name while `event` runs; None if it has none."""
        storages = self.prediction.storages
        alive = (i for i in reversed(self._named.get(name, [])) if storages[i].born <= event.index <= storages[i].last)
        return next(alive, None)

    def _storages_of(self, names: Sequence[str], event: Event) -> dict[str, int]:
        found = {name: self.storage_of(name, event) for name in names}
        return {name: i for name, i in found.items() if i is not None}

    @cached_property
    def reads(self) -> tuple[dict[str, int], ...]:
        """Per operation of the timeline, its operands' names and their storages there."""
        return tuple(self._storages_of(operands(event), event) for event in self.prediction.timeline)

    @cached_property
    def results(self) -> tuple[dict[str, int], ...]:
        """Per operation of the timeline, its outputs' names and their storages there."""
        return tuple(self._storages_of(event.outputs, event) for event in self.prediction.timeline)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage, the timeline's positions of the operations that take it as an operand, in order."""
        readers: list[list[int]] = [[] for _ in self.prediction.storages]
        for position, read in enumerate(self.reads):
            for storage in dict.fromkeys(read.values()):
                readers[storage].append(position)
        return tuple(map(tuple, readers))

    @cached_property
    def _index(self) -> dict[int, int]:
        return {id(storage): i for i, storage in enumerate(self.prediction.storages)}

    @cached_property
    def position(self) -> dict[int, int]:
        """Event index -> position in the timeline (they differ in a single phase of a prediction)."""
        return {event.index: i for i, event in enumerate(self.prediction.timeline)}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Per operation of the timeline, its place in the source."""
        storages, lines = self.prediction.storages, [sources(e) for e in self.prediction.timeline]
        used_at: list[str] = [""] * len(lines)
        first_use: dict[int, str] = {}
        for i in range(len(lines) - 1, -1, -1):
            event = self.prediction.timeline[i]
            own = next((s for s in lines[i] if not is_library(s)), "")
            made = [first_use.get(storage, "") for storage in self.results[i].values()]
            used_at[i] = own or next(filter(None, made), "")
            if used_at[i] and event.phase == "forward":
                for name, storage in self.reads[i].items():
                    line = reading_line(event, name) if is_region(event) else ""
                    first_use[storage] = line or used_at[i]
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
                    place = replace(place, used_at=self._undone(i, place_of).used_at)
            elif event.phase == "backward":
                best = self._undone(i, place_of)
                place = Place(best.source, bool(best.source), best.used_at)
            else:
                place = Place()
            found.append(place)
            if not place.source:
                continue
            rank = i + len(lines) if event.phase == "forward" else i
            for storage in self.results[i].values():
                if storages[storage].born == event.index:
                    place_of.setdefault(storage, (rank, place))
        return tuple(found)

    def _undone(self, position: int, place_of: Mapping[int, tuple[int, Place]]) -> Place:
        """The place of the latest forward value that a backward operation takes, see the top of the file."""
        inputs = [place_of[s] for s in self.reads[position].values() if s in place_of]
        return max(inputs, key=lambda known: known[0], default=(0, Place()))[1]

    def place_of(self, storage: Held) -> Place:
        """The place of a computed storage; inside a fused region, its own line."""
        at = self.position[storage.born]
        event, place = self.prediction.timeline[at], self.places[at]
        line = making_line(event, storage.name) if is_region(event) else ""
        return replace(place, source=line, used_at="") if line else place

    @cached_property
    def layer_of(self) -> dict[int, int]:
        """Storage -> its layer's number, from the names of parameters; storages without a layer are missing."""
        held = {i: s.name for i, s in enumerate(self.prediction.storages) if s.born < 0}
        by_name = layer_numbers(held.values(), from_zero=True)
        return self.spread({i: by_name[name] for i, name in held.items() if name in by_name})

    def spread(self, given: Mapping[int, _Known]) -> dict[int, _Known]:
        """What is known of storages, and the same of those that operations make from them.

        A result gets the value of the given storages that its operation reads. Without any, it gets the highest of its
        operands' values in the forward, and the lowest in the backward.
        """
        found = dict(given)
        for event, reads, results in zip(self.prediction.timeline, self.reads, self.results, strict=True):
            read = [s for s in reads.values() if s in found]
            values = [found[s] for s in read if s in given] or [found[s] for s in read]
            if not values:
                continue
            chosen = min(values) if event.phase == "backward" else max(values)
            for s in results.values():
                if self.prediction.storages[s].born == event.index:
                    found.setdefault(s, chosen)
        return found

    def layers_of_storage(self, storage: Held) -> tuple[int, ...]:
        """The number of its layer, or nothing."""
        layer = self.layer_of.get(self._index[id(storage)])
        return () if layer is None else (layer,)

    @cached_property
    def _phases(self) -> dict[int, str]:
        return {event.index: event.phase for event in self.prediction.timeline}

    def category(self, storage: Held) -> str:
        """One of `CATEGORIES`, of which no storage is scratch."""
        if storage.born < 0:
            return CATEGORIES[0]
        if storage.kind == "gradient":
            return CATEGORIES[2]
        if storage.kind == "optimizer state":
            return CATEGORIES[0]
        born, last = self._phases.get(storage.born), self._phases.get(storage.last)
        if self._index[id(storage)] in self._made_for_the_caller:
            return CATEGORIES[2]
        if born == "forward" and last == "backward":
            return CATEGORIES[1]
        if born in ("backward", ACCUMULATE) and storage.kind == "computed" and self._stays(storage):
            return CATEGORIES[2]
        return CATEGORIES[3]

    @cached_property
    def _made_for_the_caller(self) -> frozenset[int]:
        """Storages of the forward that the backward returns and that stay: gradients of a chunked head."""
        storages, found = self.prediction.storages, set()
        for event, results in zip(self.prediction.timeline, self.results, strict=True):
            if event.phase == "backward":
                found |= {s for s in results.values() if self._phases.get(storages[s].born) == "forward"}
        return frozenset(s for s in found if self._stays(storages[s]) and storages[s].kind == "computed")

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Per category, the device's bytes at each position of the timeline; they sum to `device_bytes`."""
        device_type = self.prediction.device_type
        count = len(self.prediction.timeline)
        steps = [[0] * (count + 1) for _ in CATEGORIES]
        for storage in self.prediction.storages:
            first, end = self.span(storage)
            if first <= end:
                layer = steps[CATEGORIES.index(self.category(storage))]
                layer[first] += self.device_bytes(storage)
                layer[end + 1] -= self.device_bytes(storage)
        layers = [tuple(accumulate(layer[:count])) for layer in steps[:-1]]
        scratch = tuple(block_bytes(e.scratch_bytes, device_type) for e in self.prediction.timeline)
        return (*layers, scratch)

    def device_bytes(self, storage: Held) -> int:
        """The device bytes of a storage."""
        return block_bytes(storage.nbytes, self.prediction.device_type)

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
        readers = self.readers[self._index[id(storage)]]
        readers = tuple(r for r in readers if timeline[r].index > storage.born or storage.born < 0)
        later = [r for r in readers if r > at]
        if storage.born < 0:
            return f"{_HELD.get(storage.kind, storage.kind)}: the caller holds it throughout"
        if storage.kind == "tangent":
            here = ", an operand here" if at in readers else ""
            return f"the gradient of an output{here}" + (f"; next used by {label(timeline[later[0]])}" if later else "")
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
        if not readers and self._is_added(storage):
            return f"a gradient, until {label(timeline[self.position[storage.last]])} has added it to the one before"
        if not readers:
            return "no operation reads it: it is returned, or code outside of the trace holds it"
        return f"nobody reads it after {label(timeline[readers[-1]])}, yet it is released only later"

    def _is_added(self, storage: Held) -> bool:
        """Whether autograd, outside the trace, adds this result of the trace to a gradient at the end."""
        events = [
            self.prediction.timeline[p] for i in (storage.born, storage.last) if (p := self.position.get(i)) is not None
        ]
        if len(events) < 2 or events[0].bsym is None or events[1].bsym is not None:
            return False
        return events[1].phase in ("backward", ACCUMULATE) and "add" in events[1].name

    def _stays(self, storage: Held) -> bool:
        return storage.last >= self.prediction.timeline[-1].index


_HELD = {
    "argument": "an argument",
    "parameter": "a parameter",
    "optimizer state": "the optimizer's state",
    "gradient": "a gradient from before",
}


def label(event: Event) -> str:
    return f"{event.name} #{event.index}"
