"""Programs with tiles and without."""

import thunder
import torch
from thunder.core import dtypes, prims

from thunder_mem.memory.plan import Decision
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.tile_selection import _tidied


def test_casts_back_and_forth_disappear_where_a_loop_took_in_what_stood_between_them():
    def fn(x):
        wide = prims.convert_element_type(x, dtypes.float32)
        return prims.neg(prims.convert_element_type(wide, dtypes.bfloat16))

    trace = thunder.trace()(fn, torch.ones(3, dtype=torch.bfloat16))
    tiles = PlanningOptions(decisions=(Decision("tiles", "", "products", 0, 0),))
    assert [b.sym.name for b in _tidied(trace, tiles).bound_symbols][-2:] == ["neg", "python_return"]
    assert not any(b.sym.name == "convert_element_type" for b in _tidied(trace, tiles).bound_symbols)
    assert _tidied(trace, PlanningOptions()) is trace
