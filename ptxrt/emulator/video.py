"""SIMD video instructions on the two halves or four bytes of a word; CUDA's `__vabsdiffu4` and similar compile to them.

A selector picks the elements of a source among the halves or bytes of both sources (`a.b3210`, `b.h32`), and the
elements of the destination that are written (`d.b10`). parse.py passes selectors as immediates after the operands.

Source: PTX ISA 9.0, section 9.7, video instructions (vadd2 to vset4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .instruction import Lanes, Semantics, Unsupported, define

_TYPES = ("u32", "s32")


def _average(a, b):
    """(a + b) / 2, rounded to nearest, ties away from zero."""
    total = a + b
    return (total + (total >= 0)) >> 1


_OPERATIONS: dict[str, Callable] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vavrg": _average,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_COMPARISONS: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _elements(a, b, lanes: int, selector: int, signed: bool) -> list[np.ndarray]:
    """The selected elements, lowest first, as int64.

    Hexadecimal digit i of the selector is the index of element i, from the lowest element of a to the highest of b.
    """
    both = np.asarray(a, np.uint64) | (np.asarray(b, np.uint64) << np.uint64(32))
    bits = 32 // lanes
    picked = [
        (both >> np.uint64(bits * (selector >> 4 * lane & 15))) & np.uint64((1 << bits) - 1) for lane in range(lanes)
    ]
    sign = 1 << (bits - 1)
    return [(each.astype(np.int64) ^ sign) - sign if signed else each.astype(np.int64) for each in picked]


def _simd(
    lanes: int, operation: Callable, types: tuple[str, str], clamp: tuple[int, int] | None, adds: bool
) -> Semantics:
    """An operation on elements. The results replace elements of c or, with `adds`, are summed and added to c."""
    bits = 32 // lanes
    first = sum(lane << 4 * lane for lane in range(lanes))
    second = sum(lane + lanes << 4 * lane for lane in range(lanes))

    def run(a, b, c, mask=None, of_a=None, of_b=None):
        mask = (1 << lanes) - 1 if mask is None else mask
        left = _elements(a, b, lanes, first if of_a is None else of_a, types[0] == "s32")
        right = _elements(a, b, lanes, second if of_b is None else of_b, types[1] == "s32")
        word = np.asarray(c, np.int64)
        for lane, (one, other) in enumerate(zip(left, right)):
            if not mask >> lane & 1:
                continue
            result = np.asarray(operation(one, other), np.int64)
            if clamp is not None:
                result = np.clip(result, *clamp)
            if adds:
                word = word + result
            else:
                field = (1 << bits) - 1 << bits * lane
                word = (word & ~field) | ((result << bits * lane) & field)
        return (word & 0xFFFFFFFF).astype(np.uint32)

    return Lanes("b32", "b32, b32, b32, imm?, imm?, imm?", run, scalars=True)


def _operation(name: str, lanes: int, modifiers: tuple[str, ...]) -> Semantics:
    types, flags = [word for word in modifiers if word in _TYPES], {word for word in modifiers if word not in _TYPES}
    if len(types) != 3 or flags - {"sat", "add"} or len(flags) > 1 or len(modifiers) != 3 + len(flags):
        raise Unsupported(f"expected {name}{lanes}.dtype.atype.btype{{.sat|.add}} of .u32 and .s32")
    bits = 32 // lanes
    limits = (0, (1 << bits) - 1) if types[0] == "u32" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return _simd(lanes, _OPERATIONS[name], (types[1], types[2]), limits if "sat" in flags else None, "add" in flags)


def _comparison(lanes: int, modifiers: tuple[str, ...]) -> Semantics:
    """vset2, vset4: 1 where the comparison holds, else 0."""
    types, flags = [word for word in modifiers if word in _TYPES], [word for word in modifiers if word not in _TYPES]
    if len(types) != 2 or not flags or flags[0] not in _COMPARISONS or flags[1:] not in ([], ["add"]):
        raise Unsupported(f"expected vset{lanes}.atype.btype.{{{'|'.join(_COMPARISONS)}}}{{.add}} of .u32 and .s32")
    return _simd(lanes, _COMPARISONS[flags[0]], (types[0], types[1]), None, flags[1:] == ["add"])


for _lanes in (2, 4):
    for _name in _OPERATIONS:
        define(f"{_name}{_lanes}")(partial(_operation, _name, _lanes))
    define(f"vset{_lanes}")(partial(_comparison, _lanes))
