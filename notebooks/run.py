"""Run the notebooks and keep what they print and draw: ``python -m notebooks.run`` (or ``make notebooks``).

Each is run from its first cell to its last in a kernel of its own with one thread, and written back with its
outputs. What would differ between two runs (times, versions, counters) is left out, so that a notebook that
says the same stays the same file. ``python -m notebooks.run 01 03`` runs those two.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
MACHINE = "machine"
"""The tag of cells whose text depends on the machine they run on, such as times."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_LOGS": "-all",
    "THUNDER_MEM_PROGRESS": "0",
}


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(HERE.glob("[0-9]*.ipynb"))


def run(path: Path, timeout_s: int = 600) -> NotebookNode:
    """The notebook with new outputs; the file stays as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message holds its traceback.
        nbclient.exceptions.CellTimeoutError: a cell took longer than `timeout_s`.
    """
    notebook = nbformat.read(path, as_version=4)
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        with TemporaryDirectory() as folder:  # for what they save
            here = Path(folder) / "notebook"  # by this name in what they print
            here.mkdir()
            place = {"metadata": {"path": str(here)}}
            NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=place).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return _normalised(notebook)


def texts(notebook: NotebookNode) -> list[str]:
    """What each code cell prints and shows as text, pictures aside; "" for cells that depend on the machine."""
    return [
        "" if MACHINE in cell.metadata.get("tags", ()) else "".join(map(_text, cell.outputs))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def pictures(notebook: NotebookNode) -> list[int]:
    """How many pictures each code cell draws."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    return "" if "image/png" in data else data.get("text/plain", "")


def _normalised(notebook: NotebookNode) -> NotebookNode:
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    count = 0
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02}"
        cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        # What a library writes to stderr is about the machine: no GPU, no compiler of another vendor.
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "stream":  # a print that was forgotten in the HiGHS of scipy 1.17
                lines = output.text.splitlines(keepends=True)
                output.text = "".join(line for line in lines if not line.startswith("HighsMipSolverData"))
            if "execution_count" in output:
                output.execution_count = count
            if "image/png" in output.get("data", {}):
                output.data = {"image/png": output.data["image/png"], "text/plain": "<picture>"}
    return notebook


def main(chosen: list[str]) -> None:
    for path in notebooks():
        if chosen and not path.name.startswith(tuple(chosen)):
            continue
        start = time.perf_counter()
        nbformat.write(run(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
