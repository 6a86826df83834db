"""Segments of a part: as few as there are places where other ops might gain by running in between."""

import pytest

from thunder_mem.schedule.hill_valley import Segments


@pytest.mark.parametrize("hill, ops", [(10, [[0, 1]]), (11, [[0], [1]])])
def test_a_fall_that_stays_below_an_earlier_hill_runs_with_it(hill, ops):
    """The first op needs 5 bytes and frees 5. From there the second one climbs to the same height, or above it."""
    segments = Segments(2)
    part = segments.parallel(segments.single(0, 5, -5), segments.single(1, hill, -1))
    assert [list(segments.ops(s)) for s in segments.sequence(part)] == ops


@pytest.mark.parametrize("hill, ops", [(10, [[1, 0]]), (11, [[1], [0]])])
def test_so_does_a_rise_that_stays_below_a_later_hill(hill, ops):
    segments = Segments(2)
    part = segments.parallel(segments.single(0, 10, 5), segments.single(1, hill + 1, 1))
    assert [list(segments.ops(s)) for s in segments.sequence(part)] == ops
