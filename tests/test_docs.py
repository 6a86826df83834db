"""What the documentation shows runs: README's code blocks in order, and every doctest of the package."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import thunder_mem

README = Path(__file__).parent.parent / "README.md"
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(thunder_mem.__path__, "thunder_mem.") if "__main__" not in m.name
)


def test_readme_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["plan"].candidates
    assert namespace["prediction"].phase("backward").peak_bytes > 2**30


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
