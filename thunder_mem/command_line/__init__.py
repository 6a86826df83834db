"""`thunder-mem`: predict a program's memory from the shell; see `thunder-mem --help`.

`arguments.py` has the options, which it checks with `early_checks.py`, and `program.py` makes a program from a
script's function or factory. `predictions.py` compiles and predicts it, as `questions.py` asks, with the optimizer and
the loss of `training.py`. `output.py` formats the output. `answers.py` joins them and returns an exit code. Importing
this package imports none of them: the options are read before PyTorch and Thunder, whose imports take seconds. So
mistyped arguments are answered at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `thunder-mem` with the given arguments, by default the process' own; return the exit code."""
    from thunder_mem.command_line.arguments import read_words

    options = read_words(arguments)
    if isinstance(options, int):
        return options
    with warnings.catch_warnings():  # of Thunder's imports, about other packages that could be installed
        if not options.debug:
            warnings.simplefilter("ignore")
        import thunder_mem.compat  # noqa: F401 - before Thunder; the process is the command's own
        from thunder_mem.command_line.answers import answer
    return answer(options)
