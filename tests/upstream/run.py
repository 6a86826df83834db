"""Run Thunder's installed tests without and with `MemEfficient`: ``python -m tests.upstream.run``.

Three sides (see `records.py`): as they are, with the transform, and with the transform and `mem_pointwise`.
What passes on the first and not on another is a regression, unless `excluded.py` says why it cannot apply;
it is tried once more in a process of its own, and the list of those that remain must be empty. So the injected
sides run first, and the first only for what does not pass on them. What fails there too runs again where this
package is not imported: passing there is a regression too.

What ran is kept under ``build/upstream`` by test, so that a run that was stopped goes on, and a larger
``--share`` adds to a smaller one; regressions run again every time, and ``--fresh`` forgets everything.
Regions run one operation at a time, except in a share of the tests (``--compiled``), where Inductor compiles
them: that takes seconds each, and a plan can err without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.upstream.excluded import EXCLUDED, reason
from tests.upstream.records import PLAIN, SIDES, Record, close, falls_in, lines, own_sides, place, read

__all__ = ["Runner", "imported", "main", "verdict"]

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "upstream.json"
_AT_ONCE = 300
_COLLECTED = (0, 5)  # pytest's exit status for some tests, and for none

# Files that share a process: starting one takes as long as the tests of a small file. Quick ones first.
GROUPS = tuple(
    group.split()
    for group in (
        "inplace_copy update_aliases patterns extend elementwise reductions shape_ops examine examine_memory "
        "check_trace pythonex randomness autocast sdpaex_executor einops nvfuser nvfuser_remat "
        "torch_library_custom_op torch_library_custom_op_with_lists",
        "core jit_general interpreter",
        "transforms torch_compile_executor recipes auto_register_torchops",
        "networks",
        "dynamo",
        "grad",
        "ops",
    )
)

# Files of which nothing can run here.
LEFT_OUT = {
    "test_apex_cross_entropy_executor.py": "needs apex and CUDA",
    "test_apex_fused_norms.py": "needs apex and CUDA",
    "test_cudnn_executor.py": "needs cuDNN's Python frontend and CUDA",
    "test_fa3_executor.py": "needs FlashAttention 3 and a Hopper GPU",
    "test_transformer_engine_executor.py": "needs transformer_engine and CUDA",
    "test_transformer_engine_v1_executor.py": "needs transformer_engine and CUDA",
    "test_triton_ce.py": "needs CUDA",
    "coverage_tests": "prints which operations are covered, compiles nothing",
    "distributed": "needs several GPUs",
}


class Runner:
    """One process of pytest after the other, over what is not known yet.

    Args:
        folder: where what ran is kept.
        tests: the folder of the tests.
        compiled: share of the tests with compiled regions.
        seconds: of the processor, after which a test has failed.
    """

    def __init__(self, folder: Path, tests: Path, compiled: float = 0.0, seconds: int = 120) -> None:
        self.folder, self.tests, self.compiled, self.seconds = folder, tests, compiled, seconds
        self.log = folder / f"pytest-{os.getpid()}.log"  # several runs may share a folder
        folder.mkdir(parents=True, exist_ok=True)

    def collect(self, files: Iterable[str]) -> dict[str, list[str]]:
        """The ids of all tests, by file."""
        missing = [f for f in files if not (self.folder / f"{f}.ids").exists()]
        if missing:
            listed = self.folder / f"listed-{os.getpid()}.txt"
            if self._pytest(missing, "--collect-only", "--upstream-list", listed) not in _COLLECTED:
                raise RuntimeError(f"pytest could not collect: see {self.folder / 'pytest.log'}")
            ids = listed.read_text().splitlines()
            listed.unlink()
            for file in missing:
                own = [f"{id}\n" for id in ids if id.startswith(f"{file}::")]
                (self.folder / f"{file}.ids").write_text("".join(own))
        return {f: (self.folder / f"{f}.ids").read_text().splitlines() for f in files}

    def run(self, ids: Iterable[str], *options: str) -> None:
        """Run these tests, with options of the plugin; a process that dies costs the one test in which it died."""
        todo = sorted(ids, key=place)  # so that what ran when it was stopped is about a share
        for start in range(0, len(todo), _AT_ONCE):  # not all in one process, which would grow and grow
            self._run(todo[start : start + _AT_ONCE], options)

    def known(self, file: str) -> dict[tuple[str, str], Record]:
        """What ran so far of a file, by test and side."""
        return read(self.folder, file)

    def _run(self, todo: list[str], options: tuple[str, ...]) -> None:
        only = self.folder / f"only-{os.getpid()}.txt"
        while todo:
            only.write_text("\n".join(todo))
            files = {id.partition("::")[0] for id in todo}
            before = {file: len(lines(self.folder, file)) for file in files}
            self._pytest(
                files, "--upstream-only", only, "--upstream-record", self.folder,
                "--upstream-compiled", self.compiled, "--upstream-seconds", self.seconds, *options,
            )  # fmt: skip
            for file, start in before.items():
                close(self.folder, file, start)
            ran = {r.id for file, start in before.items() for r in lines(self.folder, file)[start:]}
            if not ran:
                raise RuntimeError(f"pytest ran none of {len(todo)} tests: see {self.folder / 'pytest.log'}")
            todo = [id for id in todo if id not in ran]
            only.unlink()

    def _pytest(self, files: Iterable[str], *options: object) -> int:
        root = self.tests.parent.parent
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", root, "-p", "no:cacheprovider"]
        command += ["-p", "tests.upstream.plugin", "-q", "--tb=short", "--disable-warnings", *options]
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        environment["OMP_NUM_THREADS"] = "1"
        with self.log.open("w") as log:
            return subprocess.run(
                [*map(str, command), *(str(self.tests / f) for f in sorted(files))],
                env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, check=False,
            ).returncode  # fmt: skip


def verdict(known: Mapping[tuple[str, str], Record], ids: Iterable[str], side: str) -> dict[str, object]:
    """Counts of one injected side, and the tests that do not pass on it, and do without."""
    here = {id: known[id, side] for id in ids if (id, side) in known}
    passed = [id for id, r in here.items() if r.outcome == "passed"]
    worse = {id: r for id, r in here.items() if r.outcome != "passed" and _outcome(known, id, SIDES[0]) == "passed"}
    return {
        "passed": len(passed),
        "in which a program was compiled": sum(here[id].programs > 0 for id in (*passed, *worse)),
        "programs": sum(here[id].programs for id in (*passed, *worse)),
        "with regions compiled": sum(here[id].compiled and here[id].programs > 0 for id in (*passed, *worse)),
        **_sorted_out(worse, passed, side),
    }


def imported(known: Mapping[tuple[str, str], Record], ids: Iterable[str]) -> dict[str, object]:
    """The tests that pass only where this package is not imported, and those that pass nowhere."""
    failed = {id: known[id, SIDES[0]] for id in ids if _outcome(known, id, SIDES[0]) in ("failed", "crashed")}
    worse = {id: r for id, r in failed.items() if _outcome(known, id, PLAIN) == "passed"}
    return {
        "fail without it": {id: r.cause for id, r in failed.items() if id not in worse},
        **_sorted_out(worse, [id for id in ids if id not in failed], SIDES[0]),
    }


def _outcome(known: Mapping[tuple[str, str], Record], id: str, side: str) -> str:
    return known[id, side].outcome if (id, side) in known else ""


def _sorted_out(worse: Mapping[str, Record], right: Iterable[str], side: str) -> dict[str, object]:
    return {
        "regressions": {id: f"{r.outcome}: {r.cause}" for id, r in worse.items() if not reason(id, side)},
        "excluded": {id: reason(id, side) for id in worse if reason(id, side)},
        "excluded without need": [id for id in right if reason(id, side)],
    }


def _which_ran(known: Mapping[tuple[str, str], Record], ids: Iterable[str]) -> list[str]:
    """The tests that passed on their own sides, or ran without and, if they pass there, on all."""

    def ran(id: str) -> bool:
        if all(_outcome(known, id, side) == "passed" for side in own_sides(id)):
            return True
        without = _outcome(known, id, SIDES[0])
        return bool(without) and (without != "passed" or all((id, side) in known for side in SIDES))

    return [id for id in ids if ran(id)]


def _run_missing(runner: Runner, ids: dict[str, list[str]]) -> None:
    """Run what has not run of these tests, by file, and once more what failed on some side."""

    def failing(sides: tuple[str, ...]) -> list[str]:
        known = ((own, runner.known(f)) for f, own in ids.items())
        return [id for own, k in known for id in own if any(_outcome(k, id, s) in ("failed", "crashed") for s in sides)]

    ran = {id for f, own in ids.items() for id in _which_ran(runner.known(f), own)}
    runner.run([id for own in ids.values() for id in own if id not in ran])
    without = set(failing(SIDES[:1]))
    for id in failing(SIDES[1:]):
        if id not in without:
            runner.run([id], "--upstream-all")
    tried = {id for f in ids for id, side in runner.known(f) if side == PLAIN}
    runner.run([id for id in failing(SIDES[:1]) if id not in tried], "--upstream-plain")


def _counts(known: Mapping[tuple[str, str], Record], ids: list[str]) -> dict[str, dict]:
    outcomes = Counter(_outcome(known, id, SIDES[0]) or "not run, as it passes with it" for id in ids)
    counts: dict[str, dict] = {SIDES[0]: {"outcomes": dict(sorted(outcomes.items())), **imported(known, ids)}}
    return counts | {side: verdict(known, ids, side) for side in SIDES[1:]}


def _commit() -> str:
    out = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return out.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="as in test_core.py; all without")
    parser.add_argument("--share", type=float, default=1.0, help="of each file's tests, chosen by a hash of the id")
    parser.add_argument("--compiled", type=float, default=0.05, help="share of the tests whose regions are compiled")
    parser.add_argument("--seconds", type=int, default=120, help="of the processor, after which a test has failed")
    parser.add_argument("--count", action="store_true", help="run nothing, count what ran")
    parser.add_argument("--fresh", action="store_true", help="forget what ran before")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "upstream", help="where what ran is kept")
    parser.add_argument("--result", type=Path, default=RESULT, help="where the counts go")
    options = parser.parse_args(arguments)

    versions = {name: version(name) for name in ("lightning-thunder", "torch", "litgpt", "transformers")}
    versions["python"] = platform.python_version()
    folder = options.folder / f"thunder-{versions['lightning-thunder']}-torch-{versions['torch']}"
    if options.fresh:
        for file in folder.glob("*.jsonl"):
            file.unlink()
    thunder = find_spec("thunder")
    assert thunder is not None and thunder.origin is not None
    runner = Runner(folder, Path(thunder.origin).parent / "tests", options.compiled, options.seconds)
    groups = [options.files] if options.files else [[f"test_{name}.py" for name in group] for group in GROUPS]

    result = _earlier(options.result, versions)
    for group in groups:
        collected = runner.collect(group)
        ids = {f: [id for id in own if falls_in(id, options.share)] for f, own in collected.items()}
        if options.count:
            ids = {f: _which_ran(runner.known(f), own) for f, own in ids.items()}
        else:
            _run_missing(runner, ids)
        for file, own in ids.items():
            about = {"collected": len(collected[file]), "ran": len(own), "commit": _commit()}
            result[file] = about | _counts(runner.known(file), own)
            _show(file, result[file])
        text = {
            "command": "make upstream-tests",
            "versions": versions,
            "compiled share": options.compiled,
            "regressions": sum(map(_wrong, result.values())),
            "excluded": [{"test": test, "side": side, "reason": why} for (test, side), why in EXCLUDED.items()],
            "left out": LEFT_OUT,
            "files": dict(sorted(result.items())),
        }
        options.result.write_text(json.dumps(text, indent=1) + "\n")
    wrong = sum(_wrong(result[file]) for group in groups for file in group)
    print(f"{wrong} regressions; {options.result}")
    return 1 if wrong else 0


def _earlier(path: Path, versions: Mapping[str, str]) -> dict[str, dict]:
    """What an earlier run has found of other files, under the same versions."""
    if not path.exists():
        return {}
    text = json.loads(path.read_text())
    return text["files"] if text["versions"] == versions else {}


def _wrong(counts: dict) -> int:
    return sum(len(counts[side]["regressions"]) + len(counts[side]["excluded without need"]) for side in SIDES)


def _show(file: str, counts: dict) -> None:
    """Print a file's counts."""
    print(f"{file}: {counts['ran']} of {counts['collected']} ran; without: {counts[SIDES[0]]['outcomes']}")
    for side in SIDES:
        found = counts[side]
        if side != SIDES[0]:
            print(
                f"  {side}: {found['passed']} passed, {len(found['excluded'])} excluded; {found['programs']} programs "
                f"in {found['in which a program was compiled']} tests, {found['with regions compiled']} compiled whole"
            )
        for id, cause in found["regressions"].items():
            print(f"    REGRESSION {id}: {cause}")
        for id in found["excluded without need"]:
            print(f"    EXCLUDED WITHOUT NEED {id}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
