"""Bytes, and numbers, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from thunder_mem.memory.outside_input import quoted

__all__ = ["change", "counted", "parse_bytes", "ranges", "size"]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_bytes(size: str | int) -> int:
    """Bytes from a size such as "40GiB", "512 MiB", "80GB" (powers of 1000) or 1048576.

    Raises:
        ValueError: not such a size, or not above 0.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("2 KB"), parse_bytes(7)
        (1536, 2000, 7)
    """
    match = re.fullmatch(r" *([0-9]{1,18}(?:\.[0-9]{1,18})?) *([a-zA-Z]*) *", str(size))
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    if match and "." in match[1] and factor == 1:
        raise ValueError(f"{quoted(size)} is not a size: a number with a decimal point needs a unit, such as GiB or MB")
    if match is None or factor is None or isinstance(size, bool):
        raise ValueError(f"{quoted(size)} is not a size: write a number and a unit, such as 40GiB, 512MiB or 80GB")
    nbytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if nbytes <= 0:
        raise ValueError(f"a size is above 0, not {quoted(size)}")
    return nbytes


def change(before_bytes: int, after_bytes: int) -> str:
    """The change from one figure to another in percent; "" if the first is 0.

    Example:
        >>> change(200, 150), change(1000, 1001), change(10_000, 9_999), change(0, 5)
        ('-25.0%', '+0.1%', '0.0%', '')
    """
    if not before_bytes:
        return ""
    text = f"{after_bytes / before_bytes - 1:+.1%}"
    return text if text.strip("+-") != "0.0%" else "0.0%"


def size(nbytes: int) -> str:
    """Bytes for people.

    Example:
        >>> size(512), size(1536), size(-3 * 2**30)
        ('512 B', '1.50 KiB', '-3.00 GiB')
    """
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def counted(n: int, what: str) -> str:
    """A number of things in words.

    Example:
        >>> counted(1, "chunk"), counted(2000, "chunk")
        ('1 chunk', '2,000 chunks')
    """
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them.

    Example:
        >>> ranges([3, 0, 1, 2, 7]), ranges([4])
        ('0-3, 7', '4')
    """
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
