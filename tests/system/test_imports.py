"""The shape of the package: no module imports in a circle, and what knows no Thunder loads without it."""

import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version

import grimp
import pytest

import thunder_mem


def test_no_module_imports_itself_over_others():
    graph = grimp.build_graph("thunder_mem", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_algorithms_load_without_thunder():
    program = """
import importlib, pkgutil, sys
for room in ("memory", "schedule", "fusion", "partition"):
    for module in pkgutil.iter_modules([f"thunder_mem/{room}"], f"thunder_mem.{room}."):
        importlib.import_module(module.name)
sys.exit("thunder" in sys.modules or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_public_names_are_there_however_they_are_asked_for():
    names = {}
    exec("from thunder_mem import *", names)
    assert set(thunder_mem.__all__) <= names.keys() and set(thunder_mem.__all__) <= set(dir(thunder_mem))
    assert thunder_mem.MemEfficient is names["MemEfficient"] and thunder_mem.fx.subgraphs
    assert thunder_mem.__version__ == version("thunder-mem")
    for name in ("MemEficient", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'thunder_mem' has no attribute '{name}'"):
            getattr(thunder_mem, name)
    with pytest.raises(ImportError, match="cannot import name 'MemEficient'"):
        exec("from thunder_mem import MemEficient")
