"""What an encoder-decoder model makes of its labels: its decoder's inputs, and in some models their mask.

The models' functions write into a tensor, which Thunder does not trace. So this part runs before the compiled one.
Models differ in it: classes are not shifted, FSMT shifts its inputs, Musicgen's decoder has its own tokens, and
EncoderDecoderModel hides padding only where it shifts the labels itself. So the statement of the model's own forward
runs, such as this one of Bart::

    if decoder_input_ids is None and decoder_inputs_embeds is None:
        decoder_input_ids = shift_tokens_right(
            labels, self.config.pad_token_id, self.config.decoder_start_token_id
        )
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["made_of_labels"]


def made_of_labels(model: PreTrainedModel, values: Mapping[str, object]) -> dict[str, object]:
    """The arguments that the model's forward makes of ``labels``, by name; none if it shifts no labels.

    Args:
        model: of transformers.
        values: the arguments of its call, by name.

    Raises:
        Exception: as the model itself would, for example because its configuration has no padding token.
    """
    forward: Any = inspect.unwrap(type(model).forward)
    code = _statement(forward)
    if code is None or not isinstance(values.get("labels"), Tensor):
        return {}
    parameters = inspect.signature(forward).parameters
    given: dict[str, object] = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    given |= values
    names = {**given, "self": model}
    exec(code, forward.__globals__, names)
    return {name: names[name] for name in parameters if name in given and names[name] is not given[name]}


@cache
def _statement(forward: FunctionType) -> CodeType | None:
    """The statement of a model's forward that makes its decoder's inputs of the labels; None if there is none."""
    try:
        lines, first = inspect.getsourcelines(forward)
        tree = ast.parse("if True:\n" + "".join(lines))  # a docstring may forbid to remove the indentation
    except (OSError, SyntaxError, TypeError):  # code without a file, or a lambda
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(map(_shifts_labels, node.body)):
            node.orelse = []  # for calls without labels
            ast.increment_lineno(node, first - 2)
            return compile(ast.Module([node], type_ignores=[]), forward.__code__.co_filename, "exec")
    return None


def _shifts_labels(statement: ast.stmt) -> bool:
    """Whether a statement is like ``decoder_input_ids = shift_tokens_right(labels, ...)``."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    of_labels = any(isinstance(a, ast.Name) and a.id == "labels" for a in statement.value.args)
    return of_labels and any(name.startswith("decoder_input") for name in names)
