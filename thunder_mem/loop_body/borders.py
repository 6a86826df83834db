"""All borders that a stretch may have, judged at once.

A stretch is a core with more and more operations above it and below it, so thousands of borders are possible. A matrix
holds a row for every operation and a column for every border: whether the operation is inside. A question about all
borders is then a few logical operations over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thunder_mem.loop_body.leaves import Program

__all__ = ["Borders", "Mask", "borders_between"]

Mask = NDArray[np.bool_]
"""One truth for every border."""


@dataclass(frozen=True)
class Borders:
    """Sets of leaves of a program.

    Attributes:
        program: the flattened trace.
        row_of: the row of each leaf that is in any set.
        inside: whether a leaf is in a set, of shape (leaves + 1, borders); the last row stands for all other leaves.
        reach: how many times each set grew upwards and downwards, of shape (2, borders).
    """

    program: Program
    row_of: Mapping[int, int]
    inside: Mask
    reach: NDArray[np.int64]

    def __len__(self) -> int:
        return self.inside.shape[1]

    def members(self, border: int) -> frozenset[int]:
        """The leaves of one set."""
        return frozenset(index for index, row in self.row_of.items() if self.inside[row, border])

    def only(self, which: Mask) -> Borders:
        """The chosen sets."""
        return replace(self, inside=self.inside[:, which], reach=self.reach[:, which])

    def holds(self, index: int) -> Mask:
        """Whether a leaf is inside."""
        return self.inside[self.row_of.get(index, -1)]

    def makes(self, name: str) -> Mask:
        """Whether a value is computed inside."""
        producer = self.program.producer.get(name)
        return self.inside[-1] if producer is None else self.holds(producer.index)

    def reads(self, name: str) -> Mask:
        """Whether a leaf inside reads a value."""
        return self.either(self.holds(r.index) for r in self.program.consumers.get(name, ()))

    def lets_out(self, name: str) -> Mask:
        """Whether a value is computed inside, and returned or read by a leaf outside."""
        made = self.makes(name)
        if name in self.program.returned:
            return made
        return made & self.either(~self.holds(r.index) for r in self.program.consumers.get(name, ()))

    def exists_whole(self, name: str, at: int) -> Mask:
        """Whether a value is made whole, is read by rows, or waits for others while the stretch runs at leaf `at`."""
        program = self.program
        producer = program.producer.get(name)
        exists = producer is None or producer.index < at
        waits = exists and (name in program.returned or any(r.index > at for r in program.consumers.get(name, ())))
        return np.where(self.makes(name), self.lets_out(name), self.reads(name) | waits)

    def comes_back(self) -> Mask:
        """Whether something outside that is computed from results goes into the set again."""
        reached: dict[str, Mask] = {}
        broken = self.inside[-1]
        for leaf in self.program.leaves[min(self.row_of) : max(self.row_of) + 1]:
            inside = self.holds(leaf.index)
            names = {t.name for t in leaf.inputs}
            late = self.either(reached[name] for name in names & reached.keys())
            broken = broken | (inside & late)
            made = self.either(map(self.makes, names))
            if (found := ~inside & (late | made)).any():
                reached.update((o.name, found) for o in leaf.outputs)
        return broken

    def either(self, masks: Iterable[Mask]) -> Mask:
        """Whether one of the masks holds."""
        found = self.inside[-1]
        for mask in masks:
            found = found | mask
        return found


def borders_between(program: Program, above: Sequence[frozenset[int]], below: Sequence[frozenset[int]]) -> Borders:
    """Each union of a set that grew upwards with one that grew downwards.

    Args:
        program: the flattened trace.
        above, below: sets of leaves, each with those before it.
    """
    leaves = sorted(above[-1] | below[-1])
    ups, downs = (np.array([[i in s for s in sets] for i in leaves], dtype=bool) for sets in (above, below))
    inside = (ups[:, :, None] | downs[:, None, :]).reshape(len(leaves), -1)
    reach = np.indices((len(above), len(below))).reshape(2, -1)
    outside = np.zeros((1, inside.shape[1]), dtype=bool)
    return Borders(program, {index: row for row, index in enumerate(leaves)}, np.concatenate([inside, outside]), reach)
