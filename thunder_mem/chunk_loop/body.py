"""A compiled block, which runs on rows of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from thunder.core.trace import TraceCtx

__all__ = ["BodiesByRows", "Body"]


class BodiesByRows(dict[int, "Body"]):
    """The blocks of a loop by their rows; one that is missing is built like the others where it is needed first."""

    def __missing__(self, rows: int) -> Body:
        body = self[max(self)].in_sizes([rows])[rows]
        self[rows] = body
        return body


@dataclass(frozen=True, eq=False)
class Body:
    """A compiled block.

    `fn(*logits, *sides, *log_sums, *tangents) -> (*outputs, *grads)`: `logits` are the amplifiers' results
    without their biases, and `grads` belong to the inputs listed in `wanted`. `log_sums` are the whole values
    of the outputs whose gradients need them; blocks without gradients have none. A block with `pairs` takes a last
    argument `add(side, left, right)`, and calls it for each of them, whose gradients it does not return.

    Attributes:
        fn: the callable.
        trace: its trace, after the executors.
        rows: rows in the block.
        outputs: its number of outputs.
        tangents: indices of the region's outputs whose tangents it takes.
        peak_bytes: the most bytes that it holds beyond its inputs (`loop_body/gradients_in_place.py` counts them).
        adding_bytes: the most bytes of its own tensors that exist while gradients are added to sums.
        over: the logits, by number, that their gradients overwrite (`loop_body/gradients_in_place.py`).
        pairs: the sides, by number, whose gradients are matrix products that it lets the loop add, each with the
            product's depth.
        resized: builds the same block for other rows.
        launches: kernels that it starts, which counts where a host starts them for a GPU.
        kernels_s: seconds of the device for its kernels, without a GPU's launches.
    """

    fn: Callable[..., tuple]
    trace: TraceCtx
    rows: int
    outputs: int
    tangents: tuple[int, ...]
    peak_bytes: int = 0
    adding_bytes: int = 0
    over: tuple[int, ...] = ()
    launches: int = 0
    kernels_s: float = 0.0
    pairs: Mapping[int, int] = field(default_factory=dict)
    resized: Callable[[int], Body] | None = None

    @property
    def wants_gradients(self) -> bool:
        """Whether it gives more than outputs."""
        return bool(self.pairs) or len(self.trace.bound_symbols[-1].args[0]) > self.outputs

    def in_sizes(self, sizes: Iterable[int]) -> dict[int, Body]:
        """The same block for other numbers of rows, compiled anew, by rows."""
        assert self.resized is not None
        return {rows: self.resized(rows) for rows in sizes}
