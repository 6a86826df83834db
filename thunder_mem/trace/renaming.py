"""Bound symbols and tensors under other names.

Thunder's own `from_bsym_swap_proxies` flattens and rebuilds every argument of every subsymbol, and its `replace_name`
infers all of a tensor's properties anew. A plan that repeats thousands of operations would spend half of its time
there. So this module handles the usual arguments, and leaves the rest to Thunder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

__all__ = ["named", "renamed", "under"]

_LITERALS = (int, float, bool, str, complex, type(None), Device)


def named(proxy: Proxy, name: str) -> Proxy:
    """The same tensor or number under another name, which is made unique in the current trace."""
    if type(proxy) is not TensorProxy:
        return proxy.replace_name(name, disambiguate=True)
    trace = get_tracectx()
    unique, count = name, 0
    while trace.has_name(unique):
        unique, count = f"{name}_{count}", count + 1
    trace.add_name(unique)
    return under(proxy, unique)


def under(proxy: TensorProxy, name: str) -> TensorProxy:
    """The same tensor under another name, which is not added to a trace."""
    new = object.__new__(TensorProxy)
    vars(new).update(vars(proxy), _name=name, _tags=set(proxy.tags), _has_weak_name=False)
    return new


def renamed(bsym: BoundSymbol, names: Mapping[str, Proxy], *, outputs: bool = True) -> BoundSymbol:
    """The bound symbol and its subsymbols, with other proxies for those that `names` names.

    Args:
        bsym: a bound symbol; returned unchanged if it uses none of the names.
        names: the replacement for the proxy of each name.
        outputs: whether results are also renamed, not only operands.
    """
    args, kwargs = _swap(bsym.args, names), _swap(bsym.kwargs, names)
    output = _swap(bsym.output, names) if outputs else bsym.output
    subsymbols = [renamed(b, names, outputs=outputs) for b in bsym.subsymbols]
    same = args is bsym.args and kwargs is bsym.kwargs and output is bsym.output
    if same and all(new is old for new, old in zip(subsymbols, bsym.subsymbols, strict=True)):
        return bsym
    new = bsym.from_bsym(args=args, kwargs=kwargs, output=output, subsymbols=subsymbols)
    # Flattening is what takes time, and renaming what was flattened gives the same.
    vars(new)["flat_proxy_args"] = tuple([names.get(p.name, p) for p in bsym.flat_proxy_args])
    outs = bsym.flat_proxy_outs
    vars(new)["flat_proxy_outs"] = tuple([names.get(p.name, p) for p in outs]) if outputs else outs
    return new


def _swap(value: Any, names: Mapping[str, Proxy]) -> Any:
    """A tree of arguments with its proxies replaced; the very same object if none is."""
    kind = type(value)
    if kind is TensorProxy:
        return names.get(value.name, value)
    if kind in _LITERALS or isinstance(value, dtype):
        return value
    if kind is tuple or kind is list:
        new = [_swap(x, names) for x in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return tuple(new) if kind is tuple else new
    if kind is dict:
        swapped = {k: _swap(x, names) for k, x in value.items()}
        return value if all(swapped[k] is x for k, x in value.items()) else swapped
    if isinstance(value, CollectionProxy):  # which shares its contents with every other mention of it
        value.coll = _swap(value.collection(), names)
        return value
    if isinstance(value, Proxy):
        return names.get(value.name, value)
    # By itself an object that Thunder does not know, such as a chunk loop, could not be flattened.
    flat, spec = tree_flatten_with_dataclass((value,))
    if len(flat) == 1 and flat[0] is value:  # a dtype, a device, ...
        return value
    return tree_unflatten([_swap(x, names) for x in flat], spec)[0]
