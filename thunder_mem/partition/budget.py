"""A limit for the peak, as users write it."""

from __future__ import annotations

import re

from thunder_mem.memory.outside_input import quoted
from thunder_mem.memory.units import parse_bytes, size

__all__ = ["BudgetError", "parse_budget"]

_ACCEPTED = 'bytes as an int, a size such as "40GiB" or "12.5 GB", or a share of the device\'s memory such as "80%"'


class BudgetError(RuntimeError):
    """No plan keeps the peak within the budget.

    Attributes:
        budget_bytes: the given budget.
        smallest_peak_bytes: the smallest peak found.
    """

    def __init__(
        self, budget_bytes: int, smallest_peak_bytes: int, held: str, share: str = "", compiled_bytes: int | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        compiled = (
            'on_infeasible="warn" compiles that one.'
            if compiled_bytes is None
            else f"A plan of {_readable(compiled_bytes)} is compiled, because it leaves less alive for a loss outside."
        )
        super().__init__(
            f"no plan keeps the peak within {share and f'{share}, '}{_readable(budget_bytes)}: the smallest found is "
            f"{_readable(smallest_peak_bytes)}, held by {held}. {compiled}"
        )


def _readable(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{size(nbytes)} ({nbytes:,} bytes)"


def parse_budget(budget: int | str, memory_bytes: int = 100) -> int:
    """The bytes of a budget in the form of `MemEfficient(budget=...)`.

    Args:
        budget: bytes, a size with a decimal or binary unit, or a percentage.
        memory_bytes: the memory to which a percentage refers.

    Raises:
        TypeError: neither an int nor a string.
        ValueError: not positive, an unknown unit, or a percentage outside of (0, 100].

    Example:
        >>> parse_budget("1.5 GiB"), parse_budget("2MB"), parse_budget(4096)
        (1610612736, 2000000, 4096)
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise TypeError(f"budget is {_ACCEPTED}, not {quoted(budget)}")
    if isinstance(budget, int):
        if budget <= 0:
            raise ValueError(f"budget is {_ACCEPTED}, and positive, not {quoted(budget)}")
        return budget
    try:
        if match := re.fullmatch(r" *([0-9]{1,3}(?:\.[0-9]{1,9})?) *% *", budget):
            if not 0 < float(match[1]) <= 100:
                raise ValueError(f"a percentage is above 0 and at most 100, not {quoted(budget)}")
            return int(memory_bytes * float(match[1]) / 100)
        return parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"budget is {_ACCEPTED}: {error}") from None
