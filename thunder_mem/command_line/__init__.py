"""`thunder-mem`: what a program's memory will be, from the shell; see `thunder-mem --help`.

Rooms: `arguments.py` knows the options, `program.py` makes a program of a script's function or factory,
`predictions.py` compiles and predicts it, `output.py` lays out what is printed, `main.py` joins them
and answers with an exit code.
"""

from thunder_mem.command_line.main import main

__all__ = ["main"]
