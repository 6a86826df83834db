"""Empties one function, named in the environment, before any test is collected."""

from __future__ import annotations

import os

import pytest

from tests.mutants.mutate import empty

VARIABLE = "THUNDER_MEM_MUTANT"


def pytest_configure(config: pytest.Config) -> None:
    if (name := os.environ.get(VARIABLE)) and not empty(name):
        pytest.exit(f"{name} cannot be emptied", returncode=5)
