"""A limit for the peak, as users write it, and what came of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from thunder_mem.outside import quoted
from thunder_mem.sizes import parse_bytes, size

__all__ = ["BudgetError", "BudgetOutcome", "device_memory_bytes", "parse_budget", "share_in_words"]

_ACCEPTED = 'bytes as an int, a size such as "40GiB" or "12.5 GB", or a share of the device\'s memory such as "80%"'


class BudgetError(RuntimeError):
    """No plan keeps the peak within the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_peak_bytes: the smallest peak that was found.
    """

    def __init__(self, budget_bytes: int, smallest_peak_bytes: int, held: str, share: str = "") -> None:
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        super().__init__(
            f"no plan keeps the peak within {share and f'{share}, '}{_readable(budget_bytes)}: the smallest found is "
            f"{_readable(smallest_peak_bytes)}, held by {held}. "
            'on_infeasible="warn" compiles that one.'
        )


def _readable(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{size(nbytes)} ({nbytes:,} bytes)"


@dataclass(frozen=True)
class BudgetOutcome:
    """What a budget bought.

    Attributes:
        budget_bytes: the limit.
        peak_bytes: the exact peak of the plan.
        recompute_ms: what the repetitions cost by the cost model, beyond those that are free.
        bound_ms: no choice within the budget is known to cost less than this, repetitions and what is exposed of
            copies to the host together; 0 means that no bound is known.
        method: "free" (it fits without repeating anything costly), "ladder", "milp", or "smallest"
            where nothing fits.
        offloaded: names of the values that the backward fetches from the host, in the order in which they leave.
        host_bytes: what they take there, which is part of no peak.
        link_ms: how long their copies take, both ways.
        exposed_ms: how much of that is not hidden behind other work.
        without_offload_ms: what repetitions alone would cost; None if those do not fit, or nothing is offloaded.
    """

    budget_bytes: int
    peak_bytes: int
    recompute_ms: float
    bound_ms: float
    method: str
    offloaded: tuple[str, ...] = ()
    host_bytes: int = 0
    link_ms: float = 0.0
    exposed_ms: float = 0.0
    without_offload_ms: float | None = None

    @property
    def cost_ms(self) -> float:
        """What the budget costs in all."""
        return self.recompute_ms + self.exposed_ms

    @property
    def gap(self) -> float:
        """How far `cost_ms` may be above the least, relative to it."""
        return 0.0 if self.cost_ms <= self.bound_ms else 1.0 - self.bound_ms / self.cost_ms


def parse_budget(budget: int | str, device: torch.device | None = None) -> int:
    """Bytes of a budget as `MemEfficient(budget=...)` takes it.

    Args:
        budget: bytes, a size with a decimal or binary unit, or a percentage.
        device: what a percentage is of; None only checks it.

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
            return int((device_memory_bytes(device) if device else 100) * float(match[1]) / 100)
        return parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"budget is {_ACCEPTED}: {error}") from None


def share_in_words(budget: int | str, device: torch.device) -> str:
    """Of a percentage, what it is of: "80% of the cpu's 23.50 GiB"; "" for a budget in bytes.

    Args:
        budget: as `parse_budget` takes it.
        device: the one that is planned for.
    """
    if not isinstance(budget, str) or not budget.strip().endswith("%"):
        return ""
    name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)
    return f"{budget.strip()} of the {name}'s {size(device_memory_bytes(device))}"


def device_memory_bytes(device: torch.device) -> int:
    """The whole memory of a device: of the GPU (the simulated one inside `simulate`), or of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
