"""Number formats of the PTX ISA: decoding tables, rounding in every mode, flushing of subnormals, the canonical NaN.

Formats narrower than f32 are handled as raw unsigned codes. `Format.values` decodes them to float64, which holds every
value of every format exactly; `encode` rounds float64 to codes. cvt.py, math.py and mma.py use them.
Sources: PTX ISA 5.2.3 (alternate floating point formats), OCP 8-bit Floating Point v1.0, OCP Microscaling Formats (MX)
v1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

#: The one NaN that f32 arithmetic, conversions and MMA return (PTX ISA 9.7.3: NaN payloads are not preserved).
CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)
CANONICAL_NAN_F16 = np.uint16(0x7FFF)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: sign bit (except in ue8m0), exponent field, mantissa field.

    specials: the codes with the largest exponent are "ieee" infinities and NaN, "nan" numbers except that all ones is
    NaN, or "none" numbers only.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_exponent(self) -> int:
        """Exponent of subnormals and of the smallest normal value. ue8m0 has neither zero nor subnormals: -127."""
        return 1 - self.bias if self.signed else -self.bias

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every code, float64 of shape (2 ** bits,)."""
        code = np.arange(1 << self.bits)
        if not self.signed:
            return np.where(code == 0xFF, np.nan, np.ldexp(1.0, code - self.bias))
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        field = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        sign = np.where(code >> (self.bits - 1), -1.0, 1.0)
        significand = mantissa + np.where(field > 0, 1 << self.mantissa_bits, 0)
        value = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - self.bias - self.mantissa_bits)
        top = field == (1 << self.exponent_bits) - 1
        if self.specials == "ieee":
            value = np.where(top, np.where(mantissa, np.nan, np.inf), value)
        elif self.specials == "nan":
            value = np.where(top & (mantissa == (1 << self.mantissa_bits) - 1), np.nan, value)
        return sign * value

    @property
    def largest(self) -> float:
        """The largest finite value (MAX_NORM)."""
        field = (1 << self.exponent_bits) - 1 - (self.specials == "ieee" or not self.signed)
        mantissa = (1 << self.mantissa_bits) - 1 - (self.specials == "nan" and self.signed)
        return float(np.ldexp((1 << self.mantissa_bits) + mantissa, field - self.bias - self.mantissa_bits))

    @property
    def nan(self) -> int:
        """The code that a NaN converts to: all ones without the sign. In a format without NaN it is the largest
        value."""
        return (1 << (self.bits - self.signed)) - 1


FORMATS = {
    format.name: format
    for format in (
        Format("f32", 8, 23, 127, "ieee"),
        Format("f16", 5, 10, 15, "ieee"),
        Format("bf16", 8, 7, 127, "ieee"),
        Format("tf32", 8, 10, 127, "ieee"),
        Format("e5m2", 5, 2, 15, "ieee"),
        Format("e4m3", 4, 3, 7, "nan"),
        Format("e3m2", 3, 2, 3, "none"),
        Format("e2m3", 2, 3, 1, "none"),
        Format("e2m1", 2, 1, 1, "none"),
        Format("ue8m0", 8, 0, 127, "nan", signed=False),
    )
}

_ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


def rounded(values: np.ndarray, precision: int, smallest_exponent: int, largest: float, mode: str) -> np.ndarray:
    """Round float64 `values` to `precision` significant bits, subnormals included; float64 out, exact.

    `mode` is rn (ties to even), rz, rm or rp. A magnitude above `largest` becomes infinity, or `largest` where the mode
    rounds towards zero, as in IEEE 754. Infinities and NaN are unchanged.
    """
    values = np.asarray(values, np.float64)
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - 1, smallest_exponent) - (precision - 1)
    result = np.ldexp(_ROUND[mode](np.ldexp(values, -quantum)), quantum)
    result = np.where(np.isfinite(values), result, values)
    above = np.isfinite(values) & (np.abs(result) > largest)
    if above.any():
        bound = np.where(np.signbit(values), -np.inf, np.inf)
        if mode == "rz":
            bound = np.copysign(largest, values)
        elif mode in ("rm", "rp"):
            inward = np.signbit(values) == (mode == "rp")
            bound = np.where(inward, np.copysign(largest, values), bound)
        result = np.where(above, bound, result)
    return result


def encode(values: np.ndarray, format: Format, mode: str = "rn", saturate: bool = False) -> np.ndarray:
    """Codes of float64 `values` in a signed `format` of at most 16 bits, as uint16.

    `saturate`: magnitudes above the largest value, infinities included, become the largest value with their sign. NaN
    becomes `format.nan`; the sign of zero is kept.
    """
    values = np.asarray(values, np.float64)
    result = rounded(values, format.mantissa_bits + 1, format.smallest_exponent, format.largest, mode)
    if saturate or format.specials != "ieee":
        result = np.clip(result, -format.largest, format.largest)
    nan = np.isnan(result)
    magnitude = np.where(nan, 0.0, np.abs(result))
    infinite = np.isinf(magnitude)
    magnitude = np.where(infinite, 0.0, magnitude)
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude == 0, format.smallest_exponent, np.maximum(exponent - 1, format.smallest_exponent))
    scaled = np.ldexp(magnitude, format.mantissa_bits - exponent).astype(np.int64)
    # The hidden bit of a normal significand adds 1 to the exponent field, which is counted from zero.
    code = scaled + ((exponent - format.smallest_exponent) << format.mantissa_bits)
    code = np.where(infinite, ((1 << format.exponent_bits) - 1) << format.mantissa_bits, code)
    code = code | (np.signbit(result).astype(np.int64) << (format.bits - 1))
    return np.where(nan, format.nan, code).astype(np.uint16)


def flushed(values: np.ndarray) -> np.ndarray:
    """f32 `values` with subnormals replaced by zeros of their sign (.ftz)."""
    values = np.asarray(values)
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values) if tiny.any() else values


def canonical(values: np.ndarray) -> np.ndarray:
    """f32 `values` with every NaN made 0x7fffffff."""
    nan = np.isnan(values)
    return np.where(nan, CANONICAL_NAN_F32, values) if nan.any() else values
