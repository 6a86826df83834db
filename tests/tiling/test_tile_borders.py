"""The narrow inputs of stretches that the forward keeps, and stretches that run once more, beside attention."""

from types import SimpleNamespace

import pytest

from tests.tiling.test_head_groups import Layers, assert_right, few_blocks  # noqa: F401 - a fixture
from tests.tiling.test_tiles import made
from thunder_mem import Tiles, last_plan
from thunder_mem.partition.constraints import Constraints
from thunder_mem.planning import pipeline, refine, tile_borders
from thunder_mem.planning import program as programs
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.planning.program import Program, _only_offered


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 9])
def test_choices_are_the_ends_of_the_backward_or_all(layers):
    borders = [frozenset({i}) for i in range(layers)]
    choices = tile_borders._choices(borders)
    assert choices[-1] == borders
    assert all(part in (borders[: len(part)], borders[-len(part) :]) for part in choices)
    assert sorted({len(part) for part in choices}) == sorted({*(k for k in (1, 2, 4) if k < layers), layers})


def test_a_choice_that_was_compared_is_not_made_again(monkeypatch):
    made_of = []
    source = SimpleNamespace(graph=SimpleNamespace(allocator=()), bsyms=())
    monkeypatch.setattr(programs, "with_partition", lambda *args: made_of.append(args[2]) or ("trace", source))
    program = Program("trace", source, (), PlanningOptions(), "fuse", Constraints(), frozenset(), ())
    chosen = frozenset({1})
    program.partitioned(chosen)
    assert program.recomputing(chosen) == ("trace", source, "fuse")
    assert made_of == [chosen]


@pytest.mark.slow
def test_gradients_are_right_if_the_forward_keeps_the_inputs_of_stretches(few_blocks, monkeypatch):  # noqa: F811
    kept = []

    def with_borders_alone(program):
        offered = _only_offered(program.source, program.fuse, program.constraints)
        found = tile_borders.keeping_borders(
            program.partitioned, program.source, program.fuse, program.constraints, offered
        )
        kept.append((offered, found))
        return [found or offered]

    monkeypatch.setattr(tile_borders, "_peak_bytes", lambda partitioned, rebuilt: len(rebuilt))
    monkeypatch.setattr(pipeline, "free_partitions", with_borders_alone)
    module, x = made(Layers(is_causal=True), (1, 512, 64))
    assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])
    assert kept and all(found is not None and found < offered for offered, found in kept)


@pytest.mark.slow
def test_gradients_are_right_if_stretches_run_once_more(few_blocks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(refine, "_MOST_TIME", 1.0)
    chosen = []

    class Noted(refine._Repetition):
        def __call__(self, planned):
            trace, count = super().__call__(planned)
            chosen.append(count)
            return trace, count

    monkeypatch.setattr(refine, "_Repetition", Noted)
    module, x = made(Layers(is_causal=True, keys=8), (1, 512, 64))
    jitted = assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])
    assert any(chosen) and last_plan(jitted) is not None
