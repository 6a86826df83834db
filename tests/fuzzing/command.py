"""Random programs against eager: `python -m tests.fuzzing --programs 50000 --seed 1`.

Every program runs eager and through configurations: fixed ones, and options of the package that are drawn
for it. A configuration fails on a program when it differs from eager and its baseline, plain Thunder, does
not. With another profile than "thunder" plain Thunder is no excuse. A failing program is minimised and
saved under `tests/regressions/` as a test.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from tests.fuzzing.campaign import Campaign, campaign
from tests.fuzzing.configs import CONFIGS, Config, available, uncompiled_regions
from tests.fuzzing.record import commit, done, record
from tests.fuzzing.shrink import digest, regression, shrink
from tests.programs.generate import Profile
from tests.programs.program_inputs import inputs_on
from tests.programs.programs import Program, source

__all__ = ["CONFIGS", "PROFILES", "uncompiled_regions"]

REGRESSIONS = Path(__file__).parents[1] / "regressions"

PROFILES = {
    # What plain Thunder compiles and gets right.
    "thunder": Profile(),
    # What plain Thunder gets wrong and MemEfficient must get right; see `defects.py`.
    "checkpoint": Profile(regions=("checkpoint",), in_checkpoint=Profile().families, scalars_meet_larger=True),
    "overwritten": Profile(regions=(), overwrites_needed=True, scalars_meet_larger=True),
    # Attention that runs by groups of heads beside tiles, where options ask for both.
    "heads": Profile(
        kits=("shared attention",),
        families=("attention", "matmul", "elementwise", "view", "norm", "random"),
        in_checkpoint=("attention", "matmul", "elementwise", "view", "norm"),
        in_no_grad=("attention", "elementwise"),
    ),
    # Products that widen, of which stretches in tiles grow.
    "tiles": Profile(
        regions=("checkpoint",),
        in_checkpoint=Profile().families,
        scalars_meet_larger=True,
        kits=("mlp",),
        kit_share=1.0,
    ),
    # What ThunderFX splits into parts that Thunder compiles and parts that it does not. Under Dynamo Thunder cannot
    # trace a torch.autograd.Function (see `defects.py`), and spends minutes on a checkpoint in a checkpoint.
    "split": Profile(families=(*(f for f in Profile().families if f != "function"), "split"), nested=False),
}


def _on_gpu(profile: Profile) -> Profile:
    """The profile without what draws random values, which a GPU draws otherwise, and what makes values on the CPU."""
    families = tuple(f for f in profile.families if f != "random")
    return replace(profile, families=families, ops_without=(*profile.ops_without, "add_arange"))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many valid programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; the next has the next seed")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="thunder")
    parser.add_argument("--configs", help="comma separated, for every program (default: mem; fx for the profile split)")
    parser.add_argument("--drawn", type=int, default=1, help="option sets that are drawn for each program")
    parser.add_argument("--in-turn", action="store_true", help="each program through --configs or what is drawn for it")
    parser.add_argument("--whole-share", type=float, default=0.1, help="of programs that Thunder's interpreter traces")
    parser.add_argument("--compiled-share", type=float, default=0.002, help="of drawn ones that compile their regions")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--attempts", type=int, default=300, help="most runs spent on minimising one failure")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the programs; on cuda none draws random values"
    )
    parser.add_argument("--json", type=Path, help="add the counts of this run to the file")
    parser.add_argument("--resume", action="store_true", help="go on after what the JSON file has of this commit")
    parser.add_argument("--no-save", action="store_true", help="print failing programs without saving them as tests")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _arguments()
    options = parser.parse_args(arguments)
    with inputs_on(options.device):
        return _main(parser, options, sys.argv[1:] if arguments is None else arguments)


def _main(parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    default = "fx" if options.profile == "split" else "mem"
    names = [name for name in (default if options.configs is None else options.configs).split(",") if name]
    known = [c.name for c in available()]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--configs got {unknown[0]!r}; available here: {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU")
    recorded_as = options.profile + (" on cuda" if options.device == "cuda" else "")
    programs, seed = options.programs, options.seed
    if options.resume:
        if options.json is None:
            parser.error("--resume needs --json")
        before, seed = done(options.json, recorded_as, seed)
        programs -= before
        print(f"{before} programs are recorded already")
        if programs <= 0:
            return 0
    faulthandler.enable()
    torch.set_num_threads(1)  # tensors are tiny
    profile = PROFILES[options.profile]
    if options.device == "cuda":
        profile = _on_gpu(profile)
        torch.backends.cudnn.allow_tf32 = False  # eager itself would be inexact
    excuse = options.profile in ("thunder", "split", "heads")
    configs = tuple(CONFIGS[name] for name in names)
    drawn = f"{options.drawn} drawn" if options.drawn else ""
    print(
        f"commit {commit()}, seed {seed}, profile {options.profile}, {', '.join(filter(None, (*names, drawn)))}",
        flush=True,
    )

    started, result = time.perf_counter(), Campaign(seed)
    gc.freeze()  # torch's and Thunder's own objects, or a tenth of the time goes into looking at them
    gc.set_threshold(50_000, 10, 10)
    steps = campaign(
        seed,
        profile,
        configs,
        options.drawn,
        options.compiled_share,
        excuse,
        in_turn=options.in_turn,
        whole_share=options.whole_share,
    )
    command = f"python -m tests.fuzzing {' '.join(arguments)}"
    for result in islice(steps, programs):
        seconds = time.perf_counter() - started
        last = result.programs == programs or seconds > options.seconds
        if options.json and (last or result.programs % 100 == 0):
            record(options.json, command, recorded_as, result, seconds)
        if result.programs % 500 == 0:
            print(f"{result.programs} programs, {seconds:.0f} s, next seed {result.next_seed}", flush=True)
        if last:
            break
    _report(result, time.perf_counter() - started)
    for failure in result.failures.values():
        config, program = shrink(failure.program, failure.config, failure.alike, excuse, options.attempts)
        print(f"\n{failure.config.name}: {failure.programs} programs, one has seed {failure.seed}:")
        print(f"{failure.differences[0]}\n{config.name}\n{source(program)}{program!r}", flush=True)
        if not options.no_save:
            _save(program, config, failure.differences, excuse)
    return 1 if result.failures else 0


def _report(result: Campaign, seconds: float) -> None:
    print(
        f"{result.programs} programs in {seconds:.0f} s, next seed {result.next_seed}; refused by eager or the oracle:"
    )
    for why, n in result.refused.most_common():
        print(f"  {n:6}  {why}")
    for why, n in result.excuses.most_common():
        print(f"  {n:6}  excused by plain Thunder (seed {result.excused[why]}): {why}")
    for name in dict.fromkeys(name for name, _ in result.verdicts):
        print(name, {v: n for (other, v), n in sorted(result.verdicts.items()) if other == name})


def _save(program: Program, config: Config, differences: Sequence[str], excuse: bool) -> None:
    REGRESSIONS.mkdir(exist_ok=True)
    file = REGRESSIONS / f"test_{digest(program, config)}.py"
    file.write_text(regression(program, config, differences, excuse))
    print(f"saved as {file}")
