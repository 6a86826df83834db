"""From a failure to a small test: fewer options, the smallest program, and the file that holds both."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterable
from dataclasses import fields, replace

from tests.checking.oracle import Invalid
from tests.fuzzing.campaign import judge, kind
from tests.fuzzing.configs import CONFIGS, Config, Options, configured
from tests.fuzzing.minimise import minimise
from tests.programs.programs import Program, source

__all__ = ["digest", "regression", "shrink"]


def _fails(program: Program, config: Config, alike: str, excuse: bool) -> bool:
    try:
        return any(kind(d) == alike for d in judge(program, config, None, excuse)[:1])
    except Invalid:
        return False


def shrink(program: Program, config: Config, alike: str, excuse: bool, attempts: int) -> tuple[Config, Program]:
    """The plainest options and the smallest program found on which they fail in the way `alike`."""
    if config.options != Options():
        for f in fields(Options):
            plainer = configured(replace(config.options, **{f.name: f.default}))
            if plainer.options != config.options and _fails(program, plainer, alike, excuse):
                config = plainer
    return config, minimise(program, lambda p: _fails(p, config, alike, excuse), attempts)


def _expression(config: Config) -> str:
    return f"CONFIGS[{config.name!r}]" if config.name in CONFIGS else f"configured({config.options!r})"


def regression(program: Program, config: Config, differences: Iterable[str], excuse: bool) -> str:
    """A test file that fails as long as `config` is wrong on `program`."""
    text = textwrap.indent(source(program), "    ")
    notes = "\n".join(f"  {d}" for d in differences)
    return f'''"""Found by `python -m tests.fuzzing`: {config.name} differed from eager.

{notes}

{text}"""

from tests.fuzzing.campaign import judge
from tests.fuzzing.configs import CONFIGS, Options, configured  # noqa: F401
from tests.programs.programs import Input, Program, Region, Step  # noqa: F401

PROGRAM = {program!r}


def test_{digest(program, config)}():
    assert judge(PROGRAM, {_expression(config)}, excuse={excuse}) == []
'''


def digest(program: Program, config: Config) -> str:
    """A name for a failing pair."""
    name = config.name if config.name in CONFIGS else "drawn"
    return f"{name}_{zlib.crc32(repr((program, config.name)).encode()):08x}".replace("-", "_")
