"""One run of Thunder's litgpt benchmark: ``python -m benchmarks.litgpt --help``.

All options of ``python thunder/benchmarks/benchmark_litgpt.py`` and those of `Options`; its output, its metrics
and its JSON, which also names versions, machine and, where it is known, who is alive at the peak:

    python -m benchmarks.litgpt --model_name longchat-7b-16k --n_layers 2 --checkpoint_activations True \\
        --compile thunder --mem_efficient True --device simulate:H100-80GB --return_metrics_as_json True \\
        --json_path longchat.json
"""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from benchmarks.litgpt.harness import load_thunders, run
from benchmarks.litgpt.options import Options

__all__ = ["main", "make_parser", "parse"]


@functools.cache
def make_parser() -> ArgumentParser:
    """Thunder's own options, read off its class, and ours."""
    parser = ArgumentParser(prog="python -m benchmarks.litgpt", description=__doc__)
    parser.add_class_arguments(Options)
    parser.add_class_arguments(load_thunders().Benchmark_litGPT)
    parser.add_argument("--return_metrics_as_json", type=bool, default=False, help="write the metrics to --json_path")
    parser.add_argument("--json_path", type=str, default="", help="where the JSON goes")
    return parser


def parse(arguments: list[str] | None = None) -> tuple[Options, dict[str, Any]]:
    """Our options, and the keyword arguments of Thunder's `benchmark_main`."""
    given = vars(make_parser().parse_args(arguments))
    return Options(**{name: given.pop(name) for name in Options.__dataclass_fields__}), given


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0 if it did, 2 if the options have no meaning together."""
    options, given = parse(arguments)
    try:
        options.check(given["compile"], given["distributed_mode"])
    except ValueError as error:
        print(f"benchmarks.litgpt: {error}", file=sys.stderr)
        return 2
    if given["return_metrics_as_json"] and given["json_path"]:
        Path(given["json_path"]).parent.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("ignore", message=".*transformer_engine.*")
    run(options, **given)
    return 0
