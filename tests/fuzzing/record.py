"""The counts of fuzzing runs as a JSON file: one entry per run, replaced while the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzzing.campaign import Campaign

__all__ = ["commit", "done", "record", "totals"]


@cache
def commit() -> str:
    """The commit that is run: the one at the first call, for the modules are loaded then."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("FUZZ_COMMIT") or asked.stdout.strip()


def record(file: Path, command: str, profile: str, result: Campaign, seconds: float) -> None:
    """Enter the counts of a run, in place of what it entered before.

    Args:
        file: is made if it does not exist.
        command: what was run; with the profile and the seeds it names the entry.
        profile: of `fuzz.PROFILES`, and where it ran if not on the CPU.
        result: the counts so far.
        seconds: how long it took so far.
    """
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    first = result.next_seed - result.programs - sum(result.refused.values())
    entry: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "profile": profile,
        "first_seed": first,
        "next_seed": result.next_seed,
        "programs": result.programs,
        "through_thunders_interpreter": result.whole,
        "refused_by_eager_or_oracle": sum(result.refused.values()),
        "seconds": round(seconds, 1),
        "verdicts": {},
        "options": dict(sorted(result.options.items())),
        "excused": {what: {"programs": n, "seed": result.excused[what]} for what, n in result.excuses.most_common()},
        "failures": [{"seed": f.seed, "config": f.config.name, "what": f.alike} for f in result.failures.values()],
    }
    for (name, came_to), n in sorted(result.verdicts.items()):
        entry["verdicts"].setdefault(name, {})[came_to] = n
    same = (command, entry["commit"], profile, first)
    runs = [r for r in runs if (r["command"], r["commit"], r["profile"], r["first_seed"]) != same]
    runs.append(entry)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"totals": totals(runs), "runs": runs}, indent=1) + "\n")
    new.replace(file)


def done(file: Path, profile: str, seed: int) -> tuple[int, int]:
    """How many programs of `profile` from `seed` on are recorded for this commit without a gap, and the next seed."""
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    longest = {
        r["first_seed"]: r
        for r in sorted(runs, key=lambda r: r["programs"])
        if (r["commit"], r["profile"]) == (commit(), profile)
    }
    programs = 0
    while seed in longest:
        programs += longest[seed]["programs"]
        seed = longest[seed]["next_seed"]
    return programs, seed


def totals(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Programs, seconds and verdicts of all runs."""
    verdicts: dict[str, int] = {}
    for entry in runs:
        for name, counts in entry["verdicts"].items():
            for came_to, n in counts.items():
                key = f"{name}: {came_to}"
                verdicts[key] = verdicts.get(key, 0) + n
    seconds = sum(entry["seconds"] for entry in runs)
    programs = sum(entry["programs"] for entry in runs)
    return {
        "programs": programs,
        "seconds": round(seconds, 1),
        "programs_per_second": round(programs / seconds, 2) if seconds else 0.0,
        "verdicts": dict(sorted(verdicts.items())),
    }
