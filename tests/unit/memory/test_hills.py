"""The hills of a timeline, against a walk from every top."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_mem.memory.hills import hills


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.sampled_from([0, 0.05, 0.3, 1]))
def test_hills_against_a_walk_from_every_top(live, share):
    least = max(1, share * (max(live) - min(live)))

    def descent(i):
        """How far one has to go down from `i` to get higher (to the left: as high)."""
        depths = []
        for step, higher in ((-1, lambda v: v >= live[i]), (1, lambda v: v > live[i])):
            lowest, j = live[i], i + step
            while 0 <= j < len(live) and not higher(live[j]):
                lowest, j = min(lowest, live[j]), j + step
            if 0 <= j < len(live):
                depths.append(live[i] - lowest)
        return min(depths, default=None)

    expected = [i for i in range(len(live)) if (d := descent(i)) is None or d >= least]
    expected.sort(key=lambda i: (-live[i], i))
    assert list(hills(live, count=50, share=share)) == expected
    assert live[hills(live)[0]] == max(live)


def test_hills_refuse_nonsense():
    with pytest.raises(ValueError, match="count from 1 up"):
        hills([1], count=0)
    with pytest.raises(ValueError, match=r"share in 0\.\.1"):
        hills([1], share=2)


def test_without_a_share_every_local_top_is_a_hill():
    assert hills((4, 1, 9, 1, 6), share=0) == (2, 4, 0)
    assert hills((4, 1, 9, 1, 6), 1, share=0) == (2,)
    assert hills((5, 5, 5), share=0) == (0,)
    assert hills(()) == ()
