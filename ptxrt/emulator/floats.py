"""Float arithmetic on arrays with the rounding of the PTX ISA: single roundings, directed modes, signed zeros, small
formats.

The functions are pure, take NumPy arrays and do not depend on instructions; alu.py and mma.py use them. Operations that
NumPy rounds correctly itself (IEEE sums, products, quotients and roots of f32 and f64, to nearest) are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np


def deliver(result, out):
    """Return a result, copied into `out` if that is an array."""
    if out is None:
        return result
    out[...] = result
    return out


def flushed(a):
    """Replace subnormal f32 by zeros of their sign; f64 is unchanged (PTX has no .ftz for it)."""
    small = np.abs(a) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(a.dtype.type(0), a), a) if a.dtype == np.float32 else a


def clamped(a):
    """.sat: clamp to [0, 1]; NaN becomes +0."""
    return np.where(a > 0, np.minimum(a, a.dtype.type(1)), a.dtype.type(0))


def flushed_half(a):
    """Replace magnitudes below the smallest normal f16 by zeros of their sign."""
    return np.where(np.abs(a) < np.float32(2.0**-14), np.copysign(a.dtype.type(0), a), a)


def with_relu(function: Callable) -> Callable:
    """.relu: negative results become +0."""

    def run(*operands):
        result = function(*operands)
        return np.where(result < 0, result.dtype.type(0), result)

    return run


# ---------------------------------------------------------------------------------------------------------------
# Exact sums and products, and roundings built from them


def two_sum(a, b):
    """(sum, error): sum is a + b rounded, and sum + error = a + b exactly (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a, b):
    """(product, error) in float64: product + error = a * b exactly, unless something over- or underflows (Dekker)."""
    product = a * b
    factor = 134217729.0

    def split(x):
        big = factor * x
        high = big - (big - x)
        return high, x - high

    (ah, al), (bh, bl) = split(a), split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def odd(total, rest):
    """`total + rest` rounded to odd in the format of `total` (|rest| at most half an ulp)."""
    integer = f"i{total.dtype.itemsize}"
    bits = np.asarray(total).view(integer)
    inexact = (rest != 0) & ((bits & 1) == 0) & np.isfinite(total)
    odd = bits + np.where((rest > 0) == (total > 0), 1, -1).astype(integer)
    if (total == 0).any():  # zero plus a rest becomes the smallest subnormal with the sign of the rest
        odd = np.where(total == 0, np.where(rest > 0, 1, np.iinfo(integer).min + 1).astype(integer), odd)
    return np.where(inexact, odd, bits).view(total.dtype)


def round_directed(total, rest, mode: str, dtype):
    """The exact value `total + rest` (both float64) rounded to `dtype` in mode rz, rm or rp."""
    near = total.astype(dtype)
    gap = total - near.astype(np.float64)
    gap = np.where(gap == 0, rest, gap)
    gap = np.where(np.isnan(gap), 0.0, gap)
    infinite = np.isinf(total)
    up, down = near.dtype.type(np.inf), near.dtype.type(-np.inf)
    if mode == "rp":
        moved = np.where((gap > 0) & ~infinite, np.nextafter(near, up), near)
    elif mode == "rm":
        moved = np.where((gap < 0) & ~infinite, np.nextafter(near, down), near)
    else:
        outside = np.where(near > 0, gap < 0, gap > 0) & (near != 0) & ~infinite
        moved = np.where(outside, np.nextafter(near, near.dtype.type(0)), near)
    # An exact zero keeps its sign; `exact_zero` sets the sign of sums that cancel.
    return moved


def moved_by(near, gap, mode: str):
    """The exact value `near + gap` rounded in a directed mode: `near` is its nearest value and moves by at most one
    ulp. Only the sign of `gap` counts."""
    infinity = near.dtype.type(np.inf)
    if mode == "rp":
        return np.where(gap > 0, np.nextafter(near, infinity), near)
    if mode == "rm":
        return np.where(gap < 0, np.nextafter(near, -infinity), near)
    outside = np.where(near > 0, gap < 0, gap > 0) & (near != 0)
    return np.where(outside, np.nextafter(near, near.dtype.type(0)), near)


def exact_zero(result, exact, rest, a, b, mode: str):
    """Set the sign of x + (-x): -0 when rounding down; +0 otherwise."""
    if mode != "rm":
        return result
    cancelled = (exact == 0) & (rest == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(cancelled, result.dtype.type(-0.0), result)


def rounded_binary(name: str, a, b, mode: str):
    """add, sub, mul or div in a directed rounding mode."""
    dtype = a.dtype
    if dtype == np.float32:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if name == "mul":
            total = x * y
            return round_directed(total, np.zeros_like(total), mode, dtype)
        if name == "div":
            return adjusted_quotient(a, b, mode)
        y = -y if name == "sub" else y
        total, rest = two_sum(x, y)
        return exact_zero(round_directed(total, rest, mode, dtype), total, rest, x, y, mode)
    if name == "div":
        return adjusted_quotient(a, b, mode)
    b = -b if name == "sub" else b
    total, rest = two_product(a, b) if name == "mul" else two_sum(a, b)
    rest = np.where(np.isfinite(total) & np.isfinite(rest), rest, 0.0)
    moved = moved_by(total, rest, mode)
    overflow = np.isinf(total) & np.isfinite(a) & np.isfinite(b)
    moved = np.where(overflow, moved_by(total, -total, mode), moved)
    return moved if name == "mul" else exact_zero(moved, total, rest, a, b, mode)


def adjusted_quotient(a, b, mode: str):
    """a / b in a directed mode: the nearest quotient, moved by one ulp depending on the sign of the exact remainder."""
    near = np.divide(a, b)
    if a.dtype == np.float32:
        rest = np.asarray(a, np.float64) - near.astype(np.float64) * np.asarray(b, np.float64)
    else:
        high, low = two_product(near, b)
        rest = (a - high) - low
    gap = np.where(np.isfinite(near) & np.isfinite(rest), rest * np.sign(b), 0.0)
    overflow = np.isinf(near) & np.isfinite(a) & np.isfinite(b) & (b != 0)
    return moved_by(near, np.where(overflow, -near, gap), mode)


def directed_root(a, mode: str):
    """The square root in a directed mode: the nearest root, moved by one ulp depending on the sign of the exact
    remainder."""
    root = np.sqrt(a)
    if a.dtype == np.float32:
        rest = a.astype(np.float64) - root.astype(np.float64) ** 2
    else:
        high, low = two_product(root, root)
        rest = (a - high) - low
    return moved_by(root, np.where(np.isfinite(root) & np.isfinite(rest), rest, 0.0), mode)


# ---------------------------------------------------------------------------------------------------------------
# Fused multiply-add with a single rounding

_TIE = np.uint64(0x10000000)  # half an ulp of f32, in the bits of a float64

_BELOW = np.uint64(0x1FFFFFFF)


def fma_f32(a, b, c, out=None):
    """fma.rn.f32. The product is exact in float64, so only the sum is rounded twice. That matters only if the float64
    sum is a tie of f32 or the result is subnormal; those sums are rounded to odd first."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    result = total.astype(np.float32)
    with_tie = (total.view(np.uint64) & _BELOW) == _TIE
    # Ties of subnormal results have other bit patterns: treat every result below the smallest normal number as a tie.
    if with_tie.any() or (np.abs(result) < 1.2e-38).any():
        exact, rest = two_sum(product, np.asarray(c, np.float64))
        result = odd(exact, np.where(np.isfinite(exact), rest, 0.0)).astype(np.float32)
    return deliver(result, out)


def fma_f64(a, b, c):
    """fma.rn.f64 (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""
    a, b, c = np.broadcast_arrays(np.float64(a), np.float64(b), np.float64(c))
    high, low = two_product(a, b)
    top, top_low = two_sum(c, low)
    total, total_low = two_sum(high, top)
    middle, middle_rest = two_sum(top_low, total_low)
    result = total + odd(middle, middle_rest)
    magnitude = np.abs(high)
    risky = ~((magnitude < 1e300) & ((magnitude > 1e-280) | (a == 0) | (b == 0)))
    risky |= (np.abs(a) > 1e290) | (np.abs(b) > 1e290) | (np.abs(c) > 1e300)
    exactly_zero = (high + c == 0) & (low == 0)
    result = np.where(exactly_zero, high + c, result)
    if risky.any():
        result = np.array(result)
        for position in np.argwhere(risky):
            at = tuple(position)
            result[at] = _fma_f64_exact(a[at], b[at], c[at])
    return result


def _fma_f64_exact(a, b, c):
    """One float64 fma with a single rounding, in rational numbers; for exponents where `two_product` over- or
    underflows."""
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return a * b + c
    value = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if value == 0:
        return a * b + c
    try:
        return np.float64(value.numerator / value.denominator)
    except OverflowError:
        return np.float64(np.inf if value > 0 else -np.inf)


_LARGEST = 0xFFFFFFFF

_SUBNORMAL_END = 0x00FFFFFF  # 2 * (bits of the smallest normal float32) - 1


def fma_bf16(x, y, z):
    """bf16 fma as float32: exact, or rounded to odd, so that a later rounding to bf16 equals a single rounding."""
    product = x * y
    # A product of two bf16 has 16 bits, so it is exact unless it is subnormal. (A product that underflows to zero is
    # too small to change the rounding.) Zero minus one wraps around to the largest number.
    magnitude = product.view(np.uint32) << np.uint32(1)
    exact = int(np.subtract(magnitude, np.uint32(1), out=magnitude).min(initial=_LARGEST)) >= _SUBNORMAL_END
    if exact and not z.any():
        return product + z
    if exact:
        total, rest = two_sum(product, z)
        if not rest.any():
            return total
    wide, rest = two_sum(np.multiply(x, y, dtype=np.float64), z.astype(np.float64))
    wide = odd(wide, np.where(np.isfinite(wide), rest, 0.0))
    near = wide.astype(np.float32)
    return odd(near, np.where(np.isfinite(near), wide - near.astype(np.float64), 0.0))


# ---------------------------------------------------------------------------------------------------------------
# Minimum and maximum


def float_extreme(name: str) -> Callable:
    """min or max of floats: the number if one operand is NaN, quiet or signaling; -0 is less than +0."""
    ufunc, bits = (np.fmin, np.bitwise_or) if name == "min" else (np.fmax, np.bitwise_and)

    def run(a, b, out=None):
        result = ufunc(a, b, out=out)
        if (np.abs(result) > 0).all():  # no zero and no NaN
            return result
        lost = np.isnan(result)
        if lost.any():  # NumPy returns NaN for a signaling NaN and a number, but not in every position
            result = deliver(np.where(lost, np.where(np.isnan(a), b, a), result), out)
        return _zeros_in_order(result, a, b, bits)

    return run


def nan_extreme(name: str) -> Callable:
    """min.NaN or max.NaN: NaN if one operand is NaN."""
    ufunc, bits = (np.minimum, np.bitwise_or) if name == "min" else (np.maximum, np.bitwise_and)

    def run(a, b, out=None):
        result = ufunc(a, b, out=out)
        return _zeros_in_order(result, a, b, bits)

    return run


def _zeros_in_order(result, a, b, bits: np.ufunc):
    """Set the sign of the minimum or maximum of two zeros, which NumPy does not define; `bits` combines the signs of
    the operands.

    Writes into `result`, which must not be one of the operands.
    """
    both = result == 0
    if not both.any():
        return result
    both = both & (a == 0) & (b == 0)
    if not both.any():
        return result
    unsigned = f"u{result.dtype.itemsize}"
    sign = bits(np.asarray(a).view(unsigned), np.asarray(b).view(unsigned))
    fixed = np.where(both, sign, np.asarray(result).view(unsigned)).view(result.dtype)
    if isinstance(result, np.ndarray) and result.ndim and result.flags.writeable:
        result[...] = fixed
        return result
    return fixed


def xorsign(function: Callable) -> Callable:
    def run(a, b):
        unsigned = f"u{a.dtype.itemsize}"
        sign = np.array(1 << (8 * a.dtype.itemsize - 1), unsigned)
        xor = (np.asarray(a).view(unsigned) ^ np.asarray(b).view(unsigned)) & sign
        magnitude = np.asarray(function(np.abs(a), np.abs(b))).view(unsigned) & ~sign
        return (magnitude | xor).view(a.dtype)

    return run


# ---------------------------------------------------------------------------------------------------------------
# Registers of several values, and of f16 and bf16


def pair_of_floats(function: Callable) -> Callable:
    """An f32 operation on both halves of 64-bit registers, NaN canonical."""

    def run(*operands):
        shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
        parts = [
            np.ascontiguousarray(np.broadcast_to(operand, shape)).reshape(-1).view(np.float32) for operand in operands
        ]
        result = np.asarray(function(*parts), np.float32)
        bits = np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))
        return bits.view(np.uint64).reshape(shape)

    return run


def widen_bf16(a):
    """bf16 bits (uint16) as float32."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bf16(value):
    """float32 to bf16 bits (uint16), to nearest even; NaN is 0x7fff."""
    bits = np.asarray(value).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    bad = np.isnan(value)
    return np.where(bad, np.uint16(0x7FFF), rounded) if np.any(bad) else rounded


def widen_f16(a):
    return a.view(np.float16).astype(np.float32)


def narrow_f16(value):
    """Any float to f16 bits (uint16), to nearest even; NaN is 0x7fff."""
    bits = np.asarray(np.asarray(value).astype(np.float16)).view(np.uint16)
    bad = np.isnan(value)
    return np.where(bad, np.uint16(0x7FFF), bits) if np.any(bad) else bits


def small_format(type: str) -> tuple[Callable, Callable]:
    return (widen_bf16, narrow_bf16) if type.startswith("bf16") else (widen_f16, narrow_f16)


def on_elements(type: str, function: Callable) -> Callable:
    """A function of uint16 arrays, applied to registers of a small float type (one element or a pair)."""
    packed = type.endswith("x2")

    def run(*operands):
        shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
        parts = [
            np.ascontiguousarray(np.broadcast_to(operand, shape)).reshape(-1).view(np.uint16) for operand in operands
        ]
        result = np.asarray(function(*parts))
        return result.view(np.uint32 if packed else np.uint16).reshape(shape)

    return run


_UPPER = np.uint32(0xFFFF0000)

_SIXTEEN = np.uint32(16)


def _widen_bf16x2(a):
    """(n,) words of two bf16 as float32 (2, n): low halves, then high halves; n is 1 for a 0-d operand."""
    a = np.asarray(a).reshape(-1)
    wide = np.empty((2, len(a)), np.uint32)
    np.left_shift(a, _SIXTEEN, out=wide[0])
    np.bitwise_and(a, _UPPER, out=wide[1])
    return wide.view(np.float32)


def _narrow_bf16x2(value):
    """float32 (2, n) to (n,) words of two bf16, to nearest even; NaN is 0x7fff."""
    bits = np.ascontiguousarray(value).view(np.uint32)
    rounded = bits >> _SIXTEEN
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    bad = np.isnan(value)
    if bad.any():
        rounded[bad] = 0x7FFF0000
    word = rounded[0] >> _SIXTEEN
    np.bitwise_or(word, rounded[1] & _UPPER, out=word)
    return word


def _on_bf16_pairs(function: Callable) -> Callable:
    """A function of float32 arrays (2, n), applied to words of two bf16."""

    def run(*operands):
        dense = any(np.ndim(operand) for operand in operands)
        result = _narrow_bf16x2(function(*[_widen_bf16x2(operand) for operand in operands]))
        return result if dense else result.reshape(())

    return run


def small_function(type: str, function: Callable) -> Callable:
    """A function of float32 arrays, applied to registers of a small float type; its results are rounded to that
    type."""
    if type == "bf16x2":
        return _on_bf16_pairs(function)
    widen, narrow = small_format(type)
    return on_elements(type, lambda *operands: narrow(function(*[widen(operand) for operand in operands])))
