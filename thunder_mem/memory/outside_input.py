"""Strict readers of outside input (numbers, JSON, files), and short quotes of it for messages."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

__all__ = ["quoted", "read_json", "replace_file", "shortened", "whole_number"]

_QUOTED = 200
_DIGITS = 9


def quoted(given: object, most: int = _QUOTED) -> str:
    """The `repr` of a value for a message, shortened to a number of characters.

    Example:
        >>> quoted("40GB"), len(quoted("9" * 5000))
        ("'40GB'", 200)
    """
    return shortened(repr(given), most)


def shortened(text: str, most: int = _QUOTED) -> str:
    """A text, shortened to a number of characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def whole_number(text: str) -> int | None:
    """The integer in a text of at most nine ASCII digits, with an optional minus; None for any other text.

    Example:
        >>> whole_number("12"), whole_number("-1"), whole_number("1_0"), whole_number("１"), whole_number("1\\n")
        (12, -1, None, None, None)
    """
    return int(text) if re.fullmatch(rf"-?[0-9]{{1,{_DIGITS}}}", text) else None


def read_json(path: str | os.PathLike[str], max_bytes: int) -> Any:
    """The content of a JSON file whose objects have unique keys and whose numbers are finite.

    Raises:
        ValueError: it is too large, or not such a file: "it is not JSON: ..."; the caller adds the file's name.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=_each_once, parse_float=_finite, parse_constant=_finite
        )
    except _NotStrict:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


class _NotStrict(ValueError):
    """Python's parser accepts the text as JSON, but this stricter reader does not."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _NotStrict(f"it has the key {quoted(key)} twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise _NotStrict(f"it holds {quoted(text)}, which is no number here")
    return number


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a file as a whole: a concurrent reader finds the old or the new content. A failure leaves nothing behind.

    Raises:
        OSError: there is no such folder, the path is a folder, or it may not be written.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}")
    new = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
