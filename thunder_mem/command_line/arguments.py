"""The options of `thunder-mem`, and help that explains them.

Neither this module nor its imports need PyTorch or Thunder, so that mistyped arguments are answered at once. Arguments
that need them, such as a recomputation's pattern, are checked later.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from thunder_mem.command_line.early_checks import check_files, check_optimizer, check_patterns
from thunder_mem.memory.device_specs import DEVICES, device_spec
from thunder_mem.memory.outside_input import quoted, whole_number
from thunder_mem.memory.units import parse_bytes

__all__ = ["make_parser", "read_words", "split_target"]

_DESCRIPTION = """\
Know the peak of a PyTorch program before it runs, on any machine. thunder-mem compiles it by
lightning-thunder with MemEfficient and follows every allocation, without running the program.
On a CPU each operation runs once, on zeros, to measure its scratch. For a simulated device
nothing runs.

  thunder-mem predict train.py:build --device H100-80GB     does it fit, and by how much
  thunder-mem explain train.py:build --html report.html     what holds the peak, and why
  thunder-mem plan    train.py:build --html plan.html       what MemEfficient changes, before and after
  thunder-mem frontier train.py:build --save frontier.png   the time that every amount of memory costs
  thunder-mem compare train.py:build --torch-compile        a step under each compiler, measured on this machine
"""

_EPILOG = """\
what a target is:
  SCRIPT:NAME names something at the top level of a Python file, one of
    a factory, a function without required arguments that returns
        model                       with --input for each of its arguments,
        (model, args)               args a tensor or a tuple of tensors, or
        {"model": ..., "args": ..., "kwargs": ..., "loss": ..., "optimizer": ...}
    a function of tensors, or a torch.nn.Module, with --input for each argument.
  A model that thunder.jit or thunderfx returned keeps its own transforms. Code under
  if __name__ == "__main__" does not run.

exit codes:
  0  it fits the device and the budget (or neither was given)
  1  it does not fit, with any recomputation
  2  the command, the script or the program cannot be used; the message says why

examples:
  $ cat train.py
  import torch
  def build():
      model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096))
      return model, torch.randn(8192, 4096)

  $ thunder-mem predict train.py:build --device A100-40GB --budget 10GiB
  $ thunder-mem predict train.py:build --device A100-40GB --optimizer AdamW --loss mean
  $ thunder-mem predict train.py:build --json | jq .peak_bytes
"""

_DEVICE = f"""simulate this GPU, which need not exist: tensors that the script makes without
naming a device become fake tensors on it. Known: {", ".join(DEVICES)}. Default: this machine's CPU"""


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter whose `ValueError` argparse shows in full."""

    def check(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


class _Parser(argparse.ArgumentParser):
    """Prints one line for an error, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says more)\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Stop at words that are no arguments, and name the option that the first of them resembles."""
        near = get_close_matches(words[0].split("=")[0], self._option_string_actions, n=1)
        self.error(f"unrecognized arguments: {' '.join(words)}{f': did you mean {near[0]}?' if near else ''}")


class _Version(argparse.Action):
    """Prints the version, which is only looked up then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(f"thunder-mem {version('thunder-mem')}")
        parser.exit(0)


def read_words(words: Sequence[str] | None) -> argparse.Namespace | int:
    """The parsed options, or an exit code after printing help or an error."""
    try:
        options, unknown = make_parser().parse_known_args(words)
        command: _Parser = options.parser
        if unknown:
            command.refuse(unknown)
        try:
            check_files(options)
            check_patterns(options)
        except ValueError as error:
            command.error(str(error))
        return options
    except SystemExit as exit_:
        return 0 if exit_.code in (0, None) else 2


def split_target(target: str) -> tuple[str, str]:
    """The file and the name of a target.

    Raises:
        ValueError: the target is malformed, there is no such file, or the file's text does not have the name.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{quoted(target)} is no target: write path/to/script.py:function_or_model_factory")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {quoted(path)}")
    if not path.endswith(".py"):
        raise ValueError(f"{quoted(path)} is not a Python file: its name ends in .py")
    first = name.split(".")[0]
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{re.escape(first)}\b|{_MAKES_NAMES}", text):
        raise ValueError(f"{path} has no {quoted(first)}{_near(first, text)}")
    return path, name


# Constructs by which a script may have names that are not in its text.
_MAKES_NAMES = r"import \*|\bglobals\(|\blocals\(|\bvars\(|\bexec\(|\bsetattr\(|__dict__"


def _near(name: str, text: str) -> str:
    """The end of a sentence: the functions and classes of a script, those nearest to a name first."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return ""
    defined = [b.name for b in body if isinstance(b, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    near = get_close_matches(name, defined, n=1)
    shown = [*near, *(other for other in sorted(defined) if other not in near)][:_SHOWN]
    return f"; it defines {', '.join(shown)}" if shown else ""


_SHOWN = 16


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="thunder-mem", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=formatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, details in (
        (
            "predict",
            "the peak of each phase, and whether it fits",
            "Predict the peak of the forward, the backward and, with --optimizer, the whole training step.",
        ),
        (
            "explain",
            "what holds the peak, and how to get lower",
            "Explain the peak in five lines: how much, when and at which line, held by which modules, and as code the\n"
            "two ways to less with the most at stake. --detail, --html and --save have everything: which values are\n"
            "alive and why, what was decided, how far the peak is from a lower bound over all orders, and all advice.",
        ),
        (
            "plan",
            "what MemEfficient decides, before and after",
            "Compile the program twice, by Thunder alone and with MemEfficient, and compare the predictions.",
        ),
        (
            "frontier",
            "the time that every amount of memory costs",
            "Plan forward and backward from no recomputation to the smallest peak, and show the peak of each plan\n"
            "against its time by the roofline. With --budget or --device: whether any of them fits.",
        ),
        (
            "compare",
            "a step in eager PyTorch and under each compiler, measured",
            "Run a step in eager PyTorch, under Thunder alone and with MemEfficient, on this machine: peak memory,\n"
            "time, and the largest difference of results and gradients from eager. Without --loss, the loss is the\n"
            "sum of all results. This command runs the program.",
        ),
    ):
        command = commands.add_parser(
            name, help=summary, description=details, epilog=_EPILOG, formatter_class=formatter
        )
        command.set_defaults(parser=command)
        _add_options(command, name)
    return parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "target",
        type=_checked(_target),
        metavar="SCRIPT:NAME",
        help="path/to/script.py:function_or_model_factory; see below",
    )
    program = command.add_argument_group("the program")
    program.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an argument of zeros, such as 8x3x224x224, 1x16384:int64 or mask=16x16:bool; once for each",
    )
    program.add_argument("--grad", action="store_true", help="floating-point inputs also require gradients")
    if name not in ("frontier", "compare"):
        program.add_argument(
            "--fx",
            action="store_true",
            help="compile through ThunderFX, which compiles when it runs: the program runs once, on this machine",
        )
    if name == "frontier":
        program.set_defaults(inference=False)
    else:
        _add_step_options(program)
    machine = command.add_argument_group("the machine")
    if name == "compare":
        command.set_defaults(device=None, fx=False, accumulate=1, step_in_backward=False, states="device")
        machine.add_argument("--torch-compile", action="store_true", help="compare torch.compile, too")
    else:
        if name != "frontier":
            program.add_argument(
                "--step-in-backward",
                action="store_true",
                help="the backward updates each parameter when its gradient is complete (StepInBackward)",
            )
            program.add_argument(
                "--states",
                choices=("device", "host", "auto"),
                default="device",
                help="with --step-in-backward: keep the optimizer's states on the device (default), or in the host's "
                "memory, from where each update fetches them, or where a budget that counts them has room",
            )
            program.add_argument(
                "--accumulate",
                type=_checked(_count),
                default=1,
                metavar="N",
                help="microbatches of a step (default: 1)",
            )
        machine.add_argument(
            "--device", type=_checked(lambda text: device_spec(text).name), metavar="NAME", help=_DEVICE
        )
    machine.add_argument(
        "--budget",
        type=_checked(parse_bytes),
        metavar="SIZE",
        help="the limit for the peak, such as 40GiB or 512MiB. If the free decisions do not suffice, MemEfficient "
        "trades time for memory until the peak fits; exit code 1 if no plan fits",
    )
    machine.add_argument(
        "--recompute",
        metavar="CONFIG",
        help="values to recompute or keep beside the free decisions, as for MemEfficient(recompute=...): "
        "Gelu+:recompute:-1, layerwise, or the path of a JSON file",
    )
    machine.add_argument(
        "--costs",
        choices=("roofline", "measured"),
        help="the times of recomputation under a budget: modelled by the roofline of the device (default), or "
        "measured on this machine",
    )
    machine.add_argument(
        "--fusion",
        choices=("mem_pointwise", "nvfuser", "torchcompile", "none"),
        help="the fusion executor: mem_pointwise (Inductor), nvFuser, Thunder's torchcompile, or none. The default "
        "with --device is mem_pointwise, and otherwise Thunder's own on this machine, else mem_pointwise",
    )
    if name not in ("plan", "frontier", "compare"):
        machine.add_argument("--plain", action="store_true", help="compile with Thunder alone, without MemEfficient")
    output = command.add_argument_group("the output")
    output.add_argument("--json", action="store_true", help="print one JSON object for other programs")
    output.add_argument(
        "--html", metavar="FILE", help="also write everything, with pictures, as one self-contained page"
    )
    if name == "explain":
        output.add_argument(
            "--save",
            action="append",
            default=[],
            metavar="FILE",
            help="also write it as .html, .txt, .json, .png, .svg, or as a .pickle for PyTorch's memory viewer",
        )
        output.add_argument(
            "--detail", action="store_true", help="print everything, instead of five lines; files have everything"
        )
        output.add_argument("--no-bounds", action="store_true", help="omit the lower bound, which can take minutes")
    if name == "frontier":
        output.add_argument(
            "--points",
            type=_checked(_count),
            default=8,
            metavar="N",
            help="the number of steps of the range of peaks; each costs a search and a plan (default: 8)",
        )
        machine.add_argument(
            "--offload",
            nargs="?",
            const=True,
            default=False,
            metavar="PATTERN",
            help="values may also wait in the host's memory; with PATTERN, such as Gelu+, only those of that pattern",
        )
        output.add_argument(
            "--save", action="append", default=[], metavar="FILE", help="also draw it, as .png, .svg, .pdf or .html"
        )
    output.add_argument("--debug", action="store_true", help="show the traceback of an error, and all warnings")


def _add_step_options(program: argparse._ArgumentGroup) -> None:
    program.add_argument("--inference", action="store_true", help="no gradients at all, as under torch.no_grad()")
    program.add_argument(
        "--optimizer",
        type=_checked(_optimizer),
        metavar="NAME",
        help="a whole training step with this optimizer of torch.optim, such as AdamW or SGD",
    )
    program.add_argument(
        "--loss",
        choices=("sum", "mean"),
        help="the reduction of the model's output to a scalar loss, if the factory gives none",
    )


def _target(text: str) -> str:
    split_target(text)
    return text


def _optimizer(text: str) -> str:
    check_optimizer(text)
    return text


def _count(text: str) -> int:
    if (number := whole_number(text)) is None or number < 1:
        raise ValueError(f"a number from 1 up, not {quoted(text)}")
    return number
