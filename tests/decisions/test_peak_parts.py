"""A peak in words."""

import torch

from tests.checking.traces import unfused
from thunder_mem.decisions.peak_parts import peak_in_words
from thunder_mem.trace.reading import read_trace


def test_values_at_the_peak_are_named_by_the_operation_and_the_line_that_make_them():
    trace = unfused(lambda x: x.sin().cos() + x, torch.ones(1024))
    said = peak_in_words(trace, read_trace(trace))
    assert "of Sin at " in said and "test_peak_parts.py:" in said


def test_values_of_the_backward_at_the_peak_are_told_from_those_of_the_forward():
    trace = unfused(lambda x: x.sin().cos() + x, torch.ones(1024, requires_grad=True))
    assert "2 Mul, backward" in peak_in_words(trace, read_trace(trace))
