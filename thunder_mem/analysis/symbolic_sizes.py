"""Shapes and sizes written with the names of dims: ``(B, T, 4096)`` instead of ``(3, 17, 4096)``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from math import prod

__all__ = ["Dims"]

_SHOWN = 20  # sizes that an error lists


class Dims:
    """Sizes that stand for dims of the example: batch, sequence and the like.

    A size in a shape is written as the dim of that size, or as the product of two dims.

    Args:
        sizes: name -> size in the example.

    Raises:
        ValueError: ambiguous sizes: below 2, or two dims (or a dim and a product) are equal.

    Example:
        >>> dims = Dims({"B": 3, "T": 17})
        >>> dims.shape((3, 17, 64)), dims.shape((51, 64)), dims.nbytes((51, 64), 2)
        ('(B, T, 64)', '(B*T, 64)', '128*B*T')
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._names: dict[int, str] = {}
        given = dict(sizes or {})
        for name, size in given.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"a dim has a name such as 'B', not {name!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 2:
                raise ValueError(f"dim {name} has the size {size!r}: take an example of at least 2")
        ways = [(name,) for name in given] + list(combinations(given, 2))
        for way in ways:
            size = prod(given[name] for name in way)
            if size in self._names:
                raise ValueError(f"{'*'.join(way)} and {self._names[size]} are both {size}: take sizes that differ")
            self._names[size] = "*".join(way)
        self.sizes = given

    def check_occur(self, sizes: Collection[int]) -> None:
        """Refuse a dim that no shape has.

        Args:
            sizes: all sizes in shapes.

        Raises:
            ValueError: neither a dim's size nor a product with it is among them.
        """
        occurring = {name for n in sizes if n in self._names for name in self._names[n].split("*")}
        for name, size in self.sizes.items():
            if name not in occurring:
                known = sorted(n for n in sizes if n > 1)
                shown = ", ".join(map(str, known[:_SHOWN])) + (", ..." if len(known) > _SHOWN else "")
                raise ValueError(f"dim {name} is {size}, and nothing in this program has that size; sizes are {shown}")

    def clashes(self, shape: Sequence[int]) -> str:
        """The first dim whose size is also in a shape without dims, such as a parameter's; "" if none is."""
        return next((self._names[n] for n in shape if n in self._names), "")

    def repeated(self, shape: Sequence[int]) -> str:
        """The first dim whose size is in a shape twice; "" if none is."""
        return next((self._names[n] for n in shape if n in self._names and list(shape).count(n) > 1), "")

    def shape(self, shape: Sequence[int]) -> str:
        """A shape as text."""
        inside = ", ".join(self._names.get(n, str(n)) for n in shape)
        return f"({inside},)" if len(shape) == 1 else f"({inside})"

    def nbytes(self, shape: Sequence[int], item_bytes: int) -> str:
        """The bytes of a dense tensor as a product: a number, then dims."""
        names = [self._names[n] for n in shape if n in self._names]
        number = item_bytes * prod(n for n in shape if n not in self._names)
        return "*".join([str(number), *names])
