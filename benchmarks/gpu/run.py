"""Forty-five minutes with a GPU: ``python -m benchmarks.gpu.run``, or ``make gpu``, which sets up first.

Steps run in order, each in a process with its own time limit; verdicts and all that was found go to one JSON.
Started again, what has passed is not run again, and a step that was stopped goes on where it was. With
``--device simulate`` all that needs no card runs, for a GPU that is not there; with ``--device cpu`` what a CPU can
show. The exit status is 0 if nothing failed and no time ran out.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu.book import FAILED, OUT_OF_TIME, Step, run_book
from thunder_mem.memory.device_specs import device_spec

__all__ = ["STEPS", "main"]

_ALL = ("cuda", "cpu", "simulate")
STEPS = (
    Step("versions", "what is installed, who fuses by default, which attention eager takes", 2, _ALL),
    Step("mem_pointwise", "results are right: Triton over dying inputs, chunk loops", 4, ("cuda", "cpu")),
    Step("nvfuser", "results are right with nvFuser", 4, ("cuda",)),
    Step("head", "a head of 16,384 x 32,000 at several sizes of blocks, beside eager", 5, ("cuda", "simulate")),
    Step(
        "workspace", "how many workspaces of cuBLAS there are, after a product and after steps", 2, ("cuda", "simulate")
    ),
    Step("products", "the rates of products of few rows, and of sums of gradients", 1, ("cuda",)),
    Step("attention", "attention's kernels, whole and in groups: memory, exactness and times", 2, ("cuda",)),
    Step("updates", "updates in the backward, compiled and not, beside an optimizer's own step", 3, ("cuda", "cpu")),
    Step("longchat", "longchat, 2 layers: every compiler, reuse off, updates in the backward", 8, ("cuda",)),
    Step("predictions", "what is predicted for longchat, beside what was measured", 5, ("cuda", "simulate")),
    Step("offload", "offloading, and how much of its copies other work hides", 4, ("cuda",)),
    Step("states", "an optimizer's states on the host, and updates beside the backward", 3, ("cuda", "cpu")),
    Step("retain_graph", "two backwards of one graph, with reuse", 2, ("cuda", "cpu")),
    Step("matrix", "the matrix of models and compilers, as far as time is left", None, ("cuda",)),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cpu, simulate, or simulate:NAME (simulate:H100-80GB)")
    parser.add_argument("--out", type=Path, help="default: build/gpu/DEVICE.json")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[s.name for s in STEPS], help="these alone")
    given = parser.parse_args(arguments)
    device = "simulate:H100-80GB" if given.device == "simulate" else given.device
    kind = device.partition(":")[0]
    if kind not in _ALL:
        parser.error(f"--device is cuda, cpu, simulate or simulate:NAME, not {given.device!r}")
    if kind == "simulate":
        try:
            device_spec(device.partition(":")[2])
        except ValueError as error:
            parser.error(str(error))
    if kind == "cuda" and not _has_gpu():
        print("there is no CUDA device here: --device simulate runs what needs none", file=sys.stderr)
        return 2
    out = given.out or Path("build/gpu") / f"{device.replace(':', '-')}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step that runs ends, too
    steps = [step for step in STEPS if given.only is None or step.name in given.only]
    try:
        verdicts = run_book(steps, device, out, given.minutes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written: {out}")
    found = [verdicts.get(step.name, {"verdict": OUT_OF_TIME})["verdict"] for step in steps]
    return int(any(verdict in (FAILED, OUT_OF_TIME) for verdict in found))


def _has_gpu() -> bool:
    import torch  # not above: --help and what needs no card are quick without it

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
