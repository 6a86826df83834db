"""A simulation of PyTorch's CUDA caching allocator: rounding and fragmentation of a prediction.

The rules and sizes are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings (no expandable segments,
no limit on splitting), on one stream. Rounding to 512 bytes is exact. Fragmentation is an estimate: it depends on
addresses, on earlier work, and on free memory, because the allocator returns cached segments before it gives up.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace

from thunder_mem.memory.device_bytes import rounded
from thunder_mem.prediction.predict import Prediction

__all__ = ["Allocation", "CachingAllocator", "allocate"]

_MIB = 2**20
_UNIT = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_UNIT = 2 * _MIB


@dataclass(frozen=True)
class Allocation:
    """The allocator's figures for a prediction, in bytes.

    Attributes:
        allocated_peak_bytes: the peak with every block rounded up to 512 bytes, including scratch and libraries.
            `torch.cuda.max_memory_allocated` reports this, plus remainders that were not split off (at most
            1 MiB a block, and only for some).
        reserved_peak_bytes: the peak of the segments taken from the device, an estimate of
            `torch.cuda.max_memory_reserved`.
        library_bytes: the libraries' share of both: `Prediction.library`.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    library_bytes: int = 0

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved beyond what is allocated: cached, split or padded. An estimate."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


@dataclass(eq=False)
class _Chunk:
    """A piece of a segment, free or taken."""

    address: int
    nbytes: int
    small: bool
    free: bool = True
    before: _Chunk | None = None
    after: _Chunk | None = None


@dataclass
class CachingAllocator:
    """Best fit over cached segments, which split and merge.

    Attributes:
        limit_bytes: the device's memory. Before exceeding it, the allocator returns wholly free segments, as
            PyTorch does. If that is not enough, it exceeds the limit, and the peak shows it.
        allocated_bytes, reserved_bytes: at present.
        allocated_peak_bytes, reserved_peak_bytes: so far.

    Example:
        >>> allocator = CachingAllocator()
        >>> chunk = allocator.take(1)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (512, 2097152)
    """

    limit_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _chunks: dict[int, _Chunk] = field(default_factory=dict)
    _next_address: int = 0

    def take(self, nbytes: int) -> _Chunk | None:
        """Allocate; None for nothing."""
        if nbytes == 0:
            return None
        nbytes = rounded(nbytes)
        small = nbytes <= _SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (nbytes, 0))
        if at < len(pool):
            chunk = self._chunks[pool.pop(at)[1]]
        else:
            chunk = self._segment(nbytes, small)
        rest_bytes = chunk.nbytes - nbytes
        if rest_bytes >= _UNIT if small else rest_bytes > _SMALL:
            rest = _Chunk(chunk.address + nbytes, rest_bytes, small, True, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.nbytes = rest, nbytes
            self._chunks[rest.address] = rest
            bisect.insort(pool, (rest.nbytes, rest.address))
        chunk.free = False
        self.allocated_bytes += chunk.nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return chunk

    def give_back(self, chunk: _Chunk | None) -> None:
        """Free what `take` returned."""
        if chunk is None:
            return
        self.allocated_bytes -= chunk.nbytes
        chunk.free = True
        for other in (chunk.before, chunk.after):
            if other is not None and other.free:
                self._free[other.small].remove((other.nbytes, other.address))
                first, second = (other, chunk) if other.address < chunk.address else (chunk, other)
                first.nbytes += second.nbytes
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._chunks[second.address]
                chunk = first
        bisect.insort(self._free[chunk.small], (chunk.nbytes, chunk.address))

    def _segment(self, nbytes: int, small: bool) -> _Chunk:
        if small:
            size = _SMALL_SEGMENT
        elif nbytes < _OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = -(-nbytes // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self._release()
        self._next_address += size + _SEGMENT_UNIT  # a gap, so that pieces of different segments never merge
        chunk = _Chunk(self._next_address - size - _SEGMENT_UNIT, size, small)
        self._chunks[chunk.address] = chunk
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return chunk

    def _release(self) -> None:
        for pool in self._free.values():
            for nbytes, address in tuple(pool):
                chunk = self._chunks[address]
                if chunk.before is None and chunk.after is None:
                    pool.remove((nbytes, address))
                    del self._chunks[address]
                    self.reserved_bytes -= nbytes


def allocate(prediction: Prediction, limit_bytes: int | None = None) -> Allocation:
    """Run a prediction through the simulated allocator, from an empty device of `limit_bytes`.

    The exact rounded peak comes from the blocks alone, the reserved peak from a run of the allocator.
    """
    allocator = CachingAllocator(limit_bytes)
    born, dies, before = prediction.lives()
    taken = {i: allocator.take(prediction.storages[i].nbytes) for i in born.get(before, ())}
    for kept in prediction.library:  # since the first step, when the device was almost empty
        allocator.take(kept.nbytes)
    for event in prediction.timeline:
        for i in born.get(event.index, ()):
            taken[i] = allocator.take(prediction.storages[i].nbytes)
        allocator.give_back(allocator.take(event.scratch_bytes))
        for i in dies.get(event.index, ()):
            allocator.give_back(taken.pop(i))
    library_bytes = sum(rounded(kept.nbytes) for kept in prediction.library)
    allocated_peak_bytes = replace(prediction, device_type="cuda").peak_bytes + library_bytes
    reserved_peak_bytes = max(allocator.reserved_peak_bytes, allocated_peak_bytes)
    return Allocation(allocated_peak_bytes, reserved_peak_bytes, library_bytes)
