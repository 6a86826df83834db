"""A prediction in the format of PyTorch's memory viewer (https://pytorch.org/memory_viz).

The format is that of `torch.cuda.memory._snapshot`: a pickled dict of the trace of allocations and of the final
segments. The caller's storages are allocated before the first operation, and scratch while its operation runs. So the
highest point of the viewer's timeline is the prediction's total peak. Addresses are made up, by first fit.
"""

from __future__ import annotations

from bisect import bisect
from typing import Any

from thunder_mem.memory.device_bytes import rounded
from thunder_mem.prediction.predict import Prediction
from thunder_mem.report.facts import CATEGORIES, Facts, Place

__all__ = ["snapshot"]

# The viewer's own names; it fails on a file with categories but without "unknown".
_VIEWER_CATEGORY = dict(zip(CATEGORIES[:-1], ("parameter", "activation", "gradient", "unknown"), strict=True))
_SCRATCH_CATEGORY = "temporary"


class _Addresses:
    """First fit in one endless segment; blocks start at multiples of 512 bytes."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = base
        self._free: list[tuple[int, int]] = []  # (address, bytes), by address

    def take(self, nbytes: int) -> int:
        needed = rounded(nbytes)
        for i, (address, room) in enumerate(self._free):
            if room >= needed:
                if room == needed:
                    del self._free[i]
                else:
                    self._free[i] = (address + needed, room - needed)
                return address
        address = self.end
        self.end += needed
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        start, end = address, address + rounded(nbytes)
        i = bisect(self._free, (start, 0))
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end - start))


def snapshot(prediction: Prediction) -> dict[str, Any]:
    """The prediction as `torch.cuda.memory._snapshot` would have recorded it: segments and device traces."""
    facts = Facts(prediction)
    timeline = prediction.timeline
    starting: list[list[int]] = [[] for _ in timeline]
    ending: list[list[int]] = [[] for _ in timeline]
    before: list[int] = []
    for i, storage in enumerate(prediction.storages):
        first, last = facts.span(storage)
        if not storage.nbytes or (timeline and first > last):
            continue
        if storage.born < 0 or not timeline:
            before.append(i)
        else:
            starting[first].append(i)
        if timeline and storage.last < timeline[-1].index:
            ending[last].append(i)

    space = _Addresses(0x7F00_0000_0000)
    events: list[dict[str, Any]] = []
    address_of: dict[int, tuple[int, list[dict[str, Any]]]] = {}

    def record(action: str, address: int, nbytes: int, time: int, frames: list[dict[str, Any]], category: str) -> None:
        events.append(
            {
                "action": action,
                "addr": address,
                "size": nbytes,
                "stream": 0,
                "time_us": time,
                "frames": frames,
                "category": category,
            }
        )

    def free(address: int, nbytes: int, time: int, frames: list[dict[str, Any]], category: str) -> None:
        record("free_requested", address, nbytes, time, frames, category)
        record("free_completed", address, nbytes, time, frames, category)
        space.give_back(address, nbytes)

    def allocate(i: int, time: int, frames: list[dict[str, Any]]) -> None:
        storage = prediction.storages[i]
        shape = "×".join(map(str, storage.shape))
        dtype = str(storage.dtype).removeprefix("torch.")
        named = [_frame(f"{storage.name}: {dtype} {shape}".strip(), Place()), *frames]
        address_of[i] = (space.take(storage.nbytes), named)
        record("alloc", address_of[i][0], storage.nbytes, time, named, _VIEWER_CATEGORY[facts.category(storage)])

    for i in before:
        allocate(i, 0, [_frame("held by the caller", Place())])
    for position, event in enumerate(timeline):
        time = position + 1
        frames = [_frame(f"{event.phase}: {event.name} #{event.index}", facts.places[position])]
        for i in starting[position]:
            allocate(i, time, frames)
        if event.scratch_bytes:
            named = [_frame("scratch", Place()), *frames]
            address = space.take(event.scratch_bytes)
            record("alloc", address, event.scratch_bytes, time, named, _SCRATCH_CATEGORY)
            free(address, event.scratch_bytes, time, named, _SCRATCH_CATEGORY)
        for i in ending[position]:
            storage = prediction.storages[i]
            address, named = address_of.pop(i)
            free(address, storage.nbytes, time, named, _VIEWER_CATEGORY[facts.category(storage)])
    if events and all(e["category"] != "unknown" for e in events):
        events[0]["category"] = "unknown"
    left = sorted(
        ((address, prediction.storages[i].nbytes, frames) for i, (address, frames) in address_of.items()),
        key=lambda b: b[0],
    )
    return {"segments": _segments(space, left), "device_traces": [events]}


def _segments(space: _Addresses, left: list[tuple[int, int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    if space.end == space.base:
        return []
    blocks: list[dict[str, Any]] = []
    at = space.base

    def gap(until: int) -> None:
        if until > at:
            blocks.append({"address": at, "size": until - at, "requested_size": 0, "state": "inactive", "frames": []})

    for address, nbytes, frames in left:
        gap(address)
        padded = rounded(nbytes)
        block = {"address": address, "size": padded, "requested_size": nbytes, "state": "active_allocated"}
        blocks.append({**block, "frames": frames})
        at = address + padded
    gap(space.end)
    held_bytes = sum(rounded(nbytes) for _, nbytes, _ in left)
    return [
        {
            "device": 0,
            "address": space.base,
            "total_size": space.end - space.base,
            "allocated_size": held_bytes,
            "active_size": held_bytes,
            "requested_size": sum(nbytes for _, nbytes, _ in left),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
    ]


def _frame(name: str, place: Place) -> dict[str, Any]:
    """A frame of the viewer's stack; an operation without a source line still has its name."""
    file, colon, line = place.source.rpartition(":")
    file, line = (file, line) if colon else (line, "")  # a module's name is no file
    name = f"{name} (gradient of this line)" if place.undoes else name
    return {"filename": file or "trace", "line": int(line) if line.isdigit() else 0, "name": name}
