"""Let Thunder work with PyTorch 2.12 to 2.15, which it does not know: `import thunder_mem.compat` before `thunder`.

Importing this module changes PyTorch for the whole process, as far as the installed version needs it, and nothing with
PyTorch 2.11 and older. `changes` says in sentences what was changed:

- Thunder names five methods of named tensors at its import, which PyTorch 2.13 no longer has. They come back as methods
  that raise `NotImplementedError`.
- Thunder's interpreter cannot trace the lazy graph modules of torch.compile, which PyTorch 2.12 compiles anew while
  ThunderFX traces them. They become plain graph modules.
- Thunder looks for the Python function behind `torch.autograd.Function.apply`, which PyTorch 2.15 has in C. A Python
  method calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from packaging.version import Version
from torch.fx import _lazy_graph_module

__all__ = ["changes"]

_NAMED_TENSORS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _gone(name: str) -> Callable[..., NoReturn]:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"PyTorch {torch.__version__} has no named tensors, and no Tensor.{name}")

    method.__name__ = name
    return method


def _with_named_tensor_methods(tensor: type) -> str:
    if not (missing := [name for name in _NAMED_TENSORS if not hasattr(tensor, name)]):
        return ""
    for name in missing:
        setattr(tensor, name, _gone(name))
    return f"torch.Tensor has {', '.join(missing)} again, which raise NotImplementedError"


def _with_plain_graph_modules(version: Version) -> str:
    if version < Version("2.12"):
        return ""
    _lazy_graph_module._force_skip_lazy_graph_module_flag = True
    return "torch.compile makes no lazy graph modules"


def _with_apply_in_python(function: Any) -> str:
    if hasattr(function.apply, "__func__"):
        return ""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return super(function, cls).apply(*args, **kwargs)

    function.apply = classmethod(apply)
    return "torch.autograd.Function.apply is a Python method"


changes: tuple[str, ...] = tuple(
    filter(
        None,
        (
            _with_named_tensor_methods(torch.Tensor),
            _with_plain_graph_modules(Version(torch.__version__)),
            _with_apply_in_python(torch.autograd.Function),
        ),
    )
)
"""What importing this module has changed, one sentence a change."""
