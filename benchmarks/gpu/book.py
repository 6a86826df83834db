"""The run book's own work: steps in order, each a process with a time limit, verdicts in one file, resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "NEEDS_GPU", "OUT_OF_TIME", "PASSED", "STOPPED", "Step", "command_of", "load", "run_book", "save"]

STOPPED = 3
"""The exit status of a step that its own clock ended."""
PASSED, FAILED, OUT_OF_TIME, NEEDS_GPU = "passed", "failed", "out of time", "needs a GPU"

Verdict = dict[str, Any]
"""`verdict`, one of the four above; what ran also has `command`, `limit_s`, `wall_s`, and `error` if it failed."""


@dataclass(frozen=True)
class Step:
    """Something to find out.

    Attributes:
        name: of the step, in the file and on the command line.
        says: what it finds out.
        minutes: it may take; None for all that is left.
        kinds: of devices it runs on: "cuda", "cpu", "simulate".
    """

    name: str
    says: str
    minutes: float | None
    kinds: tuple[str, ...]


def command_of(step: Step, device: str, out: Path, minutes: float) -> list[str]:
    """What runs a step: it adds what it finds to `out`, and ends with 0 if all is as it should be."""
    arguments = [step.name, "--device", device, "--out", str(out), "--minutes", f"{minutes:.2f}"]
    return [sys.executable, "-m", "benchmarks.gpu.steps", *arguments]


def load(out: Path) -> dict[str, Any]:
    """The file of an earlier run: `verdicts` by step, and `found`, what each step found; empty if there is none."""
    return json.loads(out.read_text()) if out.exists() else {"verdicts": {}, "found": {}}


def run_book(
    steps: Sequence[Step],
    device: str,
    out: Path,
    minutes: float,
    *,
    command: Callable[[Step, str, Path, float], list[str]] = command_of,
    say: Callable[[str], None] = print,
) -> dict[str, Verdict]:
    """Run what has not passed yet, in order.

    Args:
        steps: in the order in which they run.
        device: "cuda", "cpu", or "simulate:NAME" for a GPU that is not there.
        out: the file of verdicts, kept up to date; what has passed in it for this device is not run again.
        minutes: for all together; a step that would begin later keeps no verdict, and waits for the next run.
        command: what runs a step, in at most the minutes given.
        say: told each verdict.

    Returns:
        The verdicts so far, by the steps' names.

    Raises:
        ValueError: the file is of another device.
    """
    record = load(out)
    if record.setdefault("device", device) != device:
        raise ValueError(f"{out} is of {record['device']}, not of {device}: choose another file")
    save(out, record)
    deadline = time.monotonic() + 60 * minutes
    for step in steps:
        if record["verdicts"].get(step.name, {}).get("verdict") == PASSED:
            continue
        if device.partition(":")[0] not in step.kinds:
            verdict: Verdict = {"verdict": NEEDS_GPU}
        else:
            left_s = deadline - time.monotonic()
            limit_s = left_s if step.minutes is None else min(left_s, 60 * step.minutes)
            if limit_s <= 0:
                say(f"{step.name}: not begun, the {minutes:g} minutes are over")
                break
            verdict = _run(command(step, device, out, limit_s / 60), limit_s, out.with_suffix(f".{step.name}.log"))
        record = load(out)  # the step has added what it found
        record["verdicts"][step.name] = {**verdict, "says": step.says}
        save(out, record)
        say(f"{step.name}: {verdict['verdict']}{_more(verdict)}")
    return record["verdicts"]


def _run(command: list[str], limit_s: float, log: Path) -> Verdict:
    """One step; past its limit, it ends with all processes that it started."""
    begun = time.monotonic()
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    verdict = {
        "verdict": {None: OUT_OF_TIME, STOPPED: OUT_OF_TIME, 0: PASSED}.get(status, FAILED),
        "command": command,
        "limit_s": round(limit_s, 1),
        "wall_s": round(time.monotonic() - begun, 1),
        "log": log.name,
    }
    if verdict["verdict"] == FAILED:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        verdict["error"] = (lines or [f"exit status {status}"])[-1][:400]
    return verdict


def _more(verdict: Mapping[str, Any]) -> str:
    took = f" in {verdict['wall_s']:.0f} s" if "wall_s" in verdict else ""
    return took + (f": {verdict['error']}" if "error" in verdict else "")


def save(out: Path, record: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that a run that is stopped leaves a whole one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, out)
