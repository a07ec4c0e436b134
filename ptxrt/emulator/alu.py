"""Integer, float, comparison, logic and shift instructions on registers: the ones that nvcc emits for plain C++.

Results of float arithmetic may hold any NaN (`loose_nan`); the code generator makes them canonical where their bits
become visible. Functions take `out=` where that saves a copy. The rounding itself is in floats.py.

Source: PTX ISA 9.0, sections 9.7.1 (integer), 9.7.2 (extended precision), 9.7.3 to 9.7.5 (float, half), 9.7.6 and
9.7.7 (comparison), 9.7.8 (logic and shift), 9.7.9.7 (prmt).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from .floats import (
    adjusted_quotient,
    clamped,
    deliver,
    directed_root,
    exact_zero,
    float_extreme,
    flushed,
    flushed_half,
    fma_bf16,
    fma_f32,
    fma_f64,
    nan_extreme,
    on_elements,
    pair_of_floats,
    round_directed,
    rounded_binary,
    small_format,
    small_function,
    two_sum,
    with_relu,
    xorsign,
)
from .instruction import DTYPES, Lanes, Semantics, Unsupported, define

_INTEGERS = frozenset(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
_BITS = frozenset({"b16", "b32", "b64"})
_PACKED_INTEGERS = {"u16x2": "u2", "s16x2": "i2"}
_ROUNDINGS = frozenset({"rn", "rz", "rm", "rp"})
_SMALL_FLOATS = frozenset({"f16", "f16x2", "bf16", "bf16x2"})
_FLOATS = frozenset({"f32", "f64"}) | _SMALL_FLOATS


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(f"expected {what}")


def _type(modifiers: tuple[str, ...], allowed: frozenset[str]) -> str:
    _expect(bool(modifiers) and modifiers[-1] in allowed, f"a type among {', '.join(sorted(allowed))}")
    return modifiers[-1]


def _only(modifiers: tuple[str, ...], *allowed: str) -> None:
    unknown = set(modifiers) - set(allowed)
    _expect(not unknown, f"no .{'.'.join(sorted(unknown))}" if unknown else "")


def _packed_integers(function: Callable, dtype: str) -> Callable:
    """An operation on 16-bit integers, applied to both halves of a word."""

    def halves(*operands):
        operands = np.broadcast_arrays(*operands)
        parts = [np.ascontiguousarray(operand).view(dtype) for operand in operands]
        shape = operands[0].shape
        return np.asarray(function(*parts)).view(np.uint32).reshape(shape)

    return halves


# ---------------------------------------------------------------------------------------------------------------
# Integer arithmetic

_WIDE = {"u16": "u4", "s16": "i4", "u32": "u8", "s32": "i8"}


def _high_product(a, b, type: str):
    """The upper half of the full product."""
    bits = int(type[1:])
    if bits < 64:
        wide = _WIDE[type]
        return ((a.astype(wide) * b.astype(wide)) >> np.array(bits, wide)).astype(DTYPES[type])
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    high = x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)
    if type == "s64":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(DTYPES[type])


def _product(half: str, type: str) -> tuple[str, Callable]:
    """(result type, function) of mul.lo, .hi or .wide."""
    if half == "lo":
        return type, np.multiply
    if half == "hi":
        return type, lambda a, b: _high_product(a, b, type)
    _expect(type in _WIDE, "a 16 or 32-bit type with .wide")
    wide = _WIDE[type]
    return f"{type[0]}{2 * int(type[1:])}", lambda a, b: np.multiply(a.astype(wide), b.astype(wide))


def _saturated(function: Callable) -> Callable:
    """add.sat, sub.sat on s32."""

    def saturate(a, b):
        return np.clip(function(a.astype(np.int64), b.astype(np.int64)), -(2**31), 2**31 - 1).astype(np.int32)

    return saturate


def _carry_in(carry, dtype):
    return np.asarray(carry).astype(dtype)


def _add_carry(a, b, carry=None):
    """(a + b + carry, carry out)."""
    total = a + b
    over = total < a
    if carry is not None:
        again = total + _carry_in(carry, total.dtype)
        over = over | (again < total)
        total = again
    return total, over


def _subtract_borrow(a, b, borrow=None):
    """(a - b - borrow, borrow out)."""
    total = a - b
    under = a < b
    if borrow is not None:
        again = total - _carry_in(borrow, total.dtype)
        under = under | (again > total)
        total = again
    return total, under


def _extended(function: Callable, type: str, sets: bool, uses: bool) -> Semantics:
    """add.cc, addc, sub.cc, subc, mad.cc and madc; the carry flag is an extra operand (decode.py)."""
    unsigned = "u" + type[1:]
    count = function.operands

    def run(*operands):
        result, carry = function(*operands[:count], operands[count] if uses else None)
        return (result, carry) if sets else result

    sources = ", ".join([unsigned] * count + (["pred"] if uses else []))
    semantics = Lanes(unsigned + (", pred" if sets else ""), sources, run, scalars=True)
    semantics.options.update(carry_out=sets, carry_in=uses)
    return semantics


_add_carry.operands = 2
_subtract_borrow.operands = 2


def _carry_form(base: str, modifiers: tuple[str, ...]) -> tuple[str, bool, bool]:
    """(type, writes the carry, reads the carry) of add.cc, addc{.cc}, ..."""
    type = _type(modifiers, frozenset({"u32", "s32", "u64", "s64", "b32", "b64"}))
    return type, "cc" in modifiers, base.endswith("c")


def _arithmetic(name: str, ufunc: np.ufunc) -> Callable:
    carry = _add_carry if name == "add" else _subtract_borrow

    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        type = modifiers[-1] if modifiers else ""
        if type in _PACKED_INTEGERS:
            _only(modifiers, type)
            return Lanes("b32", "b32, b32", _packed_integers(ufunc, _PACKED_INTEGERS[type]), scalars=True)
        if type in _FLOATS or type == "f32x2":
            return _float_binary(name, modifiers)
        _type(modifiers, _INTEGERS)
        if "cc" in modifiers:
            _only(modifiers, "cc", type)
            return _extended(carry, type, True, False)
        if "sat" in modifiers:
            _only(modifiers, "sat", "s32")
            return Lanes(type, f"{type}, {type}", _saturated(ufunc), scalars=True)
        _only(modifiers, type)
        return Lanes(type, f"{type}, {type}", ufunc, out=True)

    return resolver


define("add")(_arithmetic("add", np.add))
define("sub")(_arithmetic("sub", np.subtract))


@define("addc")
def addc(modifiers: tuple[str, ...]) -> Semantics:
    """addc{.cc}.type d, a, b: a + b + carry."""
    type, sets, _ = _carry_form("addc", modifiers)
    return _extended(_add_carry, type, sets, True)


@define("subc")
def subc(modifiers: tuple[str, ...]) -> Semantics:
    """subc{.cc}.type d, a, b: a - b - borrow."""
    type, sets, _ = _carry_form("subc", modifiers)
    return _extended(_subtract_borrow, type, sets, True)


def _mad_carry(half: str, type: str) -> Callable:
    product = np.multiply if half == "lo" else lambda a, b: _high_product(a, b, type)

    def run(a, b, c, carry=None):
        dtype = DTYPES[type]
        low = np.asarray(product(a.view(dtype), b.view(dtype))).view(c.dtype)
        return _add_carry(low, c, carry)

    run.operands = 3
    return run


@define("madc")
def madc(modifiers: tuple[str, ...]) -> Semantics:
    """madc.hilo{.cc}.type d, a, b, c: the half of a * b, plus c, plus carry."""
    type, sets, _ = _carry_form("madc", modifiers)
    _expect(modifiers[0] in ("lo", "hi"), ".lo or .hi")
    return _extended(_mad_carry(modifiers[0], type), type, sets, True)


@define("mul")
def mul(modifiers: tuple[str, ...]) -> Semantics:
    """mul{.lo,.hi,.wide}.type and the float forms."""
    if modifiers and (modifiers[-1] in _FLOATS or modifiers[-1] == "f32x2"):
        return _float_binary("mul", modifiers)
    type = _type(modifiers, _INTEGERS)
    _expect(len(modifiers) == 2 and modifiers[0] in ("lo", "hi", "wide"), ".lo, .hi or .wide")
    result, function = _product(modifiers[0], type)
    return Lanes(result, f"{type}, {type}", function, out=function is np.multiply, scalars=True)


@define("mad")
def mad(modifiers: tuple[str, ...]) -> Semantics:
    """mad{.lo,.hi,.wide}.type d, a, b, c: a * b + c; on floats the same as fma."""
    if modifiers and modifiers[-1] in ("f32", "f64"):
        return fma(modifiers)
    type = _type(modifiers, _INTEGERS)
    _expect(modifiers[0] in ("lo", "hi", "wide"), ".lo, .hi or .wide")
    if "cc" in modifiers:
        return _extended(_mad_carry(modifiers[0], type), type, True, False)
    _expect(modifiers[1:] in ((type,), ("sat", "s32")), "mad.half.type")
    result, product = _product(modifiers[0], type)
    if "sat" in modifiers:
        _expect(modifiers[0] == "hi", ".hi with .sat")
        total = _saturated(np.add)
        return Lanes(
            result, f"{type}, {type}, {result}", lambda a, b, c: total(np.asarray(product(a, b)), c), scalars=True
        )

    def run(a, b, c, out=None):
        return np.add(product(a, b), c, out=out)

    return Lanes(result, f"{type}, {type}, {result}", run, out=True)


def _product24(half: str, type: str) -> Callable:
    """The product of 24-bit values: its low 32 bits, or bits 16 to 47."""
    wide = _WIDE[type]
    unused, shift = np.array(40, wide), np.array(16 if half == "hi" else 0, wide)

    def run(a, b):
        a, b = ((operand.astype(wide) << unused) >> unused for operand in (a, b))
        return ((a * b) >> shift).astype(DTYPES[type])

    return run


@define("mul24")
def mul24(modifiers: tuple[str, ...]) -> Semantics:
    """mul24{.lo|.hi}.{u32|s32} d, a, b: products of 24-bit values."""
    type = _type(modifiers, frozenset({"u32", "s32"}))
    _expect(len(modifiers) == 2 and modifiers[0] in ("lo", "hi"), ".lo or .hi")
    return Lanes(type, f"{type}, {type}", _product24(modifiers[0], type), scalars=True)


@define("mad24")
def mad24(modifiers: tuple[str, ...]) -> Semantics:
    """mad24{.lo|.hi}.{u32|s32} and mad24.hi.sat.s32 d, a, b, c: products of 24-bit values, plus c."""
    type = _type(modifiers, frozenset({"u32", "s32"}))
    saturates = modifiers == ("hi", "sat", "s32")
    _expect(saturates or (len(modifiers) == 2 and modifiers[0] in ("lo", "hi")), ".lo, .hi or .hi.sat.s32")
    product, add = _product24(modifiers[0], type), _saturated(np.add) if saturates else np.add
    return Lanes(type, f"{type}, {type}, {type}", lambda a, b, c: add(product(a, b), c), scalars=True)


@define("sad")
def sad(modifiers: tuple[str, ...]) -> Semantics:
    """sad.type d, a, b, c: c + |a - b|."""
    type = _type(modifiers, _INTEGERS)
    _only(modifiers, type)
    return Lanes(type, f"{type}, {type}, {type}", lambda a, b, c: c + np.where(a < b, b - a, a - b), scalars=True)


def _truncating_divide(a, b):
    """Integer division toward zero; all bits are 1 for a zero divisor (undefined in PTX, NVIDIA GPUs do so)."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    quotient = (a - np.fmod(a, divisor)) // divisor
    return np.where(zero, ~a.dtype.type(0), quotient)


def _truncating_remainder(a, b):
    """Remainder with the sign of a; it is a for a zero divisor."""
    zero = b == 0
    return np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b)))


@define("div")
def div(modifiers: tuple[str, ...]) -> Semantics:
    """div.type on integers, div.rnd{.ftz}.type on f32 and f64."""
    if modifiers and modifiers[-1] in ("f32", "f64"):
        return _float_binary("div", modifiers)
    type = _type(modifiers, _INTEGERS)
    _only(modifiers, type)
    return Lanes(type, f"{type}, {type}", _truncating_divide, scalars=True)


@define("rem")
def rem(modifiers: tuple[str, ...]) -> Semantics:
    """rem.type d, a, b."""
    type = _type(modifiers, _INTEGERS)
    _only(modifiers, type)
    return Lanes(type, f"{type}, {type}", _truncating_remainder, scalars=True)


@define("abs")
def abs_(modifiers: tuple[str, ...]) -> Semantics:
    """abs{.ftz}.type."""
    return _sign_operation("abs", modifiers)


@define("neg")
def neg(modifiers: tuple[str, ...]) -> Semantics:
    """neg{.ftz}.type."""
    return _sign_operation("neg", modifiers)


_SIGNS = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}


def _sign_operation(name: str, modifiers: tuple[str, ...]) -> Semantics:
    type = _type(modifiers, frozenset({"s16", "s32", "s64"}) | _FLOATS)
    _only(modifiers, "ftz", type)
    ufunc = np.absolute if name == "abs" else np.negative
    if type[0] == "s":
        return Lanes(type, type, ufunc, out=True)
    if type in ("f32", "f64"):
        if "ftz" in modifiers:
            return Lanes(type, type, lambda a: ufunc(flushed(a)), scalars=True, loose_nan=True)
        return Lanes(type, type, ufunc, out=True, loose_nan=True)
    bits = f"b{8 * DTYPES[type].itemsize}"
    sign = np.array(_SIGNS[type], DTYPES[bits])
    if "ftz" in modifiers:
        _expect(type.startswith("f16"), "no .ftz on bf16")
        return _small_unary(type, lambda a: ufunc(flushed_half(a)))
    if name == "abs":
        return Lanes(bits, bits, lambda a, out=None: np.bitwise_and(a, ~sign, out=out), out=True)
    return Lanes(bits, bits, lambda a, out=None: np.bitwise_xor(a, sign, out=out), out=True)


def _population(a):
    """Set bits per element."""
    counts = np.bitwise_count(a)
    return counts.astype(np.uint32)


def _leading_zeros(a):
    """Zeros above the highest set bit."""
    bits = 8 * a.dtype.itemsize
    spread = a
    shift = 1
    while shift < bits:
        spread = spread | (spread >> a.dtype.type(shift))
        shift *= 2
    return (np.uint32(bits) - _population(spread)).astype(np.uint32)


@define("popc")
def popc(modifiers: tuple[str, ...]) -> Semantics:
    """popc.b32, .b64: the number of set bits."""
    type = _type(modifiers, frozenset({"b32", "b64"}))
    return Lanes("u32", type, _population, scalars=True)


@define("clz")
def clz(modifiers: tuple[str, ...]) -> Semantics:
    """clz.b32, .b64: the number of leading zeros; the width for 0."""
    type = _type(modifiers, frozenset({"b32", "b64"}))
    return Lanes("u32", type, _leading_zeros, scalars=True)


@define("bfind")
def bfind(modifiers: tuple[str, ...]) -> Semantics:
    """bfind{.shiftamt}.type: position of the highest bit that differs from the sign, with .shiftamt its distance from
    the top bit; 0xffffffff for none."""
    type = _type(modifiers, frozenset({"u32", "s32", "u64", "s64"}))
    _only(modifiers, "shiftamt", type)
    bits = int(type[1:])

    def run(a):
        if type[0] == "s":
            a = np.where(a < 0, ~a, a)
        zeros = _leading_zeros(np.asarray(a).view(f"u{bits // 8}"))
        found = zeros if "shiftamt" in modifiers else np.uint32(bits - 1) - zeros
        return np.where(zeros == bits, np.uint32(0xFFFFFFFF), found)

    return Lanes("u32", type, run, scalars=True)


@define("fns")
def fns(modifiers: tuple[str, ...]) -> Semantics:
    """fns.b32 d, mask, base, offset: the offset-th set bit from base on; 0xffffffff for none."""
    _expect(modifiers == ("b32",), "fns.b32")

    def run(mask, base, offset):
        mask, base, offset = np.broadcast_arrays(mask, base, offset)
        found = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
        here = (offset == 0) & (((mask >> (base & np.uint32(31))) & np.uint32(1)) == 1)
        found = np.where(here, base, found)
        for direction in (1, -1):
            left = np.where(offset * direction > 0, offset * direction, 0)
            # The bit at base itself counts as the first one.
            for step in range(32):
                at = base.astype(np.int64) + direction * step
                inside = (at >= 0) & (at < 32)
                bit = inside & (((mask.astype(np.int64) >> np.clip(at, 0, 31)) & 1) == 1) & (left > 0)
                left = left - bit
                found = np.where(bit & (left == 0), at, found)
        return found.astype(np.uint32)

    return Lanes("u32", "b32, u32, s32", run, scalars=True)


@define("brev")
def brev(modifiers: tuple[str, ...]) -> Semantics:
    """brev.b32, .b64: bits in reverse order."""
    type = _type(modifiers, frozenset({"b32", "b64"}))
    dtype = DTYPES[type]
    masks = [(1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)]

    def run(a):
        for shift, mask in masks:
            low, count = np.array(mask & (1 << 8 * dtype.itemsize) - 1, dtype), np.array(shift, dtype)
            a = ((a >> count) & low) | ((a & low) << count)
        return np.asarray(a).byteswap()

    return Lanes(type, type, run, scalars=True)


def _mask(length, dtype):
    """Ones in the lowest `length` bits; `length` may exceed the width."""
    bits = 8 * np.dtype(dtype).itemsize
    full = np.array((1 << bits) - 1, dtype)
    safe = np.minimum(length, bits - 1).astype(dtype)
    return np.where(length >= bits, full, (np.array(1, dtype) << safe) - np.array(1, dtype))


@define("bfe")
def bfe(modifiers: tuple[str, ...]) -> Semantics:
    """bfe.type d, a, b, c: the field of c bits from bit b of a, sign-extended in signed types."""
    type = _type(modifiers, frozenset({"u32", "s32", "u64", "s64"}))
    bits = int(type[1:])
    dtype = np.dtype(f"u{bits // 8}")

    def run(a, position, length):
        position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
        raw = np.asarray(a).view(dtype)
        safe = np.minimum(position, bits - 1).astype(dtype)
        field = np.where(position < bits, raw >> safe, dtype.type(0)) & _mask(length, dtype)
        if type[0] == "s":
            top = np.minimum(position + length - np.uint32(1), bits - 1).astype(dtype)
            sign = np.where(length == 0, dtype.type(0), (raw >> top) & dtype.type(1))
            inside = np.minimum(length, np.uint32(bits) - np.minimum(position, np.uint32(bits)))
            field = np.where(sign == 1, field | ~_mask(inside, dtype), field)
        return field.view(DTYPES[type])

    return Lanes(type, f"{type}, u32, u32", run, scalars=True)


@define("bfi")
def bfi(modifiers: tuple[str, ...]) -> Semantics:
    """bfi.type f, a, b, c, d: b with its d bits from bit c on replaced by the lowest d bits of a."""
    type = _type(modifiers, frozenset({"b32", "b64"}))
    dtype = DTYPES[type]
    bits = 8 * dtype.itemsize

    def run(a, b, position, length):
        position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
        safe = np.minimum(position, bits - 1).astype(dtype)
        mask = np.where(position < bits, _mask(length, dtype) << safe, dtype.type(0))
        return (b & ~mask) | ((a << safe) & mask)

    return Lanes(type, f"{type}, {type}, u32, u32", run, scalars=True)


@define("szext")
def szext(modifiers: tuple[str, ...]) -> Semantics:
    """szext.mode.type d, a, b: the lowest b bits of a, zero- or sign-extended."""
    _expect(
        len(modifiers) == 2 and modifiers[0] in ("clamp", "wrap") and modifiers[1] in ("u32", "s32"),
        "szext.clamp|wrap.u32|s32",
    )
    wrap, signed = modifiers[0] == "wrap", modifiers[1] == "s32"

    def run(a, length):
        length = length & np.uint32(31) if wrap else np.minimum(length, 32)
        mask = _mask(length, np.dtype("u4"))
        raw = np.asarray(a).view(np.uint32)
        field = raw & mask
        if signed:
            sign = (raw >> np.where(length == 0, 0, length - np.uint32(1)).astype(np.uint32)) & np.uint32(1)
            field = np.where((length > 0) & (sign == 1), field | ~mask, field)
        return field.view(DTYPES[modifiers[1]])

    return Lanes(modifiers[1], f"{modifiers[1]}, u32", run, scalars=True)


@define("bmsk")
def bmsk(modifiers: tuple[str, ...]) -> Semantics:
    """bmsk.mode.b32 d, a, b: a mask of b ones from bit a on."""
    _expect(modifiers in (("clamp", "b32"), ("wrap", "b32")), "bmsk.clamp.b32 or bmsk.wrap.b32")
    wrap = modifiers[0] == "wrap"

    def run(position, length):
        if wrap:
            position, length = position & np.uint32(31), length & np.uint32(31)
        position, length = np.minimum(position, 32).astype(np.uint64), np.minimum(length, 32).astype(np.uint64)
        return (((np.uint64(1) << length) - np.uint64(1)) << position).astype(np.uint32)

    return Lanes("b32", "u32, u32", run, scalars=True)


def _bytes_of(word, signed: bool):
    """The four bytes of each word as int64 (..., 4)."""
    raw = np.asarray(word).astype(np.uint32)
    parts = np.stack([(raw >> np.uint32(8 * byte)) & np.uint32(0xFF) for byte in range(4)], axis=-1).astype(np.int64)
    return np.where(parts > 127, parts - 256, parts) if signed else parts


@define("dp4a")
def dp4a(modifiers: tuple[str, ...]) -> Semantics:
    """dp4a.atype.btype d, a, b, c: c plus the dot product of four bytes."""
    _expect(len(modifiers) == 2 and set(modifiers) <= {"u32", "s32"}, "dp4a.atype.btype")
    left, right = modifiers[0] == "s32", modifiers[1] == "s32"

    def run(a, b, c):
        total = (_bytes_of(a, left) * _bytes_of(b, right)).sum(axis=-1)
        return (total + c.astype(np.int64)).astype(np.uint32)

    return Lanes("u32", "b32, b32, u32", run, scalars=True)


@define("dp2a")
def dp2a(modifiers: tuple[str, ...]) -> Semantics:
    """dp2a.half.atype.btype d, a, b, c: c plus the dot product of the halves of a with two bytes of b."""
    _expect(
        len(modifiers) == 3 and modifiers[0] in ("lo", "hi") and set(modifiers[1:]) <= {"u32", "s32"},
        "dp2a.lo|hi.atype.btype",
    )
    first = 0 if modifiers[0] == "lo" else 2
    left, right = modifiers[1] == "s32", modifiers[2] == "s32"

    def run(a, b, c):
        raw = np.asarray(a).astype(np.uint32)
        halves = np.stack([raw & np.uint32(0xFFFF), raw >> np.uint32(16)], axis=-1).astype(np.int64)
        halves = np.where(halves > 0x7FFF, halves - 0x10000, halves) if left else halves
        total = (halves * _bytes_of(b, right)[..., first : first + 2]).sum(axis=-1)
        return (total + c.astype(np.int64)).astype(np.uint32)

    return Lanes("u32", "b32, b32, u32", run, scalars=True)


# ---------------------------------------------------------------------------------------------------------------
# Minimum and maximum


def _extreme(name: str, modifiers: tuple[str, ...]) -> Semantics:
    if modifiers[-1:] == ("relu",):  # nvcc writes max.s16x2.relu
        modifiers = ("relu", *modifiers[:-1])
    type = modifiers[-1] if modifiers else ""
    ufunc = np.minimum if name == "min" else np.maximum
    if type in _PACKED_INTEGERS:
        relu = "relu" in modifiers
        _only(modifiers, type, *(["relu"] if type == "s16x2" else []))
        function = (lambda a, b: np.maximum(ufunc(a, b), np.int16(0))) if relu else ufunc
        return Lanes("b32", "b32, b32", _packed_integers(function, _PACKED_INTEGERS[type]), scalars=True)
    if type in _INTEGERS:
        if "relu" in modifiers:
            _only(modifiers, "relu", "s32")
            return Lanes(type, f"{type}, {type}", lambda a, b: np.maximum(ufunc(a, b), np.int32(0)), scalars=True)
        _only(modifiers, type)
        return Lanes(type, f"{type}, {type}", ufunc, out=True)
    _type(modifiers, _FLOATS)
    _only(modifiers, "ftz", "NaN", "xorsign", "abs", type)
    _expect(("xorsign" in modifiers) == ("abs" in modifiers), ".xorsign.abs")
    plain = nan_extreme(name) if "NaN" in modifiers else float_extreme(name)
    special = "ftz" in modifiers or "xorsign" in modifiers
    function = xorsign(plain) if "xorsign" in modifiers else plain
    if type in _SMALL_FLOATS:
        return _small_binary(type, function, ftz="ftz" in modifiers)
    if "ftz" in modifiers:
        inner = function
        function = lambda a, b: inner(flushed(a), flushed(b))

    def run(a, b, c=None, out=None):
        result = function(a, b) if special or c is not None or out is a or out is b else function(a, b, out=out)
        if c is not None:
            result = function(result, c)
        return result if result is out else deliver(result, out)

    return Lanes(type, f"{type}, {type}, {type}?", run, out=True, loose_nan=True)


@define("min")
def min_(modifiers: tuple[str, ...]) -> Semantics:
    """min{.relu} of integers; min{.ftz}{.NaN}{.xorsign.abs} of floats, of three f32 too."""
    return _extreme("min", modifiers)


@define("max")
def max_(modifiers: tuple[str, ...]) -> Semantics:
    """max{.relu} of integers; max{.ftz}{.NaN}{.xorsign.abs} of floats, of three f32 too."""
    return _extreme("max", modifiers)


# ---------------------------------------------------------------------------------------------------------------
# Float arithmetic on f32 and f64


@define("fma")
def fma(modifiers: tuple[str, ...]) -> Semantics:
    """fma.rnd{.ftz}{.sat}.f32, fma.rnd.f64, fma.rn{.ftz}{.sat}{.relu}.f16{x2}, fma.rn{.relu}.bf16{x2}: a single
    rounding."""
    type = _type(modifiers, _FLOATS | {"f32x2"})
    _only(modifiers, "ftz", "sat", "relu", *_ROUNDINGS, type)
    mode = next((word for word in modifiers if word in _ROUNDINGS), "rn")
    ftz, sat, relu = "ftz" in modifiers, "sat" in modifiers, "relu" in modifiers
    if type in _SMALL_FLOATS:
        _expect(mode == "rn", ".rn")
        return _small_fma(type, ftz, sat, relu)
    _expect(not relu, "no .relu")
    if type == "f64":
        _expect(mode == "rn" and not ftz and not sat, "fma.rn.f64")
        return Lanes(type, "f64, f64, f64", fma_f64, scalars=True, loose_nan=True)
    if type == "f32x2":
        _expect(mode == "rn" and not ftz and not sat, "fma.rn.f32x2")
        return Lanes("b64", "b64, b64, b64", pair_of_floats(fma_f32), scalars=True)
    if mode == "rn" and not ftz and not sat:
        return Lanes(type, "f32, f32, f32", fma_f32, out=True, loose_nan=True)

    def run(a, b, c):
        if ftz:
            a, b, c = flushed(a), flushed(b), flushed(c)
        if mode == "rn":
            result = fma_f32(a, b, c)
        else:
            product = np.multiply(a, b, dtype=np.float64)
            exact, rest = two_sum(product, np.asarray(c, np.float64))
            result = exact_zero(round_directed(exact, rest, mode, np.float32), exact, rest, product, c, mode)
        return _finished(result, ftz, sat)

    return Lanes(type, "f32, f32, f32", run, scalars=True, loose_nan=True)


def _finished(result, ftz: bool, sat: bool):
    result = flushed(result) if ftz else result
    return clamped(result) if sat else result


_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def _float_binary(name: str, modifiers: tuple[str, ...]) -> Semantics:
    """add, sub, mul, div on floats, in every rounding mode."""
    type = _type(modifiers, _FLOATS | {"f32x2"})
    _only(modifiers, "ftz", "sat", *_ROUNDINGS, type)
    mode = next((word for word in modifiers if word in _ROUNDINGS), "rn")
    ftz, sat = "ftz" in modifiers, "sat" in modifiers
    ufunc = _UFUNCS[name]
    if type == "f32x2":
        _expect(mode == "rn" and not ftz and not sat, f"{name}.rn.f32x2")
        return Lanes("b64", "b64, b64", pair_of_floats(ufunc), scalars=True)
    if type in _SMALL_FLOATS:
        _expect(mode == "rn" and name != "div", ".rn")
        return _small_binary(type, ufunc, ftz, sat)
    _expect(name != "div" or not sat, "no .sat")
    if mode == "rn" and not ftz and not sat:
        return Lanes(type, f"{type}, {type}", ufunc, out=True, loose_nan=True)
    _expect(type == "f32" or not (ftz or sat), "no .ftz or .sat on f64")

    def run(a, b):
        if ftz:
            a, b = flushed(a), flushed(b)
        if mode == "rn":
            return _finished(ufunc(a, b), ftz, sat)
        return _finished(rounded_binary(name, a, b, mode), ftz, sat)

    return Lanes(type, f"{type}, {type}", run, scalars=True, loose_nan=True)


def _unary_rounded(name: str, modifiers: tuple[str, ...], near: Callable, directed: Callable) -> Semantics:
    """rcp and sqrt: `near(a)` (NumPy, IEEE) for .rn, else `directed(a, mode)`."""
    type = _type(modifiers, frozenset({"f32", "f64"}))
    _only(modifiers, "ftz", *_ROUNDINGS, type)
    mode = next((word for word in modifiers if word in _ROUNDINGS), "")
    _expect(bool(mode), f"a rounding mode ({name}.approx belongs to the approximations)")
    ftz = "ftz" in modifiers
    _expect(not ftz or type == "f32", "no .ftz on f64")

    def run(a):
        a = flushed(a) if ftz else a
        result = near(a) if mode == "rn" else directed(a, mode)
        return flushed(result) if ftz else result

    return Lanes(type, type, run, scalars=True, loose_nan=True)


@define("rcp")
def rcp(modifiers: tuple[str, ...]) -> Semantics:
    """rcp.rnd{.ftz}.type: 1 / a, correctly rounded."""
    return _unary_rounded(
        "rcp",
        modifiers,
        lambda a: np.divide(a.dtype.type(1), a),
        lambda a, mode: adjusted_quotient(np.ones_like(a), a, mode),
    )


@define("sqrt")
def sqrt(modifiers: tuple[str, ...]) -> Semantics:
    """sqrt.rnd{.ftz}.type: the square root, correctly rounded."""
    return _unary_rounded("sqrt", modifiers, np.sqrt, directed_root)


@define("testp")
def testp(modifiers: tuple[str, ...]) -> Semantics:
    """testp.property.type: finite, infinite, number, notanumber, normal (zeros too), subnormal."""
    type = _type(modifiers, frozenset({"f32", "f64"}))
    tiny = np.finfo(DTYPES[type]).tiny
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    _expect(len(modifiers) == 2 and modifiers[0] in tests, f"one of {', '.join(tests)}")
    return Lanes("pred", type, tests[modifiers[0]], scalars=True)


@define("copysign")
def copysign(modifiers: tuple[str, ...]) -> Semantics:
    """copysign.type d, a, b: b with the sign of a."""
    type = _type(modifiers, frozenset({"f32", "f64"}))
    _only(modifiers, type)
    return Lanes(type, f"{type}, {type}", lambda a, b: np.copysign(b, a), scalars=True, copies=True)


# ---------------------------------------------------------------------------------------------------------------
# f16 and bf16. A word of two is a pair of consecutive array elements, so one operation computes both.


def _small_semantics(type: str, count: int, function: Callable) -> Semantics:
    """Semantics from a function of float32 arrays that returns float32 or float64 arrays."""
    bits = "b32" if type.endswith("x2") else "b16"
    return Lanes(bits, ", ".join([bits] * count), small_function(type, function), scalars=True)


def _small_unary(type: str, function: Callable) -> Semantics:
    return _small_semantics(type, 1, function)


def _small_operation(type: str, function: Callable, ftz: bool = False, sat: bool = False) -> Callable:
    """An operation in float32. Rounding its result to f16 or bf16 equals a single rounding of a sum, a product or a
    selection."""
    _expect(not ftz or type.startswith("f16"), "no .ftz on bf16")
    if not ftz and not sat:
        return function

    def run(*values):
        if ftz:
            values = [flushed_half(value) for value in values]
        result = function(*values)
        if sat:
            result = clamped(result)
        return flushed_half(result.astype(np.float16).astype(np.float32)) if ftz else result

    return run


def _small_binary(type: str, function: Callable, ftz: bool = False, sat: bool = False) -> Semantics:
    _expect(not sat or type.startswith("f16"), "no .sat on bf16")
    return _small_semantics(type, 2, _small_operation(type, function, ftz, sat))


def _small_fma(type: str, ftz: bool, sat: bool, relu: bool) -> Semantics:
    if type.startswith("bf16"):
        _expect(not ftz and not sat, "no .ftz or .sat on bf16")
        return _small_semantics(type, 3, with_relu(fma_bf16) if relu else fma_bf16)

    def run(x, y, z):
        if ftz:
            x, y, z = flushed_half(x), flushed_half(y), flushed_half(z)
        # float64 is exact for every sum of an f16 product and an f16 addend that is near a tie of f16.
        total = np.multiply(x, y, dtype=np.float64) + z
        if sat:
            total = clamped(total)
        return flushed_half(total.astype(np.float16).astype(np.float32)) if ftz else total

    return _small_semantics(type, 3, with_relu(run) if relu else run)


def _atomic_add(type: str) -> Callable:
    return small_function(type, np.add)


#: Sums on registers of each small float type, for atomics (access.py): (old, value) -> new.
f16_add, f16x2_add, bf16_add, bf16x2_add = (_atomic_add(type) for type in ("f16", "f16x2", "bf16", "bf16x2"))


# ---------------------------------------------------------------------------------------------------------------
# Comparison and selection

_COMPARE: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED_COMPARE = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _ordered_not_equal(a, b):
    return (a < b) | (a > b)


def _either_nan(a, b):
    return np.isnan(a) | np.isnan(b)


def _unordered(compare: Callable) -> Callable:
    """An unordered comparison: true also if an operand is NaN."""

    def run(a, b):
        return compare(a, b) | _either_nan(a, b)

    return run


_FLOAT_COMPARE: dict[str, Callable] = {
    **_COMPARE,
    "ne": _ordered_not_equal,
    **{f"{name}u": _unordered(compare) for name, compare in _COMPARE.items() if name != "ne"},
    "neu": np.not_equal,
    "num": lambda a, b: ~_either_nan(a, b),
    "nan": _either_nan,
}
_BOOLEAN: dict[str, Callable] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(operator: str, type: str) -> Callable:
    if type in _FLOATS:
        table = _FLOAT_COMPARE
    else:
        table = dict(_COMPARE)
        if type[0] in "ub":
            table.update(_UNSIGNED_COMPARE)
        if type[0] == "b":
            table = {name: table[name] for name in ("eq", "ne")}
    _expect(operator in table, f"a comparison of {type} among {', '.join(table)}")
    return table[operator]


def _compare_operands(type: str, ftz: bool, compare: Callable) -> tuple[str, Callable]:
    """(operand type, function) of a comparison; f16 and bf16 are widened."""
    if type in ("f16", "bf16"):
        widen = small_format(type)[0]

        def small(a, b):
            a, b = widen(a), widen(b)
            return compare(flushed_half(a), flushed_half(b)) if ftz else compare(a, b)

        return "b16", small
    if ftz:
        return type, lambda a, b: compare(flushed(a), flushed(b))
    return type, compare


@define("setp")
def setp(modifiers: tuple[str, ...]) -> Semantics:
    """setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, c}: p = bool(cmp(a, b), c), q = bool(!cmp(a, b), c)."""
    _expect(len(modifiers) >= 2, "setp.cmp.type")
    operator, type = modifiers[0], modifiers[-1]
    combine = modifiers[1] if modifiers[1] in _BOOLEAN else ""
    _only(modifiers[1:], "ftz", type, *([combine] if combine else []))
    if type in ("f16x2", "bf16x2"):
        return _setp_pair(operator, combine, type, "ftz" in modifiers)
    _expect(type in _INTEGERS | _BITS | _FLOATS, "a type that setp compares")
    operand, compare = _compare_operands(type, "ftz" in modifiers, _comparison(operator, type))
    if not combine:
        single = Lanes("pred", f"{operand}, {operand}", compare, out=isinstance(compare, np.ufunc), scalars=True)

        def both(a, b):
            found = compare(a, b)
            return found, np.logical_not(found)

        semantics = Lanes("pred|pred?", f"{operand}, {operand}", both, scalars=True)
    else:
        boolean = _BOOLEAN[combine]
        single = Lanes("pred", f"{operand}, {operand}, pred", lambda a, b, c: boolean(compare(a, b), c), scalars=True)

        def both_combined(a, b, c):
            found = compare(a, b)
            return boolean(found, c), boolean(np.logical_not(found), c)

        semantics = Lanes("pred|pred?", f"{operand}, {operand}, pred", both_combined, scalars=True)
    semantics.options["single"] = single
    return semantics


def _setp_pair(operator: str, combine: str, type: str, ftz: bool) -> Semantics:
    """setp on f16x2 and bf16x2: p for the low halves, q for the high halves."""
    _, compare = _compare_operands(type[:-2], ftz, _comparison(operator, type[:-2]))

    def run(a, b, c=None):
        a, b = np.broadcast_arrays(a, b)
        found = [
            compare((a >> np.uint32(shift)).astype(np.uint16), (b >> np.uint32(shift)).astype(np.uint16))
            for shift in (0, 16)
        ]
        return tuple(found if c is None else [_BOOLEAN[combine](part, c) for part in found])

    return Lanes("pred|pred", "b32, b32" + (", pred" if combine else ""), run, scalars=True)


@define("set")
def set_(modifiers: tuple[str, ...]) -> Semantics:
    """set.cmp{.bool}{.ftz}.dtype.type d, a, b{, c}: all ones (integers) or 1.0 (floats) where the comparison holds,
    else 0."""
    _expect(len(modifiers) >= 3, "set.cmp.dtype.type")
    operator, result, type = modifiers[0], modifiers[-2], modifiers[-1]
    combine = modifiers[1] if modifiers[1] in _BOOLEAN else ""
    _only(modifiers[1:], "ftz", result, type, *([combine] if combine else []))
    truth = {
        "u32": 0xFFFFFFFF,
        "s32": 0xFFFFFFFF,
        "f32": 0x3F800000,
        "u16": 0xFFFF,
        "s16": 0xFFFF,
        "f16": 0x3C00,
        "bf16": 0x3F80,
    }
    pair = type in ("f16x2", "bf16x2")
    if pair:
        truth = {"u32": 0xFFFF, "s32": 0xFFFF, "f16x2": 0x3C00, "bf16x2": 0x3F80}
    _expect(result in truth, f"a result type among {', '.join(truth)}")
    base = type[:-2] if pair else type
    _expect(base in _INTEGERS | _BITS | _FLOATS, "a type that set compares")
    operand, compare = _compare_operands(base, "ftz" in modifiers, _comparison(operator, base))
    width = "b16" if result in ("u16", "s16", "f16", "bf16") else "b32"
    yes = DTYPES[width].type(truth[result]) if not pair else np.uint16(truth[result])

    def run(a, b, c=None):
        found = compare(a, b)
        if c is not None:
            found = _BOOLEAN[combine](found, c)
        return np.where(found, yes, yes.dtype.type(0))

    if pair:
        _expect(not combine, "no predicate with packed types")
        return Lanes("b32", "b32, b32", on_elements(type, run), scalars=True)
    return Lanes(width, f"{operand}, {operand}" + (", pred" if combine else ""), run, scalars=True)


@define("mov")
def mov(modifiers: tuple[str, ...]) -> Semantics:
    """mov.type d, a: a copy, or a pack or unpack of {a, b}; codegen.py translates it by its operands."""
    type = _type(modifiers, _INTEGERS | _BITS | {"f32", "f64", "pred"})
    _only(modifiers, type)
    return Lanes(type, type, np.positive, copies=True)


@define("selp")
def selp(modifiers: tuple[str, ...]) -> Semantics:
    """selp.type d, a, b, c: a where the predicate c holds, else b."""
    type = _type(modifiers, _INTEGERS | _BITS | {"f32", "f64", "f16", "bf16"})
    _only(modifiers, type)
    bits = f"b{8 * DTYPES[type].itemsize}"
    return Lanes(bits, f"{bits}, {bits}, pred", lambda a, b, c: np.where(c, a, b), scalars=True, copies=True)


@define("slct")
def slct(modifiers: tuple[str, ...]) -> Semantics:
    """slct{.ftz}.type.s32|f32 d, a, b, c: a where c >= 0, else b."""
    _expect(len(modifiers) >= 2 and modifiers[-1] in ("s32", "f32"), "slct.type.s32 or slct.type.f32")
    type = _type(modifiers[:-1], _INTEGERS | _BITS | {"f32", "f64"})
    _only(modifiers[:-1], "ftz", type)
    bits = f"b{8 * DTYPES[type].itemsize}"
    ftz = "ftz" in modifiers

    def run(a, b, c):
        return np.where((flushed(c) if ftz else c) >= 0, a, b)

    return Lanes(bits, f"{bits}, {bits}, {modifiers[-1]}", run, scalars=True, copies=True)


# ---------------------------------------------------------------------------------------------------------------
# Logic and shifts


def _logic(name: str, integer: np.ufunc, boolean: np.ufunc) -> None:
    @define(name)
    def resolver(modifiers: tuple[str, ...]) -> Semantics:
        type = _type(modifiers, _BITS | {"pred"})
        _only(modifiers, type)
        count = integer.nin
        return Lanes(type, ", ".join([type] * count), boolean if type == "pred" else integer, out=True)


_logic("and", np.bitwise_and, np.logical_and)
_logic("or", np.bitwise_or, np.logical_or)
_logic("xor", np.bitwise_xor, np.logical_xor)
_logic("not", np.invert, np.logical_not)


@define("cnot")
def cnot(modifiers: tuple[str, ...]) -> Semantics:
    """cnot.type d, a: 1 where a is 0, else 0."""
    type = _type(modifiers, _BITS)
    return Lanes(type, type, lambda a: (a == 0).astype(DTYPES[type]), scalars=True)


@cache
def _truth_table(table: int) -> Callable:
    """A bitwise function of three words from an 8-bit truth table; its index is bit of a, bit of b, bit of c."""

    def run(a, b, c):
        total = None
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                total = term if total is None else total | term
        return total if total is not None else (a & b & c) & np.uint32(0)

    return run


@define("lop3")
def lop3(modifiers: tuple[str, ...]) -> Semantics:
    """lop3.b32 d, a, b, c, table: the bitwise function of a, b, c with this truth table.

    lop3.{or|and}.b32 d|p, a, b, c, table, q: p is whether d is not 0, combined with q.
    """
    if modifiers == ("b32",):
        function = lambda a, b, c, table: _truth_table(table & 0xFF)(a, b, c)
        return Lanes("b32", "b32, b32, b32, imm", function, scalars=True)
    _expect(modifiers in (("or", "b32"), ("and", "b32")), "lop3{.or|.and}.b32")
    combine = np.logical_or if modifiers[0] == "or" else np.logical_and

    def run(a, b, c, table, q):
        result = _truth_table(table & 0xFF)(a, b, c)
        return result, combine(result != 0, q)

    return Lanes("b32|pred", "b32, b32, b32, imm, pred", run, scalars=True)


def _left(a, amount, out=None):
    """Shift left; amounts from the width on give 0."""
    bits = 8 * a.dtype.itemsize
    if amount.ndim == 0:
        count = int(amount)
        if count >= bits:
            return deliver(np.zeros_like(a), out)
        return np.left_shift(a, a.dtype.type(count), out=out)
    inside = amount < bits
    shifted = np.left_shift(a, np.minimum(amount, bits - 1).astype(a.dtype))
    return deliver(np.where(inside, shifted, a.dtype.type(0)), out)


def _right(a, amount, out=None):
    """Shift right; amounts from the width on give 0, or copies of the sign bit in signed types."""
    bits = 8 * a.dtype.itemsize
    if amount.ndim == 0:
        count = int(amount)
        if count >= bits:
            if a.dtype.kind == "u":
                return deliver(np.zeros_like(a), out)
            count = bits - 1
        return np.right_shift(a, a.dtype.type(count), out=out)
    clamped = np.minimum(amount, bits - 1).astype(a.dtype)
    shifted = np.right_shift(a, clamped)
    if a.dtype.kind == "u":
        shifted = np.where(amount < bits, shifted, a.dtype.type(0))
    return deliver(shifted, out)


@define("shl")
def shl(modifiers: tuple[str, ...]) -> Semantics:
    """shl.type d, a, b."""
    type = _type(modifiers, _BITS)
    _only(modifiers, type)
    return Lanes(type, f"{type}, u32", _left, out=True)


@define("shr")
def shr(modifiers: tuple[str, ...]) -> Semantics:
    """shr.type d, a, b: an arithmetic shift for signed types."""
    type = _type(modifiers, _BITS | _INTEGERS)
    _only(modifiers, type)
    return Lanes(type, f"{type}, u32", _right, out=True)


@define("shf")
def shf(modifiers: tuple[str, ...]) -> Semantics:
    """shf.direction.mode.b32 d, a, b, c: a funnel shift of the 64 bits b:a (b is the upper word)."""
    _expect(
        len(modifiers) == 3 and modifiers[0] in "lr" and modifiers[1] in ("clamp", "wrap") and modifiers[2] == "b32",
        "shf.l|r.clamp|wrap.b32",
    )
    left, clamp = modifiers[0] == "l", modifiers[1] == "clamp"

    def run(a, b, amount):
        amount = (np.minimum(amount, 32) if clamp else amount & np.uint32(31)).astype(np.uint64)
        whole = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
        if left:
            return ((whole << amount) >> np.uint64(32)).astype(np.uint32)
        return (whole >> amount).astype(np.uint32)

    return Lanes("b32", "b32, b32, u32", run, scalars=True)


# ---------------------------------------------------------------------------------------------------------------
# prmt

_PRMT_MODES: dict[str, list[tuple[int, int, int, int]]] = {  # bytes of the result from the lowest
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


@cache
def _prmt_plan(selector: int) -> tuple[tuple[int, int, int], ...]:
    """A selector without sign replication as triples (source word, left shift in bits, mask of the result)."""
    groups: dict[tuple[int, int], int] = {}
    for byte in range(4):
        source = selector >> 4 * byte & 7
        key = (source // 4, 8 * (byte - source % 4))
        groups[key] = groups.get(key, 0) | 0xFF << 8 * byte
    return tuple((word, shift, mask) for (word, shift), mask in groups.items())


def _prmt_fixed(a, b, selector: int):
    """prmt with a constant selector: a few shifts and masks."""
    total = None
    for word, shift, mask in _prmt_plan(selector):
        part = (a, b)[word]
        if shift > 0:
            part = part << np.uint32(shift)
        elif shift < 0:
            part = part >> np.uint32(-shift)
        if mask != 0xFFFFFFFF:
            part = part & np.uint32(mask)
        total = part if total is None else total | part
    return total


def _prmt_general(a, b, selector):
    both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
    total = np.zeros(np.broadcast_shapes(np.shape(both), np.shape(selector)), np.uint32)
    for byte in range(4):
        control = (selector >> np.uint32(4 * byte)) & np.uint32(15)
        found = ((both >> (np.uint64(8) * (control & np.uint32(7)).astype(np.uint64))) & np.uint64(0xFF)).astype(
            np.uint32
        )
        sign = np.where(found & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        total = total | (np.where(control & np.uint32(8), sign, found) << np.uint32(8 * byte))
    return total


@define("prmt")
def prmt(modifiers: tuple[str, ...]) -> Semantics:
    """prmt.b32{.mode} d, a, b, c: four bytes of b:a, picked by the selector c."""
    _expect(
        modifiers == ("b32",) or (len(modifiers) == 2 and modifiers[0] == "b32" and modifiers[1] in _PRMT_MODES),
        "prmt.b32{.mode}",
    )
    if modifiers == ("b32",):

        def run(a, b, selector):
            if selector.ndim == 0 and not int(selector) & 0x8888:
                return _prmt_fixed(a, b, int(selector) & 0xFFFF)
            return _prmt_general(a, b, selector)

        return Lanes("b32", "b32, b32, b32", run, scalars=True)
    table = np.array(
        [sum(source << 4 * byte for byte, source in enumerate(row)) for row in _PRMT_MODES[modifiers[1]]], np.uint32
    )
    return Lanes(
        "b32", "b32, b32, b32", lambda a, b, control: _prmt_general(a, b, table[control & np.uint32(3)]), scalars=True
    )
