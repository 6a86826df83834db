"""What runs tests imports Thunder and pins everything; the process that only hands them out starts without."""

import importlib
import os

import pytest

from tests.checking.durations import *  # noqa: F403 - hooks of pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.register(importlib.import_module("tests.pinned"), "pinned")
