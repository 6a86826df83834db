"""thunder_mem: make programs compiled by lightning-thunder use less memory.

Its names are those of `_api.py`, which the first use of any of them imports, and PyTorch and Thunder with it. So the
command line answers mistyped words at once, `thunder_mem.compat` can come before Thunder, and the algorithms load
without either.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thunder_mem._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name not in ("__all__", "__version__"):  # Python's own questions, such as __path__
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("thunder_mem._api")
    if name in ("__all__", "__version__", *api.__all__):
        return getattr(api, name)
    try:
        return globals()[name]  # a package that `_api` has imported
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("thunder_mem._api").__all__})
