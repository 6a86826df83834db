"""Plans as comparable plain data, and the first difference between two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.plan import Plan

__all__ = ["differing_part", "plan_json"]


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, without source lines."""
    found = plan.to_json()
    for decision in found["decisions"]:
        del decision["source"]
    found["refused"] = [refused["what"] for refused in found["refused"]]  # its reasons name source lines
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def differing_part(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first part in which two results of `plan_json` differ, and its value in each; None if equal.

    Example:
        >>> differing_part({"sort": "lpmf", "regions": [1, 2]}, {"sort": "lpmf", "regions": [1, 3]})
        ('number 1 of its regions', '2', '3')
    """
    for key in sorted({*mine, *theirs}):
        here, there = mine.get(key), theirs.get(key)
        if _text(here) == _text(there):  # `repr` distinguishes 1 from True
            continue
        if isinstance(here, list) and isinstance(there, list):
            pairs = enumerate(zip(here, there, strict=False))
            at = next((i for i, (a, b) in pairs if _text(a) != _text(b)), None)
            if at is None:
                return f"the number of its {key}", str(len(here)), str(len(there))
            return f"number {at} of its {key}", shortened(_text(here[at])), shortened(_text(there[at]))
        return f"its {shortened(key, 60)}", shortened(_text(here)), shortened(_text(there))
    return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
