"""`python -m thunder_mem`: the command line."""

import sys

from thunder_mem.command_line import main

if __name__ == "__main__":
    sys.exit(main())
