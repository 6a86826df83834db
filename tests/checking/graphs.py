"""Random graphs of the shapes that traces have, and a brute-force oracle for tiny ones.

Each generator takes a seed and sizes and returns a `Graph` whose source order is legal but not
good. `graphs()` is the hypothesis strategy over all of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

from hypothesis import strategies as st

from thunder_mem.memory.graph import Graph, Op, Storage, make_graph

SIZES = (1, 2, 2, 4, 4, 4, 8, 8, 16)


class Builder:
    """Collects ops and storages; every method returns indices."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.edges: list[tuple[int, int]] = []

    def storage(self, nbytes: int, held: bool = False) -> int:
        self.storages.append(Storage(len(self.storages), nbytes, f"t{len(self.storages)}", held=held))
        return len(self.storages) - 1

    def op(self, reads=(), nbytes=None, writes=(), scratch: int = 0, backward: bool = False, name: str = "op"):
        """Add an op; `nbytes` is the size of its new storage, a tuple of sizes, or None."""
        sizes = () if nbytes is None else (nbytes,) if isinstance(nbytes, int) else nbytes
        made = tuple(self.storage(size) for size in sizes)
        self.ops.append(Op(len(self.ops), name, tuple(reads), tuple(writes), made, scratch, backward))
        return made[0] if isinstance(nbytes, int) else made

    def build(self, outputs=()) -> Graph:
        return make_graph(self.ops, self.storages, self.edges, outputs)


def layered(seed: int, n: int, width: int = 6) -> Graph:
    """`n` ops in random layers, each reading a few values of the layers above, at times a far one;
    views (further readers), scratch, in-place writes, two outputs at once, held and freed inputs."""
    rng = random.Random(seed)
    b = Builder()
    above = [b.storage(rng.choice(SIZES), held=rng.random() < 0.5) for _ in range(rng.randint(1, 3))]
    everything = list(above)
    while len(b.ops) < n:
        layer = []
        for _ in range(min(rng.randint(1, width), n - len(b.ops))):
            reads = {rng.choice(above if rng.random() < 0.8 else everything) for _ in range(rng.randint(1, 3))}
            scratch = rng.choice(SIZES) if rng.random() < 0.1 else 0
            kind = rng.random()
            if kind < 0.05 and above:
                b.op(sorted(reads), writes=(rng.choice(above),))
            elif kind < 0.12:
                b.op(sorted(reads), scratch=scratch)  # a view: no storage of its own
            elif kind < 0.2:
                layer += b.op(sorted(reads), (rng.choice(SIZES), rng.choice(SIZES)), scratch=scratch)
            else:
                layer.append(b.op(sorted(reads), rng.choice(SIZES), scratch=scratch))
        everything += layer
        above = layer or above
    read = {s for op in b.ops for s in (*op.reads, *op.writes)}
    made = [s for op in b.ops for s in op.allocates]
    return b.build(outputs=[s for s in made if s not in read and rng.random() < 0.7][:4])


def series_parallel(seed: int, n: int) -> Graph:
    """Fans that open and close again, nested: the shape of #1337 and of attention heads."""
    rng = random.Random(seed)
    b = Builder()

    def block(source: int, budget: int) -> int:
        if budget <= 2 or rng.random() < 0.2:
            for _ in range(max(1, budget)):
                source = b.op((source,), rng.choice(SIZES))
            return source
        if rng.random() < 0.4:
            left = rng.randint(1, budget - 1)
            return block(block(source, left), budget - left)
        fan = rng.randint(2, min(5, budget))
        ends = [block(source, (budget - 1) // fan) for _ in range(fan)]
        return b.op(ends, rng.choice(SIZES))

    x = b.storage(rng.choice(SIZES), held=rng.random() < 0.5)
    out = x
    while len(b.ops) < n:
        out = block(out, n - len(b.ops))
    return shuffled(b.build(outputs=(out,)), rng)


def training(seed: int, layers: int, recompute: bool = False) -> Graph:
    """A forward chain, the mirrored backward, weight gradients and saved activations.

    With `recompute` only each layer's input is saved, and the source order recomputes everything at
    the start of the backward: the shape that greedy orders get wrong.
    """
    rng = random.Random(seed)
    b = Builder()
    act = rng.choice((4, 8, 16))
    # Short sequences hold more weights than activations, long ones the reverse.
    sizes = rng.choice(((8, 16, 32), (1, 2, 4)))
    weights = [b.storage(rng.choice(sizes), held=True) for _ in range(layers)]
    x = b.storage(act, held=True)
    inputs, hidden = [], []
    for w in weights:
        inputs.append(x)
        h = b.op((x, w), 2 * act, scratch=rng.choice((0, 0, 4)), name="linear")
        hidden.append(h)
        x = b.op((h,), act, name="act")
    loss = b.op((x,), 1, name="loss")
    grad = b.op((x, loss), act, backward=True, name="loss_grad")
    if recompute:
        hidden = [b.op((inputs[i], w), 2 * act, backward=True, name="recompute") for i, w in enumerate(weights)]
    grads = []
    for i in reversed(range(layers)):
        dh = b.op((grad, hidden[i]), 2 * act, backward=True, name="act_grad")
        if rng.random() < 0.5:  # the weight's gradient before or after the activation's
            grads.append(b.op((dh, inputs[i]), b.storages[weights[i]].nbytes, backward=True, name="dW"))
            grad = b.op((dh, weights[i]), act, backward=True, name="dx")
        else:
            grad = b.op((dh, weights[i]), act, backward=True, name="dx")
            grads.append(b.op((dh, inputs[i]), b.storages[weights[i]].nbytes, backward=True, name="dW"))
    return b.build(outputs=(loss, *grads))


def recomputed_chains(seed: int, layers: int, chain: int = 3, branches: int = 2) -> Graph:
    """A backward that starts by recomputing every layer, several ops a branch: bytes rise and fall
    along a branch, so that it pays to sink it as a whole and not op by op."""
    rng = random.Random(seed)
    b = Builder()
    x = b.storage(16, held=True)
    weights = [b.storage(2, held=True) for _ in range(layers)]
    saved, kept = [], []
    for w in weights:
        saved.append(x)
        for _ in range(chain):
            x = b.op((x, w), rng.choice((4, 8, 16, 32)))
        x = b.op((x, w), 16)
    loss = b.op((x,), 1)
    grad = b.op((x, loss), 16, backward=True)
    for x, w in zip(saved, weights, strict=True):
        kept.append([])
        for _ in range(branches):
            value = x
            for _ in range(chain):
                value = b.op((value, w), rng.choice((8, 16, 32, 64)), backward=True)
            kept[-1].append(b.op((value,), rng.choice((2, 4, 8)), backward=True))
    grads = []
    for x, values in zip(reversed(saved), reversed(kept), strict=True):
        for value in values:
            inner = b.op((grad, value), rng.choice((4, 8)), backward=True)
            grads.append(b.op((inner, x), 2, backward=True))
            grad = b.op((grad, inner), 16, backward=True)
    return b.build(outputs=(loss, *grads))


def shuffled(graph: Graph, rng: random.Random) -> Graph:
    """The same graph with another legal source order."""
    waits = [len(p) for p in graph.predecessors]
    ready = [op for op, count in enumerate(waits) if not count]
    order = []
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        order.append(op)
        for other in graph.successors[op]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    return reordered(graph, order)


def reordered(graph: Graph, order) -> Graph:
    """The same graph with `order` as its source order."""
    position = {op: i for i, op in enumerate(order)}
    return Graph(
        tuple(replace(graph.ops[op], index=i) for i, op in enumerate(order)),
        graph.storages,
        tuple(tuple(sorted(position[p] for p in graph.predecessors[op])) for op in order),
        graph.outputs,
    )


def scaled(graph: Graph, factor: int) -> Graph:
    """The same graph with every size times `factor`."""
    return replace(
        graph,
        ops=tuple(replace(op, scratch_bytes=op.scratch_bytes * factor) for op in graph.ops),
        storages=tuple(replace(s, nbytes=s.nbytes * factor) for s in graph.storages),
    )


def renamed(graph: Graph) -> Graph:
    """The same graph with other names."""
    return replace(
        graph,
        ops=tuple(replace(op, name=f"x{len(graph.ops) - op.index}") for op in graph.ops),
        storages=tuple(replace(s, name=f"y{len(graph.storages) - s.index}") for s in graph.storages),
    )


def graphs(max_ops: int = 14) -> st.SearchStrategy[Graph]:
    """Every family, up to about `max_ops` ops."""
    seeds, sizes = st.integers(0, 10**6), st.integers(1, max_ops)
    layers = st.integers(1, max(1, (max_ops - 2) // 5))
    shapes = [
        st.builds(layered, seeds, sizes, st.integers(1, 6)),
        st.builds(series_parallel, seeds, sizes),
        st.builds(training, seeds, layers, st.booleans()),
    ]
    if max_ops >= 14:
        shapes.append(st.builds(recomputed_chains, seeds, st.integers(1, max_ops // 14), st.just(1), st.integers(1, 2)))
    return st.one_of(shapes)


def live_sets(graph: Graph, order) -> list[set[int]]:
    """Who is alive at each step, straight from the definition; quadratic, an oracle."""
    position = {op: step for step, op in enumerate(order)}
    last = len(order) - 1
    steps: list[set[int]] = [set() for _ in order]
    for s, storage in enumerate(graph.storages):
        users = [position[op.index] for op in graph.ops if s in (*op.reads, *op.writes, *op.allocates)]
        born = next((position[op.index] for op in graph.ops if s in op.allocates), 0)
        dies = last if storage.held or s in graph.outputs or not users else max(users)
        for step in range(born, dies + 1):
            steps[step].add(s)
    return steps


def oracle_bytes(graph: Graph, order) -> list[int]:
    """Live bytes at each step by `live_sets`."""
    return [
        sum(graph.storages[s].nbytes for s in alive) + graph.ops[op].scratch_bytes
        for op, alive in zip(order, live_sets(graph, order), strict=True)
    ]


def oracle_optimum(graph: Graph) -> int:
    """The least peak over all legal orders, by trying every permutation; for at most 8 ops."""
    best = None
    for order in permutations(range(len(graph))):
        position = {op: step for step, op in enumerate(order)}
        if all(position[p] < position[op] for op in order for p in graph.predecessors[op]):
            peak = max(oracle_bytes(graph, order))
            best = peak if best is None else min(best, peak)
    assert best is not None
    return best
