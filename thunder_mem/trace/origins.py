"""The origin of a bound symbol: its operation in the user's program, and its place in the model.

Autograd and the executors decompose operations and rename results, but copy tags. So before autograd every operation
gets an `Origin` among its tags, and every bound symbol made from it has the same origin: "this multiplication belongs
to the GELU of layer 3".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import thunder
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import TemporaryExecutor

from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.source_lines import place_of

__all__ = [
    "Origin",
    "alike",
    "layer_numbers",
    "modules_in_words",
    "name_origins",
    "numberless",
    "origin_of",
    "source_of",
    "symbol_name",
    "word",
]

_MODULES = 4  # so many are named one by one
_THUNDER = os.path.dirname(thunder.__file__) + os.sep
_SCENERY = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT, PrimIDs.RETURN, PrimIDs.UPDATE_ALIASES}

_WORDS = {
    "to": "Cast", "type_as": "Cast", "float": "Cast", "bfloat16": "Cast", "half": "Cast", "double": "Cast",
    "long": "Cast", "int": "Cast", "convert_element_type": "Cast",
    "matmul": "MatMul", "bmm": "MatMul", "mm": "MatMul", "rms_norm": "RMSNorm", "true_divide": "Div",
    "scaled_dot_product_attention": "Attention", "getitem": "GetItem", "uniform_like": "Uniform",
    "nll_loss": "NLLLoss",
}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """One operation of the user's program.

    Attributes:
        index: its place in the program.
        function: its name in the program, such as "layer_norm".
        module: path of its module, such as "transformer.h.3.mlp"; "" if unknown. An operation with parameters
            belongs to their module. Any other belongs to the innermost module that holds the operations with
            parameters before and after it.
        layer: number of the model's layer, if it has layers that differ only in numbers.
    """

    index: int
    function: str
    module: str = ""
    layer: int | None = None

    @property
    def word(self) -> str:
        """Its name in patterns; see `word`."""
        return word(self.function)


def word(function: str) -> str:
    """The name in patterns of a function of PyTorch or a prim of Thunder.

    CamelCase, without an underscore that means in place; casts are Cast, all batched products MatMul.

    Example:
        >>> word("gelu"), word("layer_norm"), word("add_"), word("to")
        ('Gelu', 'LayerNorm', 'Add', 'Cast')
    """
    name = function.removeprefix("torch_").removesuffix("_prim_impl").removesuffix("_impl").strip("_")
    return _WORDS.get(name) or "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def symbol_name(sym: Symbol) -> str:
    """The name of a symbol, the same in every process.

    Thunder names an operator made from the user's code (a `torch.autograd.Function`, an opaque function) by an object's
    address: "Gate_140163007810448_0" is "Gate" here.
    """
    made = isinstance(sym.executor, TemporaryExecutor)
    return re.sub(rf"_{id(sym.executor)}_\d+$", "", sym.name) if made else sym.name


def modules_in_words(modules: Iterable[str]) -> str:
    """Modules whose paths differ only in numbers: one name with #, or their numbers if they have no other name.

    Example:
        >>> modules_in_words(["transformer.h.3.mlp", "transformer.h.4.mlp"]), modules_in_words(["1", "3", "1"])
        ('module transformer.h.#.mlp', 'modules 1, 3')
    """
    first, *others = dict.fromkeys(modules)
    if not others:
        return f"module {first}"
    if (name := alike(first)) != first:
        return f"module {name}"
    shown = [first, *others] if len(others) < _MODULES else [first, *others[: _MODULES - 2], "…", others[-1]]
    return f"modules {', '.join(shown)}"


def alike(module: str) -> str:
    """A module's path with # for each number, or unchanged if it has only numbers.

    Example:
        >>> alike("transformer.h.3.mlp"), alike("2.0")
        ('transformer.h.#.mlp', '2.0')
    """
    return numberless(module) if re.search(r"[^\d.]", module) else module


def numberless(module: str) -> str:
    """A module's path with # for each number, the same for equal layers."""
    return re.sub(r"\d+", "#", module)


def origin_of(bsym: BoundSymbol) -> Origin | None:
    """The origin of a bound symbol; the first of several."""
    found = [tag for tag in bsym.tags if isinstance(tag, Origin)]
    return min(found, key=lambda o: o.index) if found else None


def source_of(bsym: BoundSymbol) -> str:
    """ "file:line" of the user's call, or "" if it is unknown (or in Thunder's own code)."""
    place = place_of(bsym)
    return "" if place.startswith(_THUNDER) else place


def name_origins(trace: TraceCtx, prologue: TraceCtx | None = None) -> TraceCtx:
    """The trace with an `Origin` among the tags of each operation and of its parts.

    Args:
        trace: a computation trace before autograd.
        prologue: its prologue, which knows the parameters' names; without it there are no modules.
    """
    paths = _parameters(prologue)
    layers = _layers(trace, paths)
    modules = _modules(trace, paths, layers)
    named = [
        b if b.sym.id in _SCENERY else _tagged(b, Origin(i, symbol_name(b.sym), modules[i], layers[i]))
        for i, b in enumerate(trace.bound_symbols)
    ]
    return rebuilt(trace, named, "Operations know where they come from")


def _tagged(bsym: BoundSymbol, origin: Origin) -> BoundSymbol:
    parts = tuple(_tagged(part, origin) for part in bsym.subsymbols)
    return bsym.from_bsym(tags=bsym.tags | {origin}, subsymbols=parts)


def _parameters(prologue: TraceCtx | None) -> dict[str, str]:
    """Proxy name -> the parameter's or buffer's name in the module."""
    wanted = (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER)
    symbols = prologue.bound_symbols if prologue is not None else ()
    return {b.output.name: b.args[1] for b in symbols if b.sym.id in wanted and isinstance(b.output, TensorProxy)}


def _own(bsym: BoundSymbol, paths: Mapping[str, str]) -> Iterator[str]:
    return (paths[p.name] for p in bsym.flat_proxy_args if p.name in paths)


def _modules(trace: TraceCtx, paths: Mapping[str, str], layers: Sequence[int | None]) -> list[str]:
    def latest(last: str, module: str) -> str:
        return module or last

    own = [next(_own(b, paths), "").rpartition(".")[0] for b in trace.bound_symbols]
    before, after = list(accumulate(own, latest)), list(accumulate(reversed(own), latest))
    sides = zip(own, before, reversed(after), layers, strict=True)
    return [module or max(_common(a, b), _layer_of(a, layer), key=len) for module, a, b, layer in sides]


def _common(a: str, b: str) -> str:
    """The innermost module that holds both."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _layer_of(module: str, layer: int | None) -> str:
    """The layer of that number around a module, or ""."""
    head, found, _ = f"{module}.".partition(f".{layer}.")
    if module.startswith(f"{layer}."):
        return str(layer)
    return f"{head}.{layer}" if found else ""


def layer_numbers(names: Iterable[str], *, from_zero: bool = False) -> dict[str, int]:
    """Name -> number of its layer, for names that differ from others only in numbers.

    If names have several such numbers, the one with the most values is the layer.

    Args:
        names: of parameters.
        from_zero: leave out numbers that are never 0, as in `norm_1` and `norm_2`. Lists of modules count from 0.

    Example:
        >>> layer_numbers(["h.0.norm_1", "h.1.norm_1", "h.2.norm_1", "h.0.norm_2", "wte"])
        {'h.0.norm_1': 0, 'h.1.norm_1': 1, 'h.2.norm_1': 2, 'h.0.norm_2': 0}
        >>> layer_numbers(["norm_1", "norm_2"]), layer_numbers(["norm_1", "norm_2"], from_zero=True)
        ({'norm_1': 1, 'norm_2': 2}, {})
    """
    alike: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(re.sub(r"\d+", "#", name), []).append((name, tuple(map(int, re.findall(r"\d+", name)))))
    found = {}
    for group in alike.values():
        values = [set(column) for column in zip(*(numbers for _, numbers in group), strict=True)]
        counted = [i for i, column in enumerate(values) if len(column) > 1 and (0 in column or not from_zero)]
        if counted:
            at = max(counted, key=lambda i: (len(values[i]), -i))
            found.update({name: numbers[at] for name, numbers in group})
    return found


def _layers(trace: TraceCtx, paths: Mapping[str, str]) -> list[int | None]:
    """The layer by the numbers in the names of an operation's parameters; without any, its latest operand's layer."""
    numbers = layer_numbers(paths.values())
    made: dict[str, tuple[int, int | None]] = {}  # a value: when, and in which layer
    found: list[int | None] = []
    for index, bsym in enumerate(trace.bound_symbols):
        own = list(_own(bsym, paths))
        operands = [made[p.name] for p in bsym.flat_proxy_args if p.name in made]
        if own:
            layer = max((numbers[path] for path in own if path in numbers), default=None)
        else:
            layer = max(operands, key=lambda m: m[0])[1] if operands else None
        found.append(layer)
        made.update({p.name: (index, layer) for p in bsym.flat_proxy_outs if p.name not in made})
    return found
