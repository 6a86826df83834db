"""All the ways in which planned programs are broken on purpose; each takes a program and a source of choices.

A corruption gives the broken trace, None where the program has nothing to break in that way, or raises where
the emission of the trace itself refuses.
"""

from tests.checking import corruptions_of_plans as plans
from tests.checking import corruptions_of_traces as traces
from tests.checking.corruptions_of_values import VALUES
from tests.checking.rewritten import Rewritten, rewrite

__all__ = ["CORRUPTIONS", "Rewritten", "rewrite"]

CORRUPTIONS = (
    plans.swapped_regions, plans.late_region, plans.lost_region, plans.lost_op, plans.reversed_region,
    plans.all_copies, plans.forward_in_backward, plans.twice, plans.moved_op, plans.merged_across,
    traces.swapped_effects, traces.lost_write, traces.late_reader, traces.another_number, traces.exchanged_operands,
    traces.another_dtype, traces.unnamed_input, traces.empty_fusion_part, traces.exchanged_fusion_operands,
    traces.another_part, traces.another_result, traces.redefined, traces.untagged, traces.mistagged, traces.no_return,
    *VALUES,
)  # fmt: skip
