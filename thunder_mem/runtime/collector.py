"""Python's cyclic garbage collector, switched off for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_off"]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off, so that no release depends on its timing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
