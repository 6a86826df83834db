"""From `path/to/script.py:name` to a program: the model to compile, and the arguments of its call."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import thunder
import torch

from thunder_mem.command_line.arguments import split_target
from thunder_mem.frontend.thunderfx import is_fx
from thunder_mem.memory.outside_input import quoted, shortened, whole_number
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.prediction.training_step import instead_of_optimizer

__all__ = ["Program", "UsageError", "in_words", "load_target", "make_program", "parse_input"]

_KEYS = ("model", "args", "kwargs", "loss", "optimizer")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "float": torch.float32}


class UsageError(Exception):
    """An error in the command, the script or the program that the user can fix; the message says what."""


def in_words(error: Exception) -> str:
    """An error as one line: its message alone if its type adds no information."""
    known = isinstance(error, UsageError | PredictionError | ValueError | TypeError | ImportError | OSError)
    what = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
    return " ".join(what.split())


@dataclass(frozen=True)
class Program:
    """The program of a command.

    Attributes:
        model: a module, a function, or a result of `thunder.jit`.
        args, kwargs: of the call.
        loss: from the model's output to a scalar; None if the model returns it.
        optimizer: the factory's optimizer, if any.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None

    @property
    def is_fx(self) -> bool:
        """Whether ThunderFX has compiled it already."""
        return is_fx(self.model)

    @property
    def is_jitted(self) -> bool:
        """Whether it is compiled already, by `thunder.jit` or ThunderFX: its own transforms then count."""
        return self.is_fx or thunder.compile_data(self.model) is not None


def load_target(target: str) -> Any:
    """Run the script and return the object that the target names.

    Raises:
        UsageError: there is no such file or name, or the script raises.
    """
    try:
        path_text, name = split_target(target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    path = pathlib.Path(path_text)
    spec = importlib.util.spec_from_file_location(f"thunder_mem_target_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # as its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickles look themselves up there
    sys.path.insert(0, str(path.resolve().parent))
    with _as_users_code(path, "the script"):
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(
                n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
            )
            hint = f"; it defines {', '.join(known)}" if known else ""
            raise UsageError(f"{path_text} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def make_program(target: str, found: Any, inputs: Sequence[str], *, grad: bool) -> Program:
    """The program of a script's object, with the inputs of the command line.

    Raises:
        UsageError: the object cannot be compiled, it raises, or inputs are missing or too many.
    """
    path = pathlib.Path(target.rpartition(":")[0])
    result = found
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        with _as_users_code(path, f"{found.__name__}()"):
            result = found()
    elif _is_factory(found):
        with _as_users_code(path, f"{getattr(found, '__name__', 'the factory')}()"):
            result = found()
    program = _from_result(target, result)
    if inputs:
        if program.args or program.kwargs:
            raise UsageError(f"{target} brings its arguments itself, so there is no use for --input")
        named = [parse_input(text, grad=grad) for text in inputs]
        args = tuple(t for name, t in named if not name)
        program = replace(program, args=args, kwargs={name: t for name, t in named if name})
    if not program.args and not program.kwargs:
        signature = f" {_signature(program.model)}" if _signature(program.model) else ""
        raise UsageError(
            f"{target} comes without arguments for the call{signature}: give --input SHAPE:DTYPE for each, "
            "or let the factory return (model, args)"
        )
    return program


def parse_input(text: str, *, grad: bool = False) -> tuple[str, torch.Tensor]:
    """The name ("" if positional) and the zeros of an `--input`, on the default device.

    Raises:
        UsageError: it cannot be read.
    """
    name, equals, rest = text.rpartition("=")
    if equals and not name.isidentifier():
        raise UsageError(f"--input {shortened(text, 80)}: {quoted(name, 80)} is not the name of an argument")
    shape_text, _, dtype_text = rest.partition(":")
    sizes = [] if shape_text == "scalar" else shape_text.replace(",", "x").split("x")
    shape = [whole_number(part) for part in sizes]
    if any(n is None or n < 0 for n in shape):
        raise UsageError(
            f"--input {shortened(text, 80)}: {quoted(shape_text, 80)} is not a shape; "
            "write sizes such as 8x1024, or scalar"
        )
    dtype = _DTYPES.get(dtype_text) or (getattr(torch, dtype_text, None) if dtype_text else torch.get_default_dtype())
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input {shortened(text, 80)}: unknown dtype {quoted(dtype_text, 80)}; "
            "known are float32, bf16, int64, bool, ..."
        )
    try:
        zeros = torch.zeros(shape, dtype=dtype)  # type: ignore[arg-type]
    except RuntimeError as error:
        where = "with --device nothing is allocated" if torch.get_default_device().type == "cpu" else "it is too large"
        raise UsageError(f"--input {shortened(text)} cannot be made: {where} ({error})") from error
    return name, zeros.requires_grad_() if grad and dtype.is_floating_point else zeros


def _is_factory(found: Any) -> bool:
    """A plain callable that can be called without arguments."""
    if not callable(found) or isinstance(found, torch.nn.Module) or Program(found, ()).is_jitted:
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.kind is p.VAR_KEYWORD or p.default is not p.empty for p in parameters)


def _from_result(target: str, result: Any) -> Program:
    if isinstance(result, Mapping):
        unknown = sorted(set(result) - set(_KEYS))
        if unknown or "model" not in result:
            wrong = f"it has {unknown[0]!r}" if unknown else "it has no 'model'"
            raise UsageError(f"the dict of {target} takes the keys {', '.join(_KEYS)}, but {wrong}")
        parts = dict(result)
    elif isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise UsageError(f"{target} returns a tuple of {len(result)}; write (model, args) or (model, args, kwargs)")
        parts = dict(zip(("model", "args", "kwargs"), result, strict=False))
    else:
        parts = {"model": result}
    model, args = parts["model"], parts.get("args", ())
    if not callable(model):
        raise UsageError(
            f"{target} is {_article(type(model).__name__)}, not a model: name a function of tensors, "
            "a torch.nn.Module, or a factory that returns one"
        )
    optimizer = parts.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer of {target} is one of torch.optim, {instead_of_optimizer(optimizer)}")
    args = (args,) if isinstance(args, torch.Tensor) else args
    kwargs, loss = parts.get("kwargs") or {}, parts.get("loss")
    for what, value, fits, wanted in (
        ("args", args, isinstance(args, tuple | list), "a tensor or a tuple of tensors"),
        ("kwargs", kwargs, isinstance(kwargs, Mapping), "a dict"),
        ("loss", loss, loss is None or callable(loss), "a function of the model's output"),
    ):
        if not fits:
            raise UsageError(f"the {what} of {target} is {_article(type(value).__name__)}, not {wanted}")
    path = pathlib.Path(target.rpartition(":")[0])
    return Program(model, tuple(args), dict(kwargs), None if loss is None else _guarded(path, loss), optimizer)


def _guarded(path: pathlib.Path, loss: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def guarded(output: Any) -> torch.Tensor:
        with _as_users_code(path, "the loss"):
            return loss(output)

    return guarded


def _signature(model: Any) -> str:
    data: Any = thunder.compile_data(model)
    model = model if data is None else data.fn
    try:
        return str(inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model))
    except (TypeError, ValueError):
        return ""


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@contextlib.contextmanager
def _as_users_code(path: pathlib.Path, what: str):
    """Run the user's code: its output goes to the standard error, and its exception becomes one message."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UsageError:
        raise
    except SystemExit as error:
        raise UsageError(f"{path.name}: {what} exits by itself (code {error.code})") from error
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if pathlib.Path(f.filename).name == path.name]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno if own else None
        where = f"{path}:{line}" if line else str(path)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{what} raises {type(error).__name__} at {where}: {message}") from error
