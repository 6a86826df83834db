"""Programs of ThunderFX: the parts that Thunder compiled, and the breaks by Dynamo or the splitter."""

from thunder_mem.frontend.thunderfx import (
    Break,
    Subgraph,
    graph_breaks,
    highest_peak,
    is_fx,
    only_subgraph,
    subgraphs,
    why_no_subgraphs,
)

__all__ = [
    "Break",
    "Subgraph",
    "graph_breaks",
    "highest_peak",
    "is_fx",
    "only_subgraph",
    "subgraphs",
    "why_no_subgraphs",
]
