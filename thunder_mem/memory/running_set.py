"""Live bytes as ops run one after the other, in either direction of time.

Every sort and every bound works on `Liveness`: the `Graph` reduced to bytes per op and to the storages that can die.
The live bytes between two ops depend only on the set of ops that have run, never on their order. Reversed time gives
a problem of the same form: a storage appears with its last user and vanishes with its allocator. `RunningSet` runs ops
in either direction, so each greedy rule is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thunder_mem.memory.graph import Graph

__all__ = ["Liveness", "RunningSet", "footprint_bytes", "liveness", "profile"]


@dataclass(frozen=True, eq=False)
class Liveness:
    """The facts of a graph that determine the live bytes of an order.

    Attributes:
        start_bytes: alive before the first op: every storage that no op allocates.
        end_bytes: alive after the last op: inputs that stay, held storages and outputs.
        allocated_bytes: per op, the bytes that it allocates.
        scratch_bytes: per op.
        mortal: per op, the storages it touches that die with their last user.
        users: per storage, the ops that touch it if it is mortal, else ().
        nbytes: per storage.
        predecessors, successors, allocators: as in the graph.
    """

    start_bytes: int
    end_bytes: int
    allocated_bytes: tuple[int, ...]
    scratch_bytes: tuple[int, ...]
    mortal: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    allocators: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.allocated_bytes)


def liveness(graph: Graph) -> Liveness:
    """Reduce a graph to its bytes; time and space linear in its size."""
    nbytes = tuple(s.nbytes for s in graph.storages)
    allocator = graph.allocator
    users: list[tuple[int, ...]] = [()] * len(nbytes)
    mortal: list[list[int]] = [[] for _ in graph.ops]
    end_bytes = 0
    for s, ops in enumerate(graph.users):
        if graph.storages[s].held or s in graph.outputs or not ops:
            end_bytes += nbytes[s]
        elif nbytes[s]:
            users[s] = ops
            for op in ops:
                mortal[op].append(s)
    return Liveness(
        start_bytes=sum(size for s, size in enumerate(nbytes) if allocator[s] is None),
        end_bytes=end_bytes,
        allocated_bytes=tuple(sum(nbytes[s] for s in op.allocates) for op in graph.ops),
        scratch_bytes=tuple(op.scratch_bytes for op in graph.ops),
        mortal=tuple(map(tuple, mortal)),
        users=tuple(users),
        nbytes=nbytes,
        predecessors=graph.predecessors,
        successors=graph.successors,
        allocators=allocator,
    )


def profile(live: Liveness, order: Sequence[int]) -> list[int]:
    """Live bytes while each step of a legal order runs, scratch included."""
    left = [len(ops) for ops in live.users]
    allocated, scratch, mortal, nbytes = live.allocated_bytes, live.scratch_bytes, live.mortal, live.nbytes
    now = live.start_bytes
    steps = []
    for op in order:
        now += allocated[op]
        steps.append(now + scratch[op])
        for s in mortal[op]:
            left[s] -= 1
            if not left[s]:
                now -= nbytes[s]
    return steps


def footprint_bytes(live: Liveness) -> int:
    """The cheapest lower bound on every order's peak, in linear time.

    It is the maximum of three figures. First, any one op with its inputs, outputs and scratch, and all storages
    that stay from the start. Second, the bytes alive at the start plus the smallest op that can run first. Third,
    the bytes alive at the end plus the smallest op that can run last.
    """
    scratch, nbytes = live.scratch_bytes, live.nbytes
    stays = live.start_bytes - sum(
        nbytes[s] for s, users in enumerate(live.users) if users and live.allocators[s] is None
    )
    inputs = [sum(nbytes[s] for s in storages) for storages in live.mortal]
    own = [sum(nbytes[s] for s in live.mortal[op] if live.allocators[s] == op) for op in range(len(live))]
    any_op = (stays + live.allocated_bytes[op] + scratch[op] + inputs[op] - own[op] for op in range(len(live)))
    first = (live.allocated_bytes[op] + scratch[op] for op, before in enumerate(live.predecessors) if not before)
    last = (inputs[op] + scratch[op] for op, after in enumerate(live.successors) if not after)
    return max(live.start_bytes + min(first, default=0), live.end_bytes + min(last, default=0), *any_op, 0)


class RunningSet:
    """The ops that have run, and the effect of each further op on the live bytes.

    Running `op` needs `now_bytes + appears[op] + scratch_bytes[op]` and leaves
    `now_bytes + appears[op] - vanishes[op]`. With more ops run, `appears` only falls and `vanishes`
    only grows: an op whose net is not positive stays so.
    """

    def __init__(self, live: Liveness, reverse: bool = False) -> None:
        self.reverse = reverse
        self.now_bytes = live.end_bytes if reverse else live.start_bytes
        self.scratch = live.scratch_bytes
        self._live = live
        before, self._after = live.predecessors, live.successors
        if reverse:
            before, self._after = self._after, before
        self.waits = [len(ops) for ops in before]
        self.done = [False] * len(live)
        if reverse:
            self.vanishes = list(live.allocated_bytes)
            self.appears = [sum(live.nbytes[s] for s in storages) for storages in live.mortal]
            # The op that made each storage appear, or -1.
            self._seen = [-1] * len(live.nbytes)
        else:
            self.appears = list(live.allocated_bytes)
            self.vanishes = [0] * len(live)
            self._left = [len(ops) for ops in live.users]
            # The sum of the indices of the remaining users: the last user's index once one remains.
            self._left_sum = [sum(ops) for ops in live.users]
            for s, ops in enumerate(live.users):
                if len(ops) == 1:
                    self.vanishes[ops[0]] += live.nbytes[s]

    def ready(self) -> list[int]:
        """The ops that could run now, by index; linear time, meant for the start."""
        return [op for op, waits in enumerate(self.waits) if not waits and not self.done[op]]

    def unlocks(self, op: int) -> list[int]:
        """The ops that wait for `op` alone."""
        return [other for other in self._after[op] if self.waits[other] == 1]

    def run(self, op: int) -> list[int]:
        """Run a ready op; return the ready ops that are new or whose net changed (maybe twice)."""
        self.done[op] = True
        self.now_bytes += self.appears[op] - self.vanishes[op]
        waits, done, nbytes = self.waits, self.done, self._live.nbytes
        touched = []
        for other in self._after[op]:
            waits[other] -= 1
            if not waits[other]:
                touched.append(other)
        if self.reverse:
            seen, appears, users = self._seen, self.appears, self._live.users
            for s in self._live.mortal[op]:
                if seen[s] < 0:
                    seen[s] = op
                    for user in users[s]:
                        appears[user] -= nbytes[s]
                        if not waits[user] and not done[user]:
                            touched.append(user)
        else:
            left, left_sum, vanishes = self._left, self._left_sum, self.vanishes
            for s in self._live.mortal[op]:
                left[s] -= 1
                left_sum[s] -= op
                if left[s] == 1:
                    user = left_sum[s]
                    vanishes[user] += nbytes[s]
                    if not waits[user]:
                        touched.append(user)
        return touched

    def undo(self, op: int) -> None:
        """Take back the last `run`."""
        self.done[op] = False
        for other in self._after[op]:
            self.waits[other] += 1
        nbytes = self._live.nbytes
        if self.reverse:
            for s in self._live.mortal[op]:
                if self._seen[s] == op:
                    self._seen[s] = -1
                    for user in self._live.users[s]:
                        self.appears[user] += nbytes[s]
        else:
            for s in self._live.mortal[op]:
                if self._left[s] == 1:
                    self.vanishes[self._left_sum[s]] -= nbytes[s]
                self._left[s] += 1
                self._left_sum[s] += op
        self.now_bytes -= self.appears[op] - self.vanishes[op]
