"""One step of the run book: ``python -m benchmarks.gpu.steps STEP --device D --out FILE --minutes M``.

A step is a row of parts. What a part finds is in the file before the next one begins, so a step that is stopped
goes on at the part where it was. A part passes unless it raises, or finds `"right": False`.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thunder
import torch
from litgpt import Config

from benchmarks.gpu import attention, longchat, probes, updates
from benchmarks.gpu.book import STOPPED, load, save
from benchmarks.gpu.correctness import LONG, SHORT, check
from benchmarks.litgpt.machine import machine_kind, versions
from thunder_mem.fusers.nvfuser import installed_nvfuser

__all__ = ["PARTS", "Context", "main", "run_parts"]

Found = dict[str, Any]
Part = Callable[[], Found]


@dataclass(frozen=True)
class Context:
    """What a step runs with.

    Attributes:
        device: "cuda", "cpu" or "simulate:NAME".
        out: the run book's file.
        minutes: the step may take.
        earlier: what other steps found, by their names.
    """

    device: str
    out: Path
    minutes: float
    earlier: dict[str, dict[str, Found]]

    @property
    def simulated(self) -> str:
        """The name, for `simulate`, of the device: itself, or the one that stands here."""
        return self.device.partition(":")[2] or probes.model_name()


def _versions(context: Context) -> dict[str, Part]:
    def found() -> Found:
        executors = [e.name for e in thunder.extend.get_default_executors()]
        try:
            nvfuser = installed_nvfuser().name + " works"
        except ValueError as error:
            nvfuser = str(error)
        return {
            "machine": machine_kind(context.device),
            "versions": versions(),
            "default_executors": executors,
            "nvfuser": nvfuser,
        }

    return {"versions": found}


def _correctness(fusion: str, context: Context) -> dict[str, Part]:
    def found(dtype: torch.dtype, config: Config = SHORT) -> Found:
        rows = check(context.device, fusion, dtype, config)
        return {"right": all(row["right"] for row in rows), "rows": rows}

    parts = {str(dtype): functools.partial(found, dtype) for dtype in (torch.float32, torch.bfloat16)}
    if context.device == "cuda":
        parts["4,096 tokens"] = functools.partial(found, torch.bfloat16, LONG)
    return parts


def _head(context: Context) -> dict[str, Part]:
    probe = probes.head if context.device == "cuda" else functools.partial(probes.predicted_head, context.simulated)
    names = (name for name in probes.HEADS if context.device == "cuda" or name != "torch.compile")
    return {name: functools.partial(probe, name) for name in names}


def _workspace(context: Context) -> dict[str, Part]:
    if context.device != "cuda":
        return {"predicted": functools.partial(probes.predicted_workspace, context.simulated)}
    return {
        "product": probes.workspace,
        "eager step": functools.partial(probes.workspaces_of_a_step, False),
        "compiled step": functools.partial(probes.workspaces_of_a_step, True),
    }


def _products(context: Context) -> dict[str, Part]:
    shapes = (4096, 32000), (4096, 11008), (4096, 12288)
    return {f"{depth} x {width}": functools.partial(probes.products, depth, width) for depth, width in shapes}


def _attention(context: Context) -> dict[str, Part]:
    names = ("flash", "cudnn") if torch.cuda.get_device_capability() == (9, 0) else ("flash",)
    whole = {
        f"{shape} {name}": functools.partial(attention.kernels, shape, name)
        for shape in attention.SHAPES
        for name in names
    }
    return whole | {
        f"{shape} {name}, {groups} groups": functools.partial(attention.in_groups, shape, groups, name)
        for shape, groups in attention.GROUPED
        for name in names
    }


def _updates(context: Context) -> dict[str, Part]:
    return {name: functools.partial(updates.updates, name, context.device) for name in updates.WAYS}


def _longchat(context: Context) -> dict[str, Part]:
    return {name: functools.partial(longchat.run, name, "cuda", 60 * context.minutes) for name in longchat.COLUMNS}


def _predictions(context: Context) -> dict[str, Part]:
    device, measured = f"simulate:{context.simulated}", context.earlier.get("longchat", {})

    def found(name: str) -> Found:
        predicted = longchat.run(name, device, 60 * context.minutes)
        return longchat.compared(predicted, measured.get(name, {}))

    return {name: functools.partial(found, name) for name in longchat.COLUMNS}


def _matrix(context: Context) -> dict[str, Part]:
    def found() -> Found:
        path = context.out.with_suffix(".matrix.json")
        arguments = ["--out", str(path), "--minutes", f"{context.minutes:.2f}", "--device", context.device]
        status = subprocess.run([sys.executable, "-m", "benchmarks.gpu.matrix", *arguments]).returncode
        if status == STOPPED:
            raise SystemExit(STOPPED)
        return {"rows": str(path), "right": status == 0}

    return {"matrix": found}


PARTS: dict[str, Callable[[Context], dict[str, Part]]] = {
    "versions": _versions,
    "mem_pointwise": functools.partial(_correctness, "mem_pointwise"),
    "nvfuser": functools.partial(_correctness, "nvfuser"),
    "head": _head,
    "workspace": _workspace,
    "products": _products,
    "attention": _attention,
    "updates": _updates,
    "longchat": _longchat,
    "predictions": _predictions,
    "offload": lambda context: {"offload": probes.offload},
    "states": lambda context: {"states": functools.partial(probes.states_on_host, context.device)},
    "retain_graph": lambda context: {"retain_graph": functools.partial(probes.retain_graph, context.device)},
    "matrix": _matrix,
}
"""The parts of each step of `benchmarks.gpu.run.STEPS`."""


def run_parts(name: str, parts: dict[str, Part], out: Path) -> str | None:
    """Run the parts of a step that have not passed, in order; what each finds goes to `out` at once.

    Returns:
        In one line, why the step fails; None if it passes.
    """
    failures = []
    for part, find in parts.items():
        record = load(out)
        earlier = record["found"].setdefault(name, {})
        if part not in earlier or not _passes(earlier[part]):
            try:
                earlier[part] = find()
            except Exception as error:  # the next part may do
                traceback.print_exc()
                earlier[part] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:400]}
            save(out, record)
        if not _passes(earlier[part]):
            failures.append(f"{part}: {earlier[part].get('error', 'not as it should be')}")
    return "; ".join(failures) or None


def _passes(found: Found) -> bool:
    return "error" not in found and found.get("right", True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.steps", description=__doc__)
    parser.add_argument("step", choices=list(PARTS))
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    given = parser.parse_args(arguments)
    context = Context(given.device, given.out, given.minutes, load(given.out)["found"])
    failure = run_parts(given.step, PARTS[given.step](context), given.out)
    if failure is not None:
        print(failure, file=sys.stderr)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
