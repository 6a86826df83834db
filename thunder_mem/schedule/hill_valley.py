"""Hill-valley segments: the best order of a part of a graph, in the form in which parts compose.

A part's order is cut into segments, and each segment runs to its end once begun: it climbs a hill and ends in a
valley. A segment falls if its valley is not above its start, else it rises. All falling segments come first, sorted by
the hill from their start, the smallest first. A rising segment falls in reversed time, so rising segments are sorted
by the hill seen from their end, the largest first. Two parts without constraints between them are merged by sorting.
For two parts in sequence, segments that contradict that order are joined to one.

J. W. H. Liu, "An application of generalized tree pebbling to sparse matrix factorization"
(SIAM J. Algebraic Discrete Methods 8, 1987) does this for trees. H. M. Abdel-Wahab and T. Kameda, "Scheduling to
minimize maximum cumulative cost subject to series-parallel precedence constraints" (Operations Research
26, 1978), C. L. Monma and J. B. Sidney, "Sequencing with series-parallel precedence constraints"
(Mathematics of Operations Research 4, 1979) and E. Kayaaslan, T. Lambert, L. Marchal and B. Ucar,
"Scheduling series-parallel task graphs to minimize peak memory" (Theoretical Computer Science 707, 2018)
do it for series-parallel orders.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Part", "Segment", "Segments"]

# If one list is so many times longer, the shorter one's elements are inserted singly; else both are sorted together.
_FAR_LONGER = 16


class Segment(NamedTuple):
    """Ops that run one after the other.

    Attributes:
        hill: the most bytes alive while they run, less the bytes alive before the first op.
        head: the first op.
        net: bytes alive after the last op, less the bytes alive before the first op.
        tail: the last op.
    """

    hill: int
    head: int
    net: int
    tail: int

    def backwards(self) -> Segment:
        """The same with time reversed."""
        return Segment(self.hill - self.net, self.tail, -self.net, self.head)


class Part(NamedTuple):
    """The order of a part of the graph: falling segments in order, then rising ones, backwards from the end.

    Hills ascend in both lists, and ascend strictly where one segment must wait for another, so sorting never
    breaks a constraint.
    """

    falls: list[Segment]
    rises: list[Segment]


class Segments:
    """Makes and composes parts; a part must not be used again once another part contains it.

    The ops of a segment are a linked list, so composition takes no longer for long segments. Each join of two
    segments leaves one fewer, so n ops are composed in O(n log n) comparisons.
    """

    def __init__(self, ops: int) -> None:
        self._next = [-1] * ops

    def ops(self, segment: Segment) -> Iterator[int]:
        """The ops of a segment, in order."""
        op = segment.head
        while op != segment.tail:
            yield op
            op = self._next[op]
        yield op

    def single(self, op: int, hill: int, net: int) -> Part:
        """One op that needs `hill` bytes to run and leaves `net` more than before."""
        segment = Segment(hill, op, net, op)
        return Part([segment], []) if net <= 0 else Part([], [segment.backwards()])

    def parallel(self, one: Part, other: Part) -> Part:
        """Both parts, in any order among each other."""
        return Part(_merged(one.falls, other.falls), _merged(one.rises, other.rises))

    def series(self, first: Part, then: Part) -> Part:
        """All of `first` before any of `then`."""
        rises, falls = first.rises, then.falls
        risen = fallen = 0
        middle: Segment | None = None
        # No order stops between a rise and a following fall: other ops had better run before or after both.
        while True:
            if middle is None and risen < len(rises) and fallen < len(falls):
                middle = self._joined(rises[risen].backwards(), falls[fallen])
                risen, fallen = risen + 1, fallen + 1
            elif middle is not None and middle.net <= 0 and risen < len(rises):
                middle = self._joined(rises[risen].backwards(), middle)
                risen += 1
            elif middle is not None and middle.net > 0 and fallen < len(falls):
                middle = self._joined(middle, falls[fallen])
                fallen += 1
            else:
                break
        del rises[:risen], falls[:fallen]
        falling = middle if middle is not None and middle.net <= 0 else None
        rising = middle.backwards() if middle is not None and middle.net > 0 else None
        return Part(self._sequence(first.falls, falling, falls, False), self._sequence(then.rises, rising, rises, True))

    def sequence(self, part: Part) -> list[Segment]:
        """The fewest segments, in execution order: each climbs above all falling ones before it, and above
        all rising ones after it."""
        falls, rises = self._climbing(part.falls, False), self._climbing(part.rises, True)
        return [*falls, *(segment.backwards() for segment in reversed(rises))]

    def _climbing(self, segments: list[Segment], backwards: bool) -> list[Segment]:
        climbing: list[Segment] = []
        for segment in segments:
            if climbing and climbing[-1].net + segment.hill <= climbing[-1].hill:
                climbing[-1] = self._joined(climbing[-1], segment, backwards)
            else:
                climbing.append(segment)
        return climbing

    def _joined(self, first: Segment, then: Segment, backwards: bool = False) -> Segment:
        """One segment of two; `backwards` if both are, so that `then` runs first."""
        if backwards:
            self._next[then.head] = first.tail
        else:
            self._next[first.tail] = then.head
        return Segment(max(first.hill, first.net + then.hill), first.head, first.net + then.net, then.tail)

    def _sequence(
        self, first: list[Segment], middle: Segment | None, then: list[Segment], backwards: bool
    ) -> list[Segment]:
        """Falling segments in a row: all of `first`, `middle`, all of `then`; hills ascend afterwards."""
        if middle is None:
            if not first or not then or first[-1].hill < then[0].hill:
                return _concatenated(first, then)
            middle = first.pop()
        while first and first[-1].hill >= middle.hill:
            middle = self._joined(first.pop(), middle, backwards)
        covered = 0
        while covered < len(then) and then[covered].hill <= middle.hill:
            middle = self._joined(middle, then[covered], backwards)
            covered += 1
        del then[:covered]
        first.append(middle)
        return _concatenated(first, then)


def _concatenated(first: list[Segment], then: list[Segment]) -> list[Segment]:
    if len(first) < len(then):
        then[:0] = first
        return then
    first += then
    return first


def _merged(one: list[Segment], other: list[Segment]) -> list[Segment]:
    few, many = (one, other) if len(one) < len(other) else (other, one)
    if len(many) < _FAR_LONGER * len(few):
        many += few
        many.sort()
    else:
        for segment in few:
            insort(many, segment)
    return many
