"""The shape of the package: no module imports in a circle, and what knows no Thunder loads without it."""

import subprocess
import sys
from graphlib import TopologicalSorter

import grimp


def test_no_module_imports_itself_over_others():
    graph = grimp.build_graph("thunder_mem", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_algorithms_load_without_thunder():
    """By name, as the package itself imports Thunder when it is loaded."""
    program = """
import importlib, pkgutil, sys, types
package = types.ModuleType("thunder_mem")
package.__path__ = ["thunder_mem"]
sys.modules["thunder_mem"] = package
for room in ("memory", "schedule", "fusion", "partition"):
    for module in pkgutil.iter_modules([f"thunder_mem/{room}"], f"thunder_mem.{room}."):
        importlib.import_module(module.name)
sys.exit("thunder" in sys.modules or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
