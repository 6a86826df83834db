"""Read the text forms of `recompute=` and `offload=`, without a program and without PyTorch.

So the command line refuses a mistyped pattern at once. Nothing here is ever evaluated, and sizes are bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_mem.memory.outside_input import quoted, read_json, whole_number

__all__ = [
    "LAYERWISE",
    "MAX_CHARACTERS",
    "MAX_ENTRIES",
    "ONLY",
    "STRATEGIES",
    "Entry",
    "Written",
    "offload_pattern",
    "read_entries",
]

Written = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]

LAYERWISE = "layerwise"
STRATEGIES = ("none", "recompute", "compromised")  # ONNX Runtime's 0, 1 and 2
MAX_CHARACTERS = 2**20
MAX_ENTRIES = 10_000
ONLY = "only:"


@dataclass(frozen=True)
class Entry:
    """The strategy for the occurrences of one pattern.

    Attributes:
        pattern: its name, ending in "+".
        strategy: "none" keeps them, "recompute" recomputes them, "compromised" keeps the values before
            their casts.
        count: their number, in program order; -1 for all.
    """

    pattern: str
    strategy: str = "recompute"
    count: int = -1

    def __str__(self) -> str:
        return f"{self.pattern}:{self.strategy}:{self.count}"


def read_entries(given: Written) -> tuple[tuple[Entry, ...], bool]:
    """The entries of a configuration of recomputation, and whether it is layerwise.

    Args:
        given: as for `parse_config`.

    Raises:
        ValueError, OSError: as `parse_config`.
    """
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        try:
            return _parsed(read_json(given, MAX_CHARACTERS))
        except ValueError as error:
            raise ValueError(f"{os.fspath(given)}: {error}") from error
    return _parsed(given)


def _parsed(given: Any) -> tuple[tuple[Entry, ...], bool]:
    if isinstance(given, str):
        _check_size(len(given), MAX_CHARACTERS, "characters")
        given = given.split(",") if given.strip() else []
    if isinstance(given, Mapping):
        _check_size(len(given), MAX_ENTRIES, "entries")
        layerwise = given.get(LAYERWISE, False)
        if not isinstance(layerwise, bool):
            raise ValueError(f"{LAYERWISE!r} is true or false, not {quoted(layerwise)}")
        return _unambiguous((_entry_of(k, v) for k, v in given.items() if k != LAYERWISE), layerwise)
    if isinstance(given, Sequence) and all(isinstance(text, str) for text in given):
        _check_size(len(given), MAX_ENTRIES, "entries")
        texts = [text.strip() for text in given]
        return _unambiguous((_entry(text) for text in texts if text != LAYERWISE), LAYERWISE in texts)
    raise ValueError(f"a recompute configuration is a string, a list of strings, a dict or a path, not {quoted(given)}")


def _unambiguous(entries: Iterable[Entry], layerwise: bool) -> tuple[tuple[Entry, ...], bool]:
    by_pattern: dict[str, Entry] = {}
    for entry in entries:
        if entry.pattern in by_pattern:
            raise ValueError(f"two entries speak of {entry.pattern}: {by_pattern[entry.pattern]} and {entry}")
        by_pattern[entry.pattern] = entry
    if not by_pattern and not layerwise:
        raise ValueError(f"the recompute configuration is empty; it is {_FORM}")
    return tuple(by_pattern.values()), layerwise


_FORM = f'"Pattern:strategy:count,..." or "{LAYERWISE}"'


def _entry(text: str) -> Entry:
    fields = [field.strip() for field in text.split(":")]
    if len(fields) == 1:
        raise ValueError(
            f'{quoted(text)} is neither "{LAYERWISE}" nor an entry Pattern:strategy:count, such as Gelu+:recompute:-1'
        )
    if len(fields) != 3:
        raise ValueError(f"{quoted(text)} has {len(fields)} fields, not 3: an entry is Pattern:strategy:count")
    return _checked(text, *fields)


def _entry_of(pattern: object, value: object) -> Entry:
    if isinstance(value, Mapping):
        if unknown := set(value) - {"strategy", "count"}:
            field = quoted(min(map(str, unknown)))
            raise ValueError(f"{quoted(pattern)} has the unknown field {field}, beside strategy and count")
        return _checked(f"{pattern}: {dict(value)}", pattern, value.get("strategy", 1), value.get("count", -1))
    return _checked(f"{pattern}: {value}", pattern, value, -1)


def _checked(text: str, pattern: object, strategy: object, count: object) -> Entry:
    said = quoted(text, 100)
    words = pattern.removesuffix("+").split("+") if isinstance(pattern, str) else []
    if not words or not all(w.isidentifier() for w in words):
        raise ValueError(
            f"{said}: a pattern is names of operations joined by +, such as Gelu+, not {quoted(pattern, 100)}"
        )
    numbers = {str(i): name for i, name in enumerate(STRATEGIES)}
    known = None if isinstance(strategy, bool) else numbers.get(str(strategy), str(strategy))
    if known not in STRATEGIES:
        raise ValueError(f"{said}: the strategy is {' or '.join(STRATEGIES)} (or 0, 1, 2), not {quoted(strategy, 100)}")
    number = _integer(count)
    if number is None or not (number == -1 or number > 0):
        raise ValueError(f"{said}: the count is a number above 0, or -1 for all, not {quoted(count, 100)}")
    return Entry("+".join(words) + "+", known, number)


def _integer(count: object) -> int | None:
    if isinstance(count, str):
        return whole_number(count)
    return count if type(count) is int and abs(count) < 10**9 else None


def _check_size(size: int, most: int, what: str) -> None:
    if size > most:
        raise ValueError(f"the recompute configuration has {size:,} {what}, more than {most:,}")


def offload_pattern(given: str) -> str:
    """The pattern of "only:PATTERN".

    Raises:
        ValueError: another form.
    """
    words = given.removeprefix(ONLY).strip().removesuffix("+").split("+")
    if not given.startswith(ONLY) or not all(word.isidentifier() for word in words):
        raise ValueError(
            f'offload is True, False or "{ONLY}PATTERN", with a pattern as recompute_table names them, such as '
            f'"{ONLY}Gelu+", not {quoted(given)}'
        )
    return "+".join(words) + "+"
