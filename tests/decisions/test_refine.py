"""What is said of rewrites that lower a peak."""

from thunder_mem.decisions.refine import TILES_AGAIN, _about_repetition


def test_tiles_that_run_again_are_told_from_other_values_that_are_made_again():
    said = _about_repetition(2, 10, 8)
    assert (said.what, said.before_bytes, said.after_bytes) == (TILES_AGAIN, 10, 8)
