"""For mkdocstrings: the section ``Example:`` of a docstring is a doctest, as ``Examples:`` is to griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Rename the section before griffe parses it; left alone it would be quoted text."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub("Examples:", obj.docstring.value)
