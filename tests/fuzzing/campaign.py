"""Judging configurations on programs, one after the other, and counting."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from random import Random
from unittest.mock import patch
from weakref import WeakValueDictionary

import thunder
import torch

from tests.checking.defects import defect_of
from tests.checking.oracle import Expectation, Invalid, check, expect
from tests.fuzzing.configs import (
    CONFIGS,
    Config,
    Options,
    configured,
    draw_options,
    plain,
    traced_once,
)
from tests.fuzzing.quick import quickly
from tests.fuzzing.smallest import made_for
from tests.fuzzing.stepping import has_updates, stepped
from tests.programs.generate import Profile, generate
from tests.programs.programs import Program, function, source
from thunder_mem.regions import pointwise_executor

__all__ = ["Campaign", "Failure", "campaign", "judge", "kind", "verdict"]

# Nothing takes so long; what does has hung.
MOST_SECONDS = 600

# Excuses that no defect's own words tell, and their names.
_ROUNDS, _EXECUTOR = "rounds otherwise: ", "with the same executors and without MemEfficient: "
_OVERFLOWS = "16 bits overflow where a region is not compiled: "
_OTHER_EXCUSES = {
    _ROUNDS: "rounding",
    _EXECUTOR: "Thunder's torchcompile",
    _OVERFLOWS: "16 bits in a region that is not compiled",
}

# What a program may be refused with that options ask too much of, and by which option.
_REFUSALS = {"BudgetError": "budget", "RecomputeError": "recompute"}


@dataclass
class Failure:
    """One kind of failure, and the shortest program that shows it."""

    seed: int
    program: Program
    config: Config
    differences: list[str]
    alike: str
    programs: int = 0


@dataclass
class Campaign:
    """Counts of one run, by configuration and verdict, and the first program of every kind of failure.

    Attributes:
        next_seed: where to go on.
        programs: how many valid ones ran.
        whole: how many of these through Thunder's interpreter.
        verdicts: by name of the configuration ("drawn" for all that are drawn) and verdict.
        options: how often each option was drawn with each value.
        refused: what eager or the oracle refused, by reason.
        excuses: the defects of plain Thunder that excuse a failure, by name; see `defects.py`.
        excused: a seed for each of these.
        failures: by configuration and kind of difference.
    """

    next_seed: int
    programs: int = 0
    whole: int = 0
    verdicts: Counter = field(default_factory=Counter)
    options: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    excuses: Counter = field(default_factory=Counter)
    excused: dict[str, int] = field(default_factory=dict)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)


def kind(difference: str) -> str:
    """A difference without its numbers, to count alike ones together."""
    return re.sub(r"(\[[\d, ]*\]|\([\w, ]*\)|\d+(\.\d+)?(e[-+]?\d+)?|inf|nan)", "_", difference)[:110]


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the main thread when it takes longer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(
    program: Program,
    config: Config,
    expected: tuple[Expectation, ...] | None = None,
    excuse: bool = True,
    fn: Callable | None = None,
) -> tuple[str, list[str]]:
    """How `config` does on a program, and in which ways it differs from eager.

    Of an excused one, how its baseline or it shows a known defect of Thunder's; a campaign takes no other excuse.

    "right"; "refused" where its options ask for what the program does not have; "excused" where its
    baseline differs from eager too (without `excuse` only where the baseline raises, as it does where Thunder cannot
    trace the program, where `config` shows or warns of a known defect, or where both differ by rounding alone) or where
    it is right with compiled regions, which compute in float32; "raises" or "wrong".

    Raises:
        Invalid: the program proves nothing.
    """
    expected = expected or expect(program)
    fn = fn or function(source(program))
    with made_for(config.options), _within(MOST_SECONDS):
        found = _differences(program, config, expected, fn)
        if not found:
            return "right", []
        if any(found[0].startswith(f"raises {e} ") and getattr(config.options, o) for e, o in _REFUSALS.items()):
            return "refused", []
        its_own = "torchcompile" in config.options.executors and found[0].startswith("raises")
        if its_own and found == check(program, plain(config.options), expected, fn):
            return "excused", [f"{_EXECUTOR}{found[0]}"]
        if config.baseline:
            baseline = check(program, CONFIGS[config.baseline].compile, expected, fn, config.options.retain)
            if baseline and _rounds(program, found, None if found == baseline else config):
                return "excused", [f"{_ROUNDS}{found[0]}"]
            if baseline and (excuse or baseline[0].startswith("raises") or defect_of(found[0])):
                # Thunder alone may fail earlier, at a defect that is none of ours.
                return "excused", next((d for d in (baseline, found) if defect_of(d[0])), baseline)
    if not config.options.compiled and any(" off by inf," in d for d in found):
        compiled = replace(config, options=replace(config.options, compiled=True))
        with made_for(compiled.options), patch.object(pointwise_executor, "_functions", WeakValueDictionary()):
            if not _differences(program, compiled, expected, fn):
                return "excused", [f"{_OVERFLOWS}{found[0]}"]
    return "raises" if found[0].startswith("raises") else "wrong", found


def _differences(
    program: Program, config: Config, expected: tuple[Expectation, ...] | None = None, fn: Callable | None = None
) -> list[str]:
    if config.options.step:
        return stepped(program, config.options, expected or expect(program), fn or function(source(program)))
    return check(program, config.compile, expected, fn, config.options.retain)


def _rounds(program: Program, differences: Sequence[str], config: Config | None) -> bool:
    """Whether plain Thunder's differences vanish with the rounding: in float64 they are a millionth of what they were.

    So must those of `config`, if it is given.

    Its decompositions sum in another order than eager's kernels, which shows where gradients cancel to nothing.
    """
    precise = _in_float64(program)
    if precise == program or not all(" off by " in d and isfinite(_distance(d)) for d in differences):
        return False
    try:
        left = [*check(precise, thunder.jit), *([] if config is None else _differences(precise, config))]
    except Invalid:
        return False
    most = min(_distance(d) for d in differences) / 1e6
    return all(" off by " in d and _distance(d) <= most for d in left)


def _distance(difference: str) -> float:
    return float(re.search(r" off by ([^,]+),", difference)[1])  # type: ignore[index]


def _in_float64(program: Program) -> Program:
    return replace(
        program, inputs=tuple(replace(i, dtype="float64") if "float" in i.dtype else i for i in program.inputs)
    )


def judge(
    program: Program, config: Config, expected: tuple[Expectation, ...] | None = None, excuse: bool = True
) -> list[str]:
    """The differences that are `config`'s own fault; see `verdict`."""
    came_to, found = verdict(program, config, expected, excuse)
    return found if came_to in ("raises", "wrong") else []


def campaign(
    seed: int,
    profile: Profile,
    configs: Sequence[Config],
    drawn: int = 0,
    compiled_share: float = 0.0,
    excuse: bool = True,
    log: Callable = print,
    in_turn: bool = False,
    whole_share: float = 1.0,
) -> Iterator[Campaign]:
    """Run valid programs drawn from `seed`, `seed + 1`, ... without end; after each, all that was found so far.

    Args:
        seed: of the first program.
        profile: what the programs are made of.
        configs: to run every program through; those in steps only where a parameter can be updated.
        drawn: how many more are drawn for each.
        compiled_share: of those that are drawn, with fusion regions really compiled.
        excuse: differences of plain Thunder excuse the same program's.
        log: is called with a line for each failure.
        in_turn: every second program through `configs`, the others through what is drawn for them.
        whole_share: of the programs that take Thunder's own way, through its interpreter, instead of `quickly`.
    """
    result = Campaign(seed)
    splits = "split" in profile.families
    while True:
        seed, result.next_seed = result.next_seed, result.next_seed + 1
        program = generate(Random(seed), profile)
        try:
            expected = expect(program)
        except Invalid as error:
            result.refused[kind(str(error))] += 1
            continue
        result.programs += 1
        rng = Random(f"options {seed}")
        options = [draw_options(rng, program, compiled_share, splits) for _ in range(drawn)]
        stepping = has_updates(program, expected[0].eager)
        # `ChunkLossHead` alone leaves to Thunder what only `MemEfficient` gets right.
        more = [configured(replace(o, alone=o.alone and excuse, step=o.step and stepping)) for o in options]
        fn = function(source(program))
        named = [*((c.name, c) for c in configs if stepping or not c.options.step), *(("drawn", c) for c in more)]
        if in_turn:
            named = [(name, c) for name, c in named if (name == "drawn") == bool(seed % 2)]
        result.whole += (whole := rng.random() < whole_share)
        with nullcontext() if whole else quickly(directly=not splits), nullcontext() if splits else traced_once():
            found = [(name, c, *verdict(program, c, expected, excuse, fn)) for name, c in named]
        for name, config, came_to, differences in found:
            if name == "drawn":
                result.options.update(_values(config.options))
            if came_to not in ("right", "refused"):  # once more, with a trace of its own
                came_to, differences = verdict(program, config, expected, excuse)
            if came_to == "excused" and not (defect := _excuse(differences[0])):
                came_to = "excuse without a name"
            if came_to == "excused":
                result.excuses[defect] += 1
                result.excused.setdefault(defect, seed)
            elif differences:
                log(f"seed {seed}: {config.name}: {differences[0]}", flush=True)
            result.verdicts[name, came_to] += 1
            if came_to in ("raises", "wrong", "excuse without a name"):
                _keep(result, name, Failure(seed, program, config, differences, kind(differences[0])))
        if result.programs % (20 if splits else 200) == 0:
            torch._dynamo.reset()
        yield result


def _excuse(difference: str) -> str:
    """The name of what the difference of an excused configuration shows, or ""."""
    others = (name for words, name in _OTHER_EXCUSES.items() if difference.startswith(words))
    return next(others, "") or defect_of(difference)


def _values(options: Options) -> Iterator[str]:
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name == "budget":
            value = None if value is None else "bytes"
        yield f"{f.name}={value}"


def _keep(result: Campaign, name: str, failure: Failure) -> None:
    key = (name, failure.alike)
    known = result.failures.setdefault(key, failure)
    count = known.programs + 1
    if len(source(failure.program)) < len(source(known.program)):
        result.failures[key] = failure
    result.failures[key].programs = count
