"""Programs with tiles and without."""

import pytest
import thunder
import torch
from thunder.core import dtypes, prims

from benchmarks.models import llama_step
from thunder_mem import MemEfficient, last_plan
from thunder_mem.memory.plan import Decision
from thunder_mem.planning import tile_selection
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.tile_selection import _tidied
from thunder_mem.prediction.compiled_call import compiled_entry


def test_casts_back_and_forth_disappear_where_a_loop_took_in_what_stood_between_them():
    def fn(x):
        wide = prims.convert_element_type(x, dtypes.float32)
        return prims.neg(prims.convert_element_type(wide, dtypes.bfloat16))

    trace = thunder.trace()(fn, torch.ones(3, dtype=torch.bfloat16))
    tiles = PlanningOptions(decisions=(Decision("tiles", "", "products", 0, 0),))
    assert [b.sym.name for b in _tidied(trace, tiles).bound_symbols][-2:] == ["neg", "python_return"]
    assert not any(b.sym.name == "convert_element_type" for b in _tidied(trace, tiles).bound_symbols)
    assert _tidied(trace, PlanningOptions()) is trace


@pytest.mark.slow
def test_what_is_only_arranged_without_tiles_gets_the_plan_of_the_full_comparison(monkeypatch):
    program = llama_step(vocab=256, loss_inside=False, checkpointing=True, dtype=torch.bfloat16)
    monkeypatch.setattr("thunder_mem.chunk_loop.matmul._bfloat16_units", lambda: False)  # there sums take longer
    judged = tile_selection._is_clearly_better
    answers = []

    def planned(judge):
        monkeypatch.setattr(tile_selection, "_is_clearly_better", judge)
        jitted = thunder.jit(program.fn, transforms=[MemEfficient(strict=True)])
        compiled_entry(jitted, program.args, {}, call=True)  # compiles, runs nothing
        traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
        return last_plan(jitted), [[b.sym.name for b in trace.bound_symbols] for trace in traces]

    plan, steps = planned(lambda *plans: answers.append(judged(*plans)) or answers[-1])
    assert answers == [True] and any(d.what == "tiles" for d in plan.decisions)
    full, full_steps = planned(lambda *_: False)
    assert (full.fingerprint, full.candidate, full.decisions) == (plan.fingerprint, plan.candidate, plan.decisions)
    assert full_steps == steps
