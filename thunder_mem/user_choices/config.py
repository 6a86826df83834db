"""Configurations of recomputation: ``"Gelu+:recompute:-1,Cast+:compromised:4"``, a dict or a JSON file.

The form is that of ONNX Runtime's memory optimizer, `Pattern:strategy:count`. Unlike there, an entry that cannot take
effect is an error: a pattern without a match, an impossible strategy, a count above the number of occurrences.
`recompute_table` prints the patterns of a program with the entry that enables each.
`written.py` reads the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from thunder_mem.partition.constraints import Constraints, RecomputeError
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.user_choices.layerwise import layerwise_choices
from thunder_mem.user_choices.patterns import (
    Occurrence,
    candidates,
    leaves_nothing,
    names_empty_values,
    occurrences,
)
from thunder_mem.user_choices.written import LAYERWISE, Entry, Written, read_entries

__all__ = ["ENVIRONMENT", "RecomputeConfig", "choices_of", "from_environment", "parse_config"]

ENVIRONMENT = "THUNDER_MEM_RECOMPUTE"


@dataclass(frozen=True)
class RecomputeConfig:
    """A configuration; `str()` gives the text that parses to it, `to_json` the dict.

    Attributes:
        entries: one per pattern.
        layerwise: each layer of the model keeps the values that it passes to the next, and all values
            inside are recomputed.
    """

    entries: tuple[Entry, ...] = ()
    layerwise: bool = False

    def __str__(self) -> str:
        return ",".join([*([LAYERWISE] if self.layerwise else []), *map(str, self.entries)])

    def to_json(self) -> dict[str, Any]:
        """A dict that `parse_config` takes."""
        found: dict[str, Any] = {LAYERWISE: True} if self.layerwise else {}
        return found | {e.pattern: {"strategy": e.strategy, "count": e.count} for e in self.entries}

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Constraints:
        """See `PartitionPolicy`.

        Raises:
            RecomputeError: a pattern has no match, or its strategy or count does not fit its matches. A match
                without bytes, as in a batch without rows, is no error: the next batch may have some.
        """
        choices = layerwise_choices(source) if self.layerwise else Constraints()
        if not self.entries:
            return choices
        found, refused = candidates(source, rebuilt)
        known = occurrences(found)
        for entry in self.entries:
            matched = [o for o in known if o.pattern == entry.pattern]
            if not matched and names_empty_values(entry.pattern, source):
                continue
            spared = leaves_nothing(entry.pattern, source)
            if not matched and not spared:
                reasons = [r.reason for r in refused if r.pattern == entry.pattern]
                raise RecomputeError(_matches_nothing(entry.pattern, (o.pattern for o in known), reasons))
            if entry.count > (there := len(matched) + spared):
                raise RecomputeError(f"{entry} asks for {entry.count}, but {entry.pattern} occurs {there} times")
            chosen = matched if entry.count < 0 else matched[: entry.count]
            choices = _merged(choices, choices_of(entry, chosen), entry)
        return choices


def parse_config(given: Written) -> RecomputeConfig:
    """Parse a configuration of recomputation.

    Args:
        given: "Pattern:strategy:count,..." with the strategies none, recompute and compromised (or 0, 1
            and 2) and a count of occurrences (-1: all), or "layerwise", or both. Also a list of such strings;
            a dict from patterns to a strategy or to {"strategy": ..., "count": ...}; or the path of a JSON file
            (ending in ".json") that holds such a list or dict.

    Raises:
        ValueError: anything else; the message says what was given and what is accepted, and names the file.
        OSError: the file cannot be read.

    Example:
        >>> str(parse_config({"Gelu+": "recompute", "Cast+": {"strategy": 2, "count": 4}}))
        'Gelu+:recompute:-1,Cast+:compromised:4'
    """
    return RecomputeConfig(*read_entries(given))


def from_environment() -> RecomputeConfig | None:
    """The configuration in the environment variable `THUNDER_MEM_RECOMPUTE`, in any form; None if it is not set.

    Raises:
        ValueError: as `parse_config`, with the variable's name.
    """
    text = os.environ.get(ENVIRONMENT, "").strip()
    try:
        return parse_config(text) if text else None
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}: {error}") from error


def _matches_nothing(pattern: str, known: Iterable[str], reasons: Sequence[str]) -> str:
    if reasons:
        return f"{pattern} cannot be recomputed: {reasons[0]}"
    names = sorted(set(known))
    near = get_close_matches(pattern, names, n=5, cutoff=0.5) or names[:20]
    listed = f"the nearest that do: {', '.join(near)}" if near else "the backward receives nothing that could be"
    return f"the pattern {pattern} matches nothing in this program; {listed}"


def choices_of(entry: Entry, chosen: Sequence[Occurrence]) -> Constraints:
    """An entry's constraints for the occurrences of its pattern.

    Raises:
        RecomputeError: no occurrence has a compromise.
    """
    parts = [c for o in chosen for c in o.candidates]
    if entry.strategy == "none":
        return Constraints(must_save=frozenset(c.storage for c in parts))
    if entry.strategy == "recompute":
        return Constraints(
            must_recompute=frozenset(c.storage for c in parts),
            may_recompute=frozenset(s for c in parts for s in c.inner),
        )
    parts = [c for c in parts if c.compromise]
    if not parts:
        raise RecomputeError(f"{entry}: nothing there is cast from a smaller value, so there is no compromise")
    return Constraints(
        must_save=frozenset(c.compromise[0] for c in parts),
        must_recompute=frozenset(c.storage for c in parts),
        may_recompute=frozenset(s for c in parts for s in c.compromise[1:-1]),
    )


def _merged(choices: Constraints, more: Constraints, entry: Entry) -> Constraints:
    if choices.must_save & more.must_recompute or choices.must_recompute & more.must_save:
        raise RecomputeError(f"{entry} contradicts another entry: the same value is to be kept and to be recomputed")
    return choices | more
