"""The rules of convolutions and pooling: samples stay apart, and positions too where a window is a single position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from thunder_mem.sharding.op_rules import rule
from thunder_mem.sharding.propagation import Axis, Relation

__all__ = ["positions_apart"]

_NEIGHBOURS = "its windows reach over neighbouring rows"
_CHANNELS = "it sums over rows, and its terms are rows of a matrix product"
_GROUPS = "its channels are in groups"


def positions_apart(
    weight: TensorProxy, stride: Sequence[int], padding: Sequence[int], output_padding: Sequence[int]
) -> tuple[int, ...]:
    """The dims of space along which each position of a convolution's result reads one position of its argument.

    >>> from types import SimpleNamespace
    >>> positions_apart(SimpleNamespace(shape=(8, 4, 1, 3), ndim=4), (1, 1), (0, 1), (0,))
    (2,)
    """

    def at(numbers: Sequence[int], d: int) -> int:
        return numbers[d - 2] if len(numbers) > 1 else numbers[0]

    return tuple(
        d
        for d in range(2, weight.ndim)
        if (weight.shape[d], at(stride, d), at(padding, d), at(output_padding, d)) == (1, 1, 0, 0)
    )


@rule(PrimIDs.CONVOLUTION)
def _convolution(
    a: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Relation:
    apart = positions_apart(weight, stride, padding, output_padding)
    links: list[tuple[Axis, ...]] = [((0, d), (-1, d)) for d in (0, *apart)]
    blocked: dict[Axis, str] = dict.fromkeys([(0, 1), (1, 1)], _CHANNELS)
    blocked |= {axis: _NEIGHBOURS for d in range(2, a.ndim) if d not in apart for axis in ((0, d), (-1, d))}
    blocked |= {(1, d): _NEIGHBOURS for d in range(2, a.ndim)}
    channels: tuple[Axis, ...] = ((1, 0), *(((2, 0),) if bias is not None else ()), (-1, 1))
    if groups == 1:
        links.append(channels)
    else:
        blocked |= dict.fromkeys(channels, _GROUPS)
    linear = (frozenset({0}), frozenset({1})) if bias is None else ()
    return Relation(links=tuple(links), blocked=blocked, linear=linear)


def _pooling(space: int) -> Any:
    """The rule of a pooling over the last `space` dims."""

    def pooling(a: TensorProxy, *_: Any, **__: Any) -> Relation:
        leading = a.ndim - space
        return Relation(
            links=tuple(((0, d), (-1, d)) for d in range(leading)),
            blocked={axis: _NEIGHBOURS for d in range(leading, a.ndim) for axis in ((0, d), (-1, d))},
        )

    return pooling


for _space in (1, 2, 3):
    for _kind in ("avg_pool", "max_pool"):
        rule(f"torch.nn.functional.{_kind}{_space}d")(_pooling(_space))
rule("torch.nn.functional.adaptive_avg_pool2d")(_pooling(2))
