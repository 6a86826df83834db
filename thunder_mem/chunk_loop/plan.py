"""What was decided about a chunk loop, as plain data: it prints, compares and turns into JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from thunder_mem.chunk_loop.matmul import gemm_scratch_bytes, scratch_bytes_of
from thunder_mem.memory.plan import Decision
from thunder_mem.memory.units import counted
from thunder_mem.sharding.propagation import Sharding

__all__ = ["ChunkRecord", "Gemm", "Head", "HeadRefusal", "LoopPlan", "Spec", "about_chunks"]

ACCUMULATE = ("float32", "input")
_GPU_TILES_BYTES = 32 << 20


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
        flows: a gradient flows back through it; the user may have cut it off.
        out: the result, one large value a row.
    """

    x: int
    w: int
    depth: int
    width: int
    w_rows_first: bool
    x_rows_last: bool
    flows: bool
    out: Spec

    def wanted(self, grads: Collection[int]) -> bool:
        """Whether the gradient of its result is needed for those of the inputs `grads`."""
        return self.flows and (self.x in grads or self.w in grads)


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
        sized: who fixed `chunk_rows`: "asked" (the user), "head" (the head alone) or "timeline" (the
            whole program's plan). Only what nobody asked for may change.
        mode: "forward" (no gradient asked for), "grads-in-forward" or "recompute-in-backward".
        why: why this mode.
        inputs, outputs: the loop's border.
        gemms: the amplifiers.
        sides: indices of the inputs that the block reads.
        grads: indices of the inputs whose gradients are asked for.
        grad_dtypes: for each of `grads`, the dtype in which it adds up.
        sums_asked: the user said in which; else a budget may narrow them.
        over: those of `grads` that are written over their own inputs, which nobody needs any more.
        differentiable: indices of the outputs that carry a gradient.
        forward_block_bytes, backward_block_bytes: what a block holds at most beyond its inputs.
        forward_block_calls, backward_block_calls: by which the host starts a block; 0 on a CPU, which is the host.
    """

    name: str
    source: str
    op: str
    n: int
    chunk_rows: int
    block_rows: int
    sized: str
    mode: str
    why: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    gemms: tuple[Gemm, ...]
    sides: tuple[int, ...]
    grads: tuple[int, ...]
    grad_dtypes: tuple[torch.dtype, ...]
    sums_asked: bool
    over: tuple[int, ...]
    differentiable: tuple[int, ...]
    forward_block_bytes: int
    backward_block_bytes: int
    forward_block_calls: int = 0
    backward_block_calls: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks it runs."""
        return -(-self.n // self.chunk_rows)

    @property
    def device(self) -> str:
        """Where it runs, as torch prints it."""
        return self.outputs[0].device

    @property
    def log_sums(self) -> tuple[int, ...]:
        """Indices of the outputs whose gradient in one chunk needs their value over all chunks."""
        return tuple(i for i in self.differentiable if self.outputs[i].sharding.partial == "logsumexp")

    @property
    def row_bytes(self) -> int:
        """One row of all amplifiers' results."""
        return sum(g.width * g.out.dtype.itemsize for g in self.gemms)

    @property
    def logits_bytes(self) -> int:
        """One chunk's results of all amplifiers."""
        return self.chunk_rows * self.row_bytes

    @property
    def whole_logits_bytes(self) -> int:
        """What the amplifiers' results would take unchunked."""
        return self.n * self.row_bytes

    def tiles_bytes(self, block_bytes: int) -> int:
        """What the tiles of a product may take: their share, or, where nobody asked for the chunks, as much as a block.

        By the sizes of its tensors, that is, of which less may exist at once: chunks that were asked for are most of
        the peak, which would rise by the difference.
        """
        share_bytes = scratch_bytes_of(self.logits_bytes)
        if self.device.startswith("cuda"):  # which waits for the host if tiles are small
            share_bytes = max(share_bytes, _GPU_TILES_BYTES)
        return share_bytes if self.sized == "asked" else max(share_bytes, block_bytes)

    @property
    def forward_scratch_bytes(self) -> int:
        """Held at most while the forward runs, beyond inputs and results."""
        return self.logits_bytes + max(self._gemm_bytes(self.forward_block_bytes, {}), self.forward_block_bytes)

    @property
    def backward_scratch_bytes(self) -> int:
        """Held at most while gradients are computed, beyond inputs and results; 0 if they never are."""
        if not self.grads:
            return 0
        sums = dict(zip(self.grads, self.grad_dtypes, strict=True))
        sums |= {i: torch.float32 for i in self.grads if self.finer(i)}
        gemms = self._gemm_bytes(self.backward_block_bytes, sums)
        # Where gradients are computed beside the loss, its tangent is the loop's own.
        tangents = sum(self.outputs[i].nbytes for i in self.differentiable) if self.mode == "grads-in-forward" else 0
        return self.logits_bytes + max(gemms, self.backward_block_bytes) + self.finer_sums_bytes + tangents

    def finer(self, i: int) -> bool:
        """Whether the gradient of input `i` keeps a byte a number beside the 16 bits in which it adds up."""
        spec, dtype = self.inputs[i], self.grad_dtypes[self.grads.index(i)]
        adds_up = self.chunks > 1 or i in self.sides
        return adds_up and dtype == spec.dtype and dtype.itemsize == 2 and not spec.sharding.split

    @property
    def finer_sums_bytes(self) -> int:
        """What these bytes take, while chunks run."""
        return sum(math.prod(self.inputs[i].shape) for i in self.grads if self.finer(i))

    @property
    def wider_sums_bytes(self) -> int:
        """What sums of gradients take beyond the gradients themselves."""
        specs = [self.inputs[i] for i in self.grads]
        return sum(
            math.prod(s.shape) * (d.itemsize - s.dtype.itemsize) for s, d in zip(specs, self.grad_dtypes, strict=True)
        )

    def _gemm_bytes(self, block_bytes: int, sums: Mapping[int, torch.dtype]) -> int:
        tiles = self.tiles_bytes(block_bytes)
        needed = [tiles if any(self.finer(i) for i in sums) else 0]
        for g in self.gemms:
            dtypes = {g.out.dtype, sums.get(g.w, g.out.dtype)}
            needed.append(gemm_scratch_bytes(g.out.device, g.out.dtype, dtypes, self.chunk_rows, tiles))
        for i, dtype in sums.items():
            spec = self.inputs[i]
            if i in self.sides and not spec.sharding.split and len(spec.shape) == 2:
                needed.append(gemm_scratch_bytes(spec.device, spec.dtype, {dtype}, self.chunk_rows, tiles))
        return max(needed)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        sizes = {
            "chunks": self.chunks,
            "logits_bytes": self.logits_bytes,
            "forward_scratch_bytes": self.forward_scratch_bytes,
            "backward_scratch_bytes": self.backward_scratch_bytes,
        }
        return _plain(asdict(self)) | sizes


@dataclass(frozen=True)
class Head:
    """What the choice of a chunk size may depend on.

    Attributes:
        op, source: the amplifier and its line in the user's code.
        n: rows.
        row_bytes: bytes of one row of all amplifiers' results.
        fixed_bytes: gradients that the loop allocates whatever the size of several chunks is.
        single_bytes: the same for a single chunk, where nothing adds up in a wider dtype.
        device: as torch prints it.
        dtype: of the products.
        busy_rows: with which a GPU does not wait for the host; 0 on a CPU.
    """

    op: str
    source: str
    n: int
    row_bytes: int
    fixed_bytes: int
    single_bytes: int
    device: str
    dtype: torch.dtype
    busy_rows: int = 0


@dataclass(frozen=True)
class HeadRefusal:
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
    refusals: tuple[HeadRefusal, ...] = field(default=())

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


def about_chunks(loops: Iterable[LoopPlan]) -> tuple[Decision, ...]:
    """Loss heads that run chunk by chunk: bytes of the logits that exist at once."""
    return tuple(
        Decision(
            "loss head",
            f"{loop.op} in {counted(loop.chunks, 'chunk')} of {loop.chunk_rows:,} rows, {loop.mode}: {loop.why}",
            "logits",
            loop.whole_logits_bytes,
            loop.logits_bytes,
            loop.source,
        )
        for loop in loops
    )
