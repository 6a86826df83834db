"""Peaks that others measured on GPUs, and what is predicted for them."""

import json

import pytest
import torch

from benchmarks.published import liger, litgpt
from benchmarks.published.__main__ import CASES, PAGE, RESULTS, page
from benchmarks.published.thunder import written_out
from thunder_mem.runtime.output_layout import describe

ROWS = json.loads(RESULTS.read_text())["rows"]


def test_every_row_is_within_two_percent_or_has_a_cause():
    assert len(ROWS) == len(CASES) >= 40
    assert all(abs(row["difference"]) <= 0.02 or row["cause"] for row in ROWS)


def test_the_page_is_made_from_the_rows():
    assert PAGE.read_text() == page(ROWS)


@pytest.mark.parametrize("case", [liger.CASES[i] for i in (0, 2, 9, 10)], ids=lambda case: case.configuration)
def test_a_layer_is_predicted(case):
    """Of each kind: steady, the mean of ten runs, a gradient that is held, a workspace of one thread alone."""
    assert case.predict().nbytes == pytest.approx(case.published_bytes, rel=1e-4)


@pytest.mark.slow
def test_finetuning_is_predicted():
    """The smallest model of a recipe: its gradients, AdamW's state and the logits before are there."""
    (case,) = (case for case in litgpt.CASES if "recipe stablelm" in case.configuration)
    assert case.predict().nbytes == pytest.approx(case.published_bytes, rel=1e-3)


def test_nvfuser_of_2024_wrote_a_result_and_its_transpose():
    """A view of an input stays a view."""
    x = torch.empty(4, 6)
    result = torch.empty(6, 4)
    described = describe([x.t(), result, result.t(), 2.0], [x])
    view, first, second, number = written_out(described, [x], ["cpu"] * 4)
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata and number is None
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert (second.shape, second.stride(), second.untyped_storage().nbytes()) == ((4, 6), (6, 1), 4 * 6 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("row, case", [*zip(ROWS, CASES, strict=True)], ids=[row["configuration"] for row in ROWS])
def test_rows_are_what_is_predicted(row, case):
    assert case.predict().nbytes == row["predicted_bytes"]
