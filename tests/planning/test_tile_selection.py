"""Programs with tiles and without."""

from types import SimpleNamespace

import pytest
import thunder
import torch
from thunder.core import dtypes, prims

from benchmarks.models import llama_step
from thunder_mem import MemEfficient, last_plan
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.memory.plan import Decision
from thunder_mem.planning import tile_selection
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


@pytest.mark.parametrize(
    ("seconds", "nbytes", "device", "too_slow"),
    [
        (1.01, 500, "cpu", False),  # in time
        (1.02, 950, "cpu", False),  # half of the time may stay, with half of a gain of 5 %
        (1.04, 950, "cpu", True),  # a quarter, 1.25 % of the peak
        (1.04, 900, "cpu", False),
        (1.5, 1100, "cpu", True),  # no gain
        (1.5, 0, "cpu", False),
        (1.5, 990, "cuda", False),  # the final trace may take less time than its arrangement
    ],
)
def test_tiles_are_too_slow_if_the_part_that_may_stay_gains_too_little(monkeypatch, seconds, nbytes, device, too_slow):
    def arranged(seconds, nbytes):
        lowest = SimpleNamespace(seconds=seconds, least_likely_bytes=nbytes)
        return SimpleNamespace(program=SimpleNamespace(source=None), lowest=lowest)

    monkeypatch.setattr(tile_selection, "device_of", lambda source: torch.device(device))
    assert tile_selection._is_too_slow(arranged(seconds, nbytes), arranged(1.0, 1000)) == too_slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "shortcut", "tiled"),
    [
        pytest.param(False, "_is_clearly_better", True, id="tiles are clearly better"),
        pytest.param(True, "_is_too_slow", False, id="tiles are too slow"),  # every sum of a tile takes its time
    ],
)
def test_what_is_only_arranged_changes_no_plan(monkeypatch, units, shortcut, tiled):
    """The program without tiles where these are clearly better, and the one with tiles where these are too slow."""
    program = llama_step(vocab=256, loss_inside=False, checkpointing=True, dtype=torch.bfloat16)
    monkeypatch.setattr("thunder_mem.chunk_loop.sum_price.adds_to_float32", lambda device, dtype: units)
    monkeypatch.setattr("thunder_mem.chunk_loop.sum_price._AMX_SUM_S", 1e-3)
    judged = getattr(tile_selection, shortcut)
    answers = []

    def planned(judge):
        monkeypatch.setattr(tile_selection, shortcut, judge)
        jitted = thunder.jit(program.fn, transforms=[MemEfficient(strict=True)])
        compiled_entry(jitted, program.args, {}, call=True)  # compiles, runs nothing
        traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
        return last_plan(jitted), [[b.sym.name for b in trace.bound_symbols] for trace in traces]

    plan, steps = planned(lambda *plans: answers.append(judged(*plans)) or answers[-1])
    assert answers == [True] and any(d.what == "tiles" for d in plan.decisions) == tiled
    full, full_steps = planned(lambda *_: False)
    assert (full.fingerprint, full.candidate, full.decisions) == (plan.fingerprint, plan.candidate, plan.decisions)
    assert full_steps == steps
