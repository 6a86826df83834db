"""The entry point of `thunder-mem`: it reads the arguments before PyTorch and Thunder, whose imports take seconds.

So mistyped arguments are answered at once. Only then is the package imported, without the warnings of Thunder's own
imports about other packages that could be installed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["main"]

_PACKAGES = ("thunder_mem", "thunder_mem.command_line")


def main(words: Sequence[str] | None = None) -> int:
    """Run `thunder-mem` with the given words, by default the process' own; return the exit code."""
    with _without_their_imports():
        from thunder_mem.command_line.arguments import read_words

        options = read_words(words)
    if isinstance(options, int):
        return options
    with warnings.catch_warnings():
        if not options.debug:
            warnings.simplefilter("ignore")
        from thunder_mem.command_line.answers import answer
    return answer(options)


@contextlib.contextmanager
def _without_their_imports() -> Iterator[None]:
    """Import modules that need neither PyTorch nor Thunder without their package, and forget them at the end, so
    that later imports of the package are unaffected."""
    if "thunder_mem" in sys.modules:
        yield
        return
    for name in _PACKAGES:
        bare = ModuleType(name)
        bare.__path__ = [str(Path(__file__).parent.joinpath(*name.split(".")))]
        sys.modules[name] = bare
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGES[0]]:
            del sys.modules[name]


if __name__ == "__main__":
    sys.exit(main())
