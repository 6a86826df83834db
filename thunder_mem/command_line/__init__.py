"""`thunder-mem`: predict a program's memory from the shell; see `thunder-mem --help`.

`arguments.py` has the options, and `program.py` makes a program from a script's function or factory. `predictions.py`
compiles and predicts it. `output.py` formats the output. `main.py` joins them and returns an exit code.
"""

from thunder_mem.command_line.main import main

__all__ = ["main"]
