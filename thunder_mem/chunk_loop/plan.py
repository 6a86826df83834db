"""The decisions about a chunk loop, as plain data: it prints, compares and turns into JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from thunder_mem.chunk_loop.matmul import bytes_beside_stretch, gemm_scratch_bytes, scratch_bytes_of
from thunder_mem.memory.plan import Decision
from thunder_mem.memory.units import counted
from thunder_mem.sharding.propagation import Sharding

__all__ = [
    "ALIGNED_ROWS",
    "ChunkRecord",
    "Gemm",
    "Head",
    "HeadRefusal",
    "LoopPlan",
    "Opening",
    "Spec",
    "StretchRefusal",
    "about_chunks",
]

ACCUMULATE = ("float32", "input")
ALIGNED_ROWS = 8
"""Parts of a GPU's 16-bit sum have a multiple of so many rows: cuBLAS is slow if an operand is not 16-byte aligned."""
_GPU_TILES_BYTES = 32 << 20
_FINER_BYTES = 8  # of a number: in float32, and what is stored of it


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

    def finer_rows(self, scratch_bytes: int) -> int:
        """Rows of dim 0 of a finer sum that are in float32 at once, if they and a product may take some bytes."""
        rows = max(1, scratch_bytes * 4 // 7 // (_FINER_BYTES * max(1, math.prod(self.shape[1:]))))
        return rows - rows % ALIGNED_ROWS if self.device.startswith("cuda") and rows > ALIGNED_ROWS else rows


@dataclass(frozen=True)
class Gemm:
    """A product (rows, D) x (D, V) at the start of every chunk.

    Attributes:
        x, w: indices of the loop's inputs: the operand with rows, and the whole one. None: the opening makes the rows.
        depth, width: D and V.
        w_rows_first: the whole operand is stored as (V, D), as in `linear`, rather than (D, V).
        x_rows_last: the row operand is stored as (D, rows).
        flows: a gradient flows back through it, unless the user cut it off.
        wants_x: a gradient flows to its rows.
        out: the result, one large value a row.
    """

    x: int | None
    w: int
    depth: int
    width: int
    w_rows_first: bool
    x_rows_last: bool
    flows: bool
    wants_x: bool
    out: Spec

    def wanted(self, grads: Collection[int]) -> bool:
        """Whether the gradients of the inputs `grads` need the gradient of its result."""
        return self.flows and (self.wants_x or self.w in grads)


@dataclass(frozen=True)
class Opening:
    """What makes the rows of a head's products inside the loop, such as a final norm, a few rows at a time.

    Attributes:
        out: these rows, of which only a chunk's exist.
        sides: indices of the loop's inputs that it reads.
        block_rows: rows that it sees at once.
        forward_block_bytes, backward_block_bytes: the most bytes that a block of it holds beyond its inputs.
        forward_block_calls, backward_block_calls: the host's calls to start a block; 0 on a CPU.
        forward_row_s, backward_row_s: seconds of the device for a row.
    """

    out: Spec
    sides: tuple[int, ...]
    block_rows: int
    forward_block_bytes: int
    backward_block_bytes: int
    forward_block_calls: int
    backward_block_calls: int
    forward_row_s: float
    backward_row_s: float


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """A chunk loop: a loss head in chunks, or a stretch of the program in tiles.

    A loss head begins with products that see a whole chunk, its `gemms`. A stretch has none: its products are inside
    the block, and a tile is a chunk of one block.

    Attributes:
        name: unique in the trace.
        source: ``file:line`` of the amplifier.
        op: the amplifier as the user wrote it.
        n: rows in all: tokens, or samples or positions of a convolution.
        chunk_rows: rows a matrix product sees at once; the last chunk has the rest.
        block_rows: rows that the operations between the products see at once.
        sized: the origin of `chunk_rows`: "asked" (the user), "head" (the head alone), "timeline" (the
            whole program's plan) or "tile" (the device). Only rows of heads that the user did not set may change.
        mode: "forward" (no gradient), "grads-in-forward" or "recompute-in-backward".
        why: the reason for this mode.
        inputs, outputs: the loop's border.
        gemms: the amplifiers.
        sides: indices of the inputs that the block reads.
        opening: what makes the rows of the amplifiers inside the loop, if anything.
        grads: indices of the inputs that need gradients.
        grad_dtypes: for each of `grads`, the dtype in which it adds up.
        sums_asked: the user set these dtypes; else a budget may narrow them.
        over: those of `grads` that overwrite their own inputs, which nobody needs any more.
        differentiable: indices of the outputs that carry a gradient.
        forward_block_bytes, backward_block_bytes: the most bytes that a block holds beyond its inputs.
        forward_block_calls, backward_block_calls: the host's calls to start a block; 0 on a CPU, which is the host.
        backward_adding_bytes: of a stretch: the most bytes of a tile that exist while gradients are added to sums.
        wide_row_bytes: of a stretch: bytes of one row of the results of its products.
        forward_tile_s, backward_tile_s: of a stretch: seconds of the device for a tile, without a GPU's launches.
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
    gemms: tuple[Gemm, ...] = ()
    sides: tuple[int, ...]
    grads: tuple[int, ...]
    grad_dtypes: tuple[torch.dtype, ...]
    sums_asked: bool
    over: tuple[int, ...] = ()
    differentiable: tuple[int, ...]
    forward_block_bytes: int = 0
    backward_block_bytes: int = 0
    forward_block_calls: int = 0
    backward_block_calls: int = 0
    backward_adding_bytes: int = 0
    wide_row_bytes: int = 0
    forward_tile_s: float = 0.0
    backward_tile_s: float = 0.0
    opening: Opening | None = None

    @property
    def is_stretch(self) -> bool:
        """Whether it is a stretch in tiles, and no loss head."""
        return not self.gemms

    @property
    def rows_read_first(self) -> tuple[int, ...]:
        """Those of `grads` whose rows in a chunk are read for the last time before their gradient is written."""
        if self.is_stretch:
            return self.grads
        rows = {g.x for g in self.gemms if g.x is not None}
        if self.opening:
            rows.update(i for i in self.opening.sides if self.inputs[i].sharding.split)
        return tuple(sorted(rows & {*self.grads} - {*self.sides} - {g.w for g in self.gemms}))

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.n // self.chunk_rows)

    @property
    def step_rows(self) -> int:
        """Chunks grow and shrink by these rows.

        On a GPU, and in a stretch, these are whole blocks, of the opening as well. On a CPU a chunk may be one block,
        and chunks get other blocks at last (`loop_sizes/even_chunks.py`).
        """
        if self.device.startswith("cpu") and not self.is_stretch:
            return -(-self.block_rows // 2) if self.block_rows >= self.chunk_rows else self.block_rows
        return math.lcm(self.block_rows, self.opening.block_rows) if self.opening else self.block_rows

    @property
    def sizes(self) -> str:
        """The parts that run one after the other, in words: "16 chunks of 1,024 rows", "8 tiles of 2,048 rows"."""
        part = "tile" if self.is_stretch else "chunk"
        return f"{counted(self.chunks, part)} of {counted(self.chunk_rows, 'row')}"

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
        """Bytes of one row of all amplifiers' results."""
        return sum(g.width * g.out.dtype.itemsize for g in self.gemms)

    @property
    def logits_bytes(self) -> int:
        """Bytes of one chunk's results of all amplifiers."""
        return self.chunk_rows * self.row_bytes

    @property
    def opened_bytes(self) -> int:
        """Bytes of one chunk's rows that the opening makes."""
        return self.chunk_rows * self.opening.out.nbytes // self.n if self.opening else 0

    @property
    def whole_logits_bytes(self) -> int:
        """Bytes of the amplifiers' results without chunks."""
        return self.n * self.row_bytes

    def tiles_bytes(self, block_bytes: int) -> int:
        """The limit for tiles of a product: their share, or the bytes of a block if the user did not set the chunks.

        A stretch's products run beside other values of its tile, so these leave less of the tile's bytes, or none; then
        their share is that of a tile.
        The bytes of a block are the sum of its tensors, of which fewer may exist at once. Chunks that the user set are
        most of the peak, which would rise by the difference.
        """
        share_bytes = scratch_bytes_of(self.logits_bytes)
        if self.device.startswith("cuda"):  # which waits for the host if tiles are small
            share_bytes = max(share_bytes, _GPU_TILES_BYTES)
        if self.sized == "asked":
            return share_bytes
        return max(share_bytes, scratch_bytes_of(block_bytes), block_bytes - self.backward_adding_bytes)

    @property
    def forward_scratch_bytes(self) -> int:
        """The most bytes held while the forward runs, beyond inputs and results."""
        opening_bytes = self.opening.forward_block_bytes if self.opening else 0
        gemms = self._gemm_bytes(self.forward_block_bytes, {})
        return self.logits_bytes + self.opened_bytes + max(gemms, self.forward_block_bytes, opening_bytes)

    @property
    def backward_scratch_bytes(self) -> int:
        """The most bytes held while gradients are computed, beyond inputs and results; 0 without gradients."""
        if not self.grads:
            return 0
        sums = dict(zip(self.grads, self.grad_dtypes, strict=True))
        sums |= {i: torch.float32 for i in self.grads if self.finer(i)}
        gemms = self._gemm_bytes(self.backward_block_bytes, sums)
        # If gradients are computed beside the loss, its tangent is the loop's own.
        tangents = sum(self.outputs[i].nbytes for i in self.differentiable) if self.mode == "grads-in-forward" else 0
        opening = self.opening
        opening_bytes = max(opening.forward_block_bytes, opening.backward_block_bytes) if opening else 0
        block = max(self.backward_adding_bytes + gemms, self.backward_block_bytes, opening_bytes)
        return self.logits_bytes + self.opened_bytes + block + self.finer_sums_bytes + tangents

    def grad_dtype(self, i: int) -> torch.dtype:
        """The dtype in which the gradient of input `i` adds up."""
        return self.grad_dtypes[self.grads.index(i)]

    def finer(self, i: int) -> bool:
        """Whether the gradient of input `i` adds up in 16 bits with one more byte a number."""
        spec, dtype = self.inputs[i], self.grad_dtype(i)
        adds_up = self.chunks > 1 or i in self.sides or (self.opening is not None and i in self.opening.sides)
        return adds_up and dtype == spec.dtype and dtype.itemsize == 2 and not spec.sharding.split

    @property
    def finer_sums_bytes(self) -> int:
        """The size of these additional bytes, while chunks run."""
        return sum(math.prod(self.inputs[i].shape) for i in self.grads if self.finer(i))

    @property
    def wider_sums_bytes(self) -> int:
        """The bytes of sums of gradients beyond the gradients themselves."""
        specs = [self.inputs[i] for i in self.grads]
        return sum(
            math.prod(s.shape) * (d.itemsize - s.dtype.itemsize) for s, d in zip(specs, self.grad_dtypes, strict=True)
        )

    def _gemm_bytes(self, block_bytes: int, sums: Mapping[int, torch.dtype]) -> int:
        tiles = self.tiles_bytes(block_bytes)
        needed = [0, *(self._finer_scratch_bytes(i, tiles) for i in sums if self.finer(i))]
        for g in self.gemms:
            dtypes = {g.out.dtype, sums.get(g.w, g.out.dtype)}
            needed.append(gemm_scratch_bytes(g.out.device, g.out.dtype, dtypes, self.chunk_rows, tiles))
        for i, dtype in sums.items():
            spec = self.inputs[i]
            if i in self.sides and not spec.sharding.split and len(spec.shape) == 2:
                needed.append(gemm_scratch_bytes(spec.device, spec.dtype, {dtype}, self.chunk_rows, tiles))
        return max(needed)

    def _finer_scratch_bytes(self, i: int, tiles_bytes: int) -> int:
        """Bytes of some rows of a finer sum in float32, beside what splits them again or what a product needs."""
        spec = self.inputs[i]
        total = 4 * min(math.prod(spec.shape), spec.finer_rows(tiles_bytes) * math.prod(spec.shape[1:]))
        product_bytes = bytes_beside_stretch(tiles_bytes)
        product = gemm_scratch_bytes(spec.device, spec.dtype, {torch.float32}, self.chunk_rows, product_bytes)
        return total + max(total, product)

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
    """The inputs of the choice of a chunk size.

    Attributes:
        op, source: the amplifier and its line in the user's code.
        n: rows.
        row_bytes: bytes of one row of all amplifiers' results.
        fixed_bytes: gradients that the loop allocates for any number of chunks above one.
        single_bytes: the same for a single chunk, where nothing adds up in a wider dtype.
        device: as torch prints it.
        dtype: of the products.
        busy_rows: the rows with which a GPU does not wait for the host; 0 on a CPU.
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
    """A head that stays whole, as in Thunder alone.

    Attributes:
        head: the amplifier.
        head_source: its ``file:line``.
        op: the operation that prevents chunking.
        source: its ``file:line``.
        reason: in words.
    """

    head: str
    head_source: str
    op: str
    source: str
    reason: str

    def __str__(self) -> str:
        return self._sentence("the loss head", "is not chunked")

    def _sentence(self, part: str, verdict: str) -> str:
        at = f" at {self.source}" if self.source else ""
        head = f"{part} {self.head} ({self.head_source or 'no source'})"
        return f"{head} {verdict} because of {self.op}{at}: {self.reason}"


@dataclass(frozen=True)
class StretchRefusal(HeadRefusal):
    """A stretch that stays whole; `head` is the product from which it was grown."""

    def __str__(self) -> str:
        return self._sentence("the stretch around", "does not run in tiles")


@dataclass(frozen=True)
class ChunkRecord:
    """The record of `chunk_trace` or `tile_trace`: the loops it made, and the heads or stretches it refused."""

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
    """The decisions about loops: bytes that exist at once of a head's logits, or of a stretch's products' results."""
    return tuple(map(_about_loop, loops))


def _about_loop(loop: LoopPlan) -> Decision:
    what, held = ("tiles", "products") if loop.is_stretch else ("loss head", "logits")
    row_bytes = loop.wide_row_bytes if loop.is_stretch else loop.row_bytes
    text = f"{loop.op} in {loop.sizes}, {loop.mode}: {loop.why}"
    return Decision(what, text, held, loop.n * row_bytes, loop.chunk_rows * row_bytes, loop.source)
