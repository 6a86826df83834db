"""What was decided about a chunk loop, as plain data: it prints, compares and turns into JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from thunder_mem.chunk_rules import Sharding

__all__ = ["ChunkRecord", "Gemm", "Head", "LoopPlan", "Refusal", "Spec"]

ACCUMULATE = ("float32", "input")


@dataclass(frozen=True)
class Spec:
    """One tensor at the loop's border."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    sharding: Sharding

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Gemm:
    """A product (rows, D) x (D, V) at the start of every chunk.

    Attributes:
        x, w: indices of the loop's inputs: the operand with rows, and the whole one.
        depth, width: D and V.
        w_rows_first: the whole operand is stored as (V, D), as in `linear`, rather than (D, V).
        x_rows_last: the row operand is stored as (D, rows).
        out: the result, one large value a row.
    """

    x: int
    w: int
    depth: int
    width: int
    w_rows_first: bool
    x_rows_last: bool
    out: Spec


@dataclass(frozen=True)
class LoopPlan:
    """A chunk loop.

    Attributes:
        name: unique in the trace.
        source: ``file:line`` of the amplifier.
        op: the amplifier as the user wrote it.
        n: rows in all.
        chunk_rows: rows a matrix product sees at once; the last chunk has the rest.
        block_rows: rows that the operations between the products see at once.
        mode: "forward" (no gradient asked for), "grads-in-forward" or "recompute-in-backward".
        why: why this mode.
        accumulate: "float32" or "input": dtype in which gradients of whole 16-bit inputs add up.
        inputs, outputs: the loop's border.
        gemms: the amplifiers.
        sides: indices of the inputs that the block reads.
        grads: indices of the inputs whose gradients are asked for.
        differentiable: indices of the outputs that carry a gradient.
        forward_scratch_bytes, backward_scratch_bytes: held at most while it runs, beyond inputs and
            results.
    """

    name: str
    source: str
    op: str
    n: int
    chunk_rows: int
    block_rows: int
    mode: str
    why: str
    accumulate: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    gemms: tuple[Gemm, ...]
    sides: tuple[int, ...]
    grads: tuple[int, ...]
    differentiable: tuple[int, ...]
    forward_scratch_bytes: int
    backward_scratch_bytes: int

    @property
    def chunks(self) -> int:
        """How many chunks it runs."""
        return -(-self.n // self.chunk_rows)

    @property
    def logits_bytes(self) -> int:
        """One chunk's results of all amplifiers."""
        return self.chunk_rows * sum(g.width * g.out.dtype.itemsize for g in self.gemms)

    @property
    def whole_logits_bytes(self) -> int:
        """What the amplifiers' results would take unchunked."""
        return self.n * sum(g.width * g.out.dtype.itemsize for g in self.gemms)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return _plain(asdict(self)) | {"chunks": self.chunks, "logits_bytes": self.logits_bytes}


@dataclass(frozen=True)
class Head:
    """What the choice of a chunk size may depend on.

    Attributes:
        op, source: the amplifier and its line in the user's code.
        n: rows.
        row_bytes: bytes of one row of all amplifiers' results.
        fixed_bytes: gradients that the loop allocates whatever the chunk size is.
        device: as torch prints it.
    """

    op: str
    source: str
    n: int
    row_bytes: int
    fixed_bytes: int
    device: str


@dataclass(frozen=True)
class Refusal:
    """A head that runs as Thunder would have it.

    Attributes:
        head: the amplifier.
        head_source: its ``file:line``.
        op: the operation that stands in the way.
        source: its ``file:line``.
        reason: why.
    """

    head: str
    head_source: str
    op: str
    source: str
    reason: str

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        head = f"the loss head {self.head} ({self.head_source or 'no source'})"
        return f"{head} is not chunked because of {self.op}{at}: {self.reason}"


@dataclass(frozen=True)
class ChunkRecord:
    """What `chunk_trace` did: the loops it made and the heads it refused."""

    loops: tuple[LoopPlan, ...] = ()
    refusals: tuple[Refusal, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return {"loops": [p.to_json() for p in self.loops], "refusals": [asdict(r) for r in self.refusals]}


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return [_plain(v) for v in x]
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return x
