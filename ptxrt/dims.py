"""Shapes as strings: products and quotients of named axes, solved against actual sizes.

A shape is words separated by spaces, a word is axes and whole numbers joined by `*` and `/`:
`"rows cols/32"` is a matrix with one column for every 32 of `cols`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, prod

_WORD = re.compile(r"[a-z_][a-z0-9_]*|[0-9]+|[*/]", re.ASCII)


class DimensionError(ValueError):
    """Sizes do not fit a shape; the binder turns it into an ArgumentError that names the argument."""


@dataclass(frozen=True)
class Dim:
    """One word of a shape: numerator * product(axes) / denominator, in lowest terms."""

    axes: tuple[str, ...]
    numerator: int = 1
    denominator: int = 1

    @classmethod
    def parse(cls, word: str) -> "Dim":
        """Read one word such as `rows`, `cols/32`, `rows*cols` or `16`; ValueError for anything else."""
        tokens = _WORD.findall(word)
        if "".join(tokens) != word or len(tokens) % 2 == 0:
            raise ValueError(f"`{word}` is no dimension: join axes and whole numbers by * and /")
        axes: list[str] = []
        numerator = denominator = 1
        for operator, operand in zip(["*", *tokens[1::2]], tokens[0::2]):
            if operator not in "*/" or operand in "*/":
                raise ValueError(f"`{word}` is no dimension: join axes and whole numbers by * and /")
            if operand.isdigit() and operator == "*":
                numerator *= int(operand)
            elif operand.isdigit():
                denominator *= int(operand)
            elif operator == "*":
                axes.append(operand)
            else:
                raise ValueError(f"`{word}` divides by the axis {operand}; only whole numbers divide")
        if numerator == 0 or denominator == 0:
            raise ValueError(f"`{word}` holds a zero")
        common = gcd(numerator, denominator)
        return cls(tuple(axes), numerator // common, denominator // common)

    def __str__(self) -> str:
        factors = list(self.axes)
        if self.numerator != 1 or not factors:
            factors.insert(0, str(self.numerator))
        return "*".join(factors) + (f"/{self.denominator}" if self.denominator != 1 else "")

    @property
    def is_axis(self) -> bool:
        """Whether this is an axis by itself."""
        return len(self.axes) == 1 and self.numerator == self.denominator == 1

    def size(self, axes: Mapping[str, int]) -> int:
        """The size under known axes; DimensionError if the division leaves a remainder."""
        size, rest = divmod(self.numerator * prod(axes[axis] for axis in self.axes), self.denominator)
        if rest:
            raise DimensionError(f"{self} is not a whole number for " + ", ".join(f"{a}={axes[a]}" for a in self.axes))
        return size

    def solve(self, size: int, axes: Mapping[str, int]) -> tuple[str, int] | None:
        """The one axis that is unknown and its size; None if none or several are unknown, or if a known one is 0.

        DimensionError if no whole number fits.
        """
        unknown = [axis for axis in self.axes if axis not in axes]
        if len(unknown) != 1:
            return None
        known = self.numerator * prod(axes[axis] for axis in self.axes if axis in axes)
        if known == 0:
            return None
        value, rest = divmod(size * self.denominator, known)
        if rest:
            raise DimensionError(f"no whole {unknown[0]} makes {self} equal to {size}")
        return unknown[0], value


@dataclass(frozen=True)
class Shape:
    """The dimensions of one argument, in the order they lie in memory (the last one contiguous)."""

    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.dims)) + "]"

    def __len__(self) -> int:
        return len(self.dims)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Named axes in order of first appearance."""
        return tuple(dict.fromkeys(axis for dim in self.dims for axis in dim.axes))

    def sizes(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The actual shape under known axes; DimensionError if a division leaves a remainder."""
        return tuple(dim.size(axes) for dim in self.dims)


@cache
def parse_shape(text: str) -> Shape:
    """Read a shape such as `"rows cols/32"`; an empty string is the shape of a scalar."""
    return Shape(tuple(Dim.parse(word) for word in text.split()))


def multiple_of(axis: str, shapes) -> int:
    """The number that `axis` must be a multiple of, so that no quotient of it alone leaves a remainder."""
    step = 1
    for shape in shapes:
        for dim in shape.dims:
            if dim.axes == (axis,):
                step = step * dim.denominator // gcd(step, dim.denominator)
    return step
