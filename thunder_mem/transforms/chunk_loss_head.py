"""`ChunkLossHead`: the chunked loss head as a Thunder transform of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.plan import ChunkRecord, HeadRefusal
from thunder_mem.frontend.fx_prologue_checks import pruned
from thunder_mem.frontend.tensor_parallel import waits_for_shards
from thunder_mem.functionalization.functionalize import without_writes
from thunder_mem.loop_sizes.chunk_resizing import write_over_dead_rows
from thunder_mem.tiling.find import ChunkingError, check_options, chunk_trace
from thunder_mem.torch_functions.mended_functions import with_mended_functions
from thunder_mem.transforms.base import ListedTransform
from thunder_mem.transforms.default_executors import with_own_executors
from thunder_mem.transforms.failures import left
from thunder_mem.transforms.grad_mode import with_gradients_recorded
from thunder_mem.transforms.other_transforms import rewriting_after, with_whole_heads

__all__ = ["ChunkLossHead"]


class ChunkLossHead(ListedTransform):
    """Run loss heads chunk by chunk, so that no (rows, vocabulary) value ever exists whole.

    Args:
        chunks: the number of chunks of every head, or "auto", by the size of the head; small heads stay whole.
        rows: the number of rows of a chunk, or "auto", as for `chunks`. Give one of `chunks` and
            `rows`; neither means "auto".
        accumulate: dtype in which gradients of 16-bit weights add up over chunks, "float32" or "input".
            "input" is the weight's own dtype, with one more byte while chunks run. It saves one byte a
            weight, and two afterwards. It is as exact, and slower. The default is "float32", or "input"
            under a budget of `MemEfficient` that has no room for float32.

    Raises:
        ValueError, TypeError: an argument outside of what is accepted.

    Example:
        >>> import thunder, torch
        >>> head = lambda x, w, t: torch.nn.functional.cross_entropy(x @ w.T, t)
        >>> transform = ChunkLossHead(chunks=4)
        >>> loss = thunder.jit(head, transforms=[transform])(torch.ones(8, 2), torch.ones(16, 2), torch.zeros(8).long())
        >>> transform.record.loops[0].chunk_rows
        2
    """

    def __init__(
        self, *, chunks: int | str | None = None, rows: int | str | None = None, accumulate: str | None = None
    ) -> None:
        super().__init__()
        check_options(chunks, rows, accumulate)
        self.chunks, self.rows, self.accumulate = chunks, rows, accumulate
        self.records: list[ChunkRecord] = []

    @property
    def record(self) -> ChunkRecord:
        """The record of the latest compilation; empty before the first."""
        return self.records[-1] if self.records else ChunkRecord()

    @with_gradients_recorded
    def transform_traces_pre_prologue(
        self,
        prologue_trace: TraceCtx,
        computation_trace: TraceCtx,
        epilogue_trace: TraceCtx | None,
        *,
        executors_list: Sequence[Any] = (),
        **kwargs: Any,
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Thunder's hook before autograd."""
        data: Any = get_compile_data()
        if data is not None and waits_for_shards(self, data.transforms, computation_trace):
            return prologue_trace, computation_trace, epilogue_trace
        other = rewriting_after(self, data.transforms) if data is not None else ""
        try:
            if other:
                computation_trace, reason = with_whole_heads(computation_trace, type(self).__name__, other)
                record = ChunkRecord(refusals=(HeadRefusal("of the program", "", other, "", reason),))
            else:
                computation_trace, record = chunk_trace(
                    without_writes(with_mended_functions(computation_trace)),
                    chunks=self.chunks,
                    rows=self.rows,
                    accumulate=self.accumulate,
                    executors_list=_of_the_plan(tuple(executors_list), data),
                )
        except ChunkingError:  # the user marked this head by `with chunked():`
            raise
        except Exception as error:
            cause = left("the program as it is", error, by=type(self).__name__)
            record = ChunkRecord(refusals=(HeadRefusal("of the whole program", "", "the program", "", cause),))
        self.records.append(record)
        prologue_trace = pruned(data, prologue_trace, computation_trace, epilogue_trace)
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Thunder's hook for the final traces: the gradient of dead rows overwrites the rows."""
        try:
            return write_over_dead_rows(trace)
        except Exception as error:
            left("the gradients of rows in memory of their own", error, by=type(self).__name__)
            return trace

    def __repr__(self) -> str:
        return f"ChunkLossHead(chunks={self.chunks!r}, rows={self.rows!r}, accumulate={self.accumulate!r})"


def _of_the_plan(executors: tuple, data: Any) -> tuple:
    """The executors of all other operations, too: a `MemEfficient` in the same list adds its own to the defaults."""
    listed = () if data is None else data.transforms
    planned = any(isinstance(t, ListedTransform) and t.plans for t in listed)
    return with_own_executors(executors) if planned else executors
