"""Random programs against eager: `python -m tests.fuzz --programs 50000 --seed 1`.

Every program runs eager and through each configuration that this machine has. A configuration fails
on a program when it differs from eager and its baseline, plain Thunder, does not. With another
profile than "thunder" plain Thunder is no excuse. A failing program is minimised and saved under `tests/regressions/`
as a test.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import textwrap
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType

import thunder
import torch

from tests.generate import Profile, generate
from tests.minimise import minimise
from tests.oracle import Expectation, Invalid, check, expect
from tests.programs import Program, source

__all__ = ["CONFIGS", "PROFILES", "Campaign", "Config", "available", "campaign", "judge"]

REGRESSIONS = Path(__file__).parent / "regressions"

PROFILES = {
    # What plain Thunder compiles and gets right.
    "thunder": Profile(),
    # What plain Thunder gets wrong and MemEfficient must get right; see `defects.py`.
    "checkpoint": Profile(regions=("checkpoint",), in_checkpoint=Profile().families),
    "overwritten": Profile(regions=(), overwrites_needed=True),
}


@dataclass(frozen=True)
class Config:
    """One way to compile a program.

    Attributes:
        name: as `--configs` takes it.
        compile: from a function to a compiled one.
        needs: modules that must exist.
        baseline: the configuration that excuses a failure, or "" for none.
    """

    name: str
    compile: Callable[[Callable], Callable]
    needs: tuple[str, ...] = ()
    baseline: str = ""


_MEM = "thunder_mem.transforms.mem_efficient"
_POINTWISE = "thunder_mem.executors"


def _pointwise(**options: object) -> Callable[[Callable], Callable]:
    def compile(fn: Callable) -> Callable:
        from thunder_mem.executors import mem_pointwise_ex

        return thunder.jit(fn, executors=[mem_pointwise_ex, *thunder.extend.get_default_executors()], **options)

    return compile


def _mem(jit_options: Mapping[str, object] = MappingProxyType({}), **options: object) -> Callable[[Callable], Callable]:
    def compile(fn: Callable) -> Callable:
        from thunder_mem.transforms.mem_efficient import MemEfficient

        return thunder.jit(fn, transforms=[MemEfficient(strict=True, **options)], **jit_options)

    return compile


CONFIGS = {
    c.name: c
    for c in (
        Config("thunder", thunder.jit),
        Config("pointwise", _pointwise(), (_POINTWISE,), "thunder"),
        Config("dataflow", _pointwise(fusion_type="dataflow"), (_POINTWISE,), "thunder"),
        Config("mem", _mem(), (_MEM,), "thunder"),
        Config("mem-no-fusion", _mem({"executors": []}), (_MEM,), "thunder"),
    )
}


def available() -> tuple[Config, ...]:
    """The configurations whose modules exist here."""

    def exists(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return tuple(c for c in CONFIGS.values() if all(map(exists, c.needs)))


@contextmanager
def uncompiled_regions() -> Iterator[None]:
    """Fusion regions run one operation at a time: a compilation takes seconds, and planning can err without it."""
    if importlib.util.find_spec(_POINTWISE) is None:
        yield
        return
    from thunder_mem import compiled_region

    compiler = compiled_region._compile
    compiled_region._compile = lambda unfused, args: unfused
    try:
        yield
    finally:
        compiled_region._compile = compiler


def judge(
    program: Program, config: Config, expected: tuple[Expectation, ...] | None = None, excuse: bool = True
) -> list[str]:
    """The differences that are `config`'s own fault.

    None when its baseline differs from eager too; without `excuse` none only when the baseline raises,
    as it does where Thunder cannot trace the program.

    Raises:
        Invalid: the program proves nothing.
    """
    expected = expected or expect(program)
    found = check(program, config.compile, expected)
    if found and config.baseline:
        baseline = check(program, CONFIGS[config.baseline].compile, expected)
        if baseline and (excuse or baseline[0].startswith("raises")):
            return []
    return found


@dataclass
class Campaign:
    """Counts of one run, by configuration and verdict, and the first program of every kind of failure."""

    verdicts: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    failures: dict[tuple[str, str], tuple[int, Program, list[str]]] = field(default_factory=dict)
    sizes: Counter = field(default_factory=Counter)


def kind(difference: str) -> str:
    """A difference without its numbers, to count alike ones together."""
    return re.sub(r"(\[[\d, ]*\]|\([\w, ]*\)|\d+(\.\d+)?(e[-+]?\d+)?|inf|nan)", "_", difference)[:110]


def campaign(
    programs: int, seed: int, profile: Profile, configs: Sequence[Config], excuse: bool = True, log: Callable = print
) -> Campaign:
    """Run `programs` valid programs drawn from `seed`, `seed + 1`, ... through every configuration."""
    result = Campaign()
    done, started = 0, time.perf_counter()
    while done < programs:
        program = generate(Random(seed), profile)
        seed += 1
        try:
            expected = expect(program)
        except Invalid as error:
            result.refused[kind(str(error))] += 1
            continue
        done += 1
        for config in configs:
            differences = judge(program, config, expected, excuse)
            verdict = "right" if not differences else "raises" if differences[0].startswith("raises") else "wrong"
            result.verdicts[config.name, verdict] += 1
            if differences:
                key = (config.name, kind(differences[0]))
                result.sizes[key] += 1
                log(f"seed {seed - 1}: {config.name}: {differences[0]}", flush=True)
                if key not in result.failures or len(source(program)) < len(source(result.failures[key][1])):
                    result.failures[key] = (seed - 1, program, differences)
        if done % 500 == 0:
            torch._dynamo.reset()
            log(f"{done} programs, {time.perf_counter() - started:.0f} s", flush=True)
    return result


def regression(program: Program, config: Config, differences: Iterable[str], excuse: bool) -> str:
    """A test file that fails as long as `config` is wrong on `program`."""
    text = textwrap.indent(source(program), "    ")
    notes = "\n".join(f"  {d}" for d in differences)
    return f'''"""Found by `python -m tests.fuzz`: {config.name} differed from eager.

{notes}

{text}"""

from tests.fuzz import CONFIGS, judge
from tests.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = {program!r}


def test_{_digest(program, config)}():
    assert judge(PROGRAM, CONFIGS[{config.name!r}], excuse={excuse}) == []
'''


def _digest(program: Program, config: Config) -> str:
    return f"{config.name}_{zlib.crc32(repr(program).encode()):08x}".replace("-", "_")


def shrink(program: Program, config: Config, alike: str, excuse: bool, attempts: int) -> Program:
    """The smallest program found on which `config` fails in the way `alike`."""

    def fails(candidate: Program) -> bool:
        try:
            return any(kind(d) == alike for d in judge(candidate, config, None, excuse)[:1])
        except Invalid:
            return False

    return minimise(program, fails, attempts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many valid programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; program k has seed + k")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="thunder")
    parser.add_argument("--configs", default="", help="comma separated; default: all that this machine has")
    parser.add_argument("--attempts", type=int, default=300, help="most runs spent on minimising one failure")
    parser.add_argument("--inductor", action="store_true", help="compile fusion regions (a few seconds a program)")
    parser.add_argument("--no-save", action="store_true", help="print failing programs without saving them as tests")
    options = parser.parse_args(arguments)
    with nullcontext() if options.inductor else uncompiled_regions():
        return _main(parser, options)


def _main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    names = [name for name in options.configs.split(",") if name]
    unknown = [name for name in names if name not in {c.name for c in available()}]
    if unknown:
        parser.error(f"--configs got {unknown[0]!r}; available here: {', '.join(c.name for c in available())}")
    configs = tuple(CONFIGS[name] for name in names) or available()
    excuse = options.profile == "thunder"
    if not excuse and not names:
        configs = tuple(c for c in configs if _MEM in c.needs)

    print(f"seed {options.seed}, profile {options.profile}, {', '.join(c.name for c in configs)}", flush=True)
    started = time.perf_counter()
    result = campaign(options.programs, options.seed, PROFILES[options.profile], configs, excuse)
    print(f"{options.programs} programs in {time.perf_counter() - started:.0f} s; refused by eager or the oracle:")
    for why, n in result.refused.most_common():
        print(f"  {n:6}  {why}")
    for config in configs:
        print(config.name, {v: n for (name, v), n in sorted(result.verdicts.items()) if name == config.name})
    for (name, alike), (seed, program, differences) in sorted(result.failures.items()):
        small = shrink(program, CONFIGS[name], alike, excuse, options.attempts)
        print(f"\n{name}: {result.sizes[name, alike]} programs, one has seed {seed}: {differences[0]}")
        print(f"{source(small)}{small!r}", flush=True)
        if not options.no_save:
            REGRESSIONS.mkdir(exist_ok=True)
            file = REGRESSIONS / f"test_{_digest(small, CONFIGS[name])}.py"
            file.write_text(regression(small, CONFIGS[name], differences, excuse))
            print(f"saved as {file}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
