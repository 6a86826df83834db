"""Chunked loss heads: imports for developers who chunk a trace or register a rule for an operation.

The guide is `docs/guides/loss_heads.md`; heads are found in `thunder_mem.tiling`, the rules of a split
stand in `thunder_mem.sharding`.
"""

from thunder_mem.chunk_loop.plan import ChunkRecord, Head, HeadRefusal, LoopPlan
from thunder_mem.sharding.propagation import Relation, RuleError, register_rule
from thunder_mem.tiling.find import ChunkingError, chunk_trace
from thunder_mem.tiling.marks import chunked

__all__ = [
    "ChunkRecord",
    "ChunkingError",
    "Head",
    "HeadRefusal",
    "LoopPlan",
    "Relation",
    "RuleError",
    "chunk_trace",
    "chunked",
    "register_rule",
]
