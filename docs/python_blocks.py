"""The Python blocks of a page as one program: ``python -m docs.python_blocks README.md > readme.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def program(page: str) -> str:
    """The blocks in the order of the page."""
    return "\n".join(re.findall(r"^```python[^\n]*\n(.*?)^```$", page, re.S | re.M))


if __name__ == "__main__":
    sys.stdout.write(program(Path(sys.argv[1]).read_text(encoding="utf-8")))
