"""The notebooks run from their first cell to their last, and print and draw what is committed."""

from __future__ import annotations

import nbformat
import pytest

from notebooks.run import notebooks, pictures, run, texts

PATHS = notebooks()


@pytest.mark.slow  # CI runs them by `make test-notebooks`
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_outputs_are_those_that_are_committed(path):
    committed, new = nbformat.read(path, as_version=4), run(path)
    for cell, before, now in zip(
        [c for c in new.cells if c.cell_type == "code"], texts(committed), texts(new), strict=True
    ):
        assert now == before, cell.source
    assert pictures(new) == pictures(committed)
    assert sum(pictures(new)) > 0


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_committed_as_it_ran(path):
    """From top to bottom, without an error, nothing of the machine inside, and small enough to look at."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and all(output.output_type != "error" for output in outputs)
    text = path.read_text(encoding="utf-8")
    assert "/work/" not in text and "/home/" not in text and "ipykernel_" not in text
    assert len(text) < 2_000_000


def test_there_is_one_of_each():
    assert [path.name[:2] for path in PATHS] == ["01", "02", "03", "04", "05", "06", "07"]
