"""Number formats: the contents of an item of memory, and the encoders and decoders that references use.

Formats have their PTX names (`e2m1x2`, `ue8m0`, `bf16`); blocks.py makes block formats of them. All
encoders are exact: they compare with rounding boundaries and never divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np


@dataclass(frozen=True, eq=False)
class Format:
    """The contents of one item of memory: a PTX name and the NumPy dtype that stores it.

    `accepts` are further dtypes of the same bytes, `kind` is "float", "int" or "code" (opaque bytes).
    """

    name: str
    dtype: np.dtype
    kind: str
    accepts: tuple[np.dtype, ...] = ()

    def __or__(self, other: "Format | Union") -> "Union":
        return Union((self,)) | other

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return self.dtype.itemsize

    def holds(self, dtype) -> bool:
        """Whether an array of `dtype` has this format's bytes."""
        return dtype == self.dtype or dtype in self.accepts


@dataclass(frozen=True, eq=False)
class Union:
    """A choice of formats; all unions of one declaration take the same member in one call."""

    members: tuple[Format, ...]

    def __or__(self, other: "Format | Union") -> "Union":
        return Union(self.members + (other.members if isinstance(other, Union) else (other,)))

    def __str__(self) -> str:
        return "|".join(member.name for member in self.members)

    __repr__ = __str__


f32 = Format("f32", np.dtype(np.float32), "float")
f16 = Format("f16", np.dtype(np.float16), "float")
bf16 = Format("bf16", np.dtype(ml_dtypes.bfloat16), "float")
i32 = Format("i32", np.dtype(np.int32), "int")
u32 = Format("u32", np.dtype(np.uint32), "int")
i64 = Format("i64", np.dtype(np.int64), "int")
u64 = Format("u64", np.dtype(np.uint64), "int")
u8 = Format("u8", np.dtype(np.uint8), "int")


@dataclass(frozen=True)
class Minifloat:
    """A float of a sign, `exponent_bits` and `mantissa_bits`, with its conversion from float32.

    special: which codes are no numbers: "" for none, "nan" if all ones are NaN, "ieee" if the
    largest exponent holds infinity and NaN. ml_dtype: the dtype of ml_dtypes with these bytes, if any.
    Source: OCP Microscaling Formats (MX) v1.0, section 5.3.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    special: str = ""
    ml_dtype: str = ""

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def storage(self) -> Format:
        """The format of packed codes in memory, by its PTX name: an item is a byte, of two e2m1x2 or 4/3 e3m2x4
        codes.
        """
        together = {4: "x2", 6: "x4", 8: ""}[self.bits]
        accepts = (np.dtype(getattr(ml_dtypes, self.ml_dtype)),) if self.ml_dtype else ()
        return Format(self.name + together, np.dtype(np.uint8), "code", accepts)

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every code, as float32."""
        code = np.arange(1 << self.bits)
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        significand = mantissa + np.where(exponent > 0, 1 << self.mantissa_bits, 0)
        value = np.ldexp(significand, np.maximum(exponent, 1) - bias - self.mantissa_bits)
        if self.special:
            value[magnitude > self.largest_code] = np.nan
        if self.special == "ieee":
            value[magnitude == self.largest_code + 1] = np.inf
        return np.where(code >> (self.bits - 1), -value, value).astype(np.float32)

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value."""
        last = (1 << (self.bits - 1)) - 1
        return last - {"": 0, "nan": 1, "ieee": 1 << self.mantissa_bits}[self.special]

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.values[self.largest_code])

    @property
    def largest_exponent(self) -> int:
        """floor(log2(largest finite value))."""
        return int(np.frexp(self.largest)[1]) - 1

    @cached_property
    def _boundaries(self) -> np.ndarray:
        """For each finite magnitude code above 0 the smallest float32 that rounds to it: ties go to even codes."""
        magnitudes = self.values[: self.largest_code + 1]
        middle = (magnitudes[:-1] + magnitudes[1:]) / np.float32(2)
        upper_is_odd = np.arange(1, magnitudes.size) % 2 == 1
        return np.where(upper_is_odd, np.nextafter(middle, np.float32(np.inf)), middle)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes (uint8) of float32 `x`, any shape: to nearest, ties to even, saturating, sign of zero kept.

        Infinities saturate as well. NaN gives the positive code of all ones: NaN where the format has
        one, else the largest value. Source: PTX ISA, cvt with .rn.satfinite.
        """
        x = np.asarray(x, np.float32)
        magnitude = np.searchsorted(self._boundaries, np.abs(x), side="right").astype(np.uint8)
        codes = magnitude | (np.signbit(x).astype(np.uint8) << np.uint8(self.bits - 1))
        return np.where(np.isnan(x), np.uint8((1 << (self.bits - 1)) - 1), codes)


e2m1 = Minifloat("e2m1", 2, 1)
e3m2 = Minifloat("e3m2", 3, 2)
e2m3 = Minifloat("e2m3", 2, 3)
e4m3 = Minifloat("e4m3", 4, 3, "nan", "float8_e4m3fn")
e5m2 = Minifloat("e5m2", 5, 2, "ieee", "float8_e5m2")

e2m1x2 = e2m1.storage

# Block scales: a power of two, 2**(byte - 127) with NaN at 255; and e4m3 whose bit 7, the sign, is ignored.
ue8m0 = Format("ue8m0", np.dtype(np.uint8), "code", accepts=(np.dtype(ml_dtypes.float8_e8m0fnu),))
ue4m3 = Format("ue4m3", np.dtype(np.uint8), "code", accepts=(np.dtype(ml_dtypes.float8_e4m3fn),))

FORMATS = {f.name: f for f in (f32, f16, bf16, i32, u32, i64, u64, u8, ue8m0, ue4m3)}
FORMATS |= {m.storage.name: m.storage for m in (e2m1, e3m2, e2m3, e4m3, e5m2)}


def dtype_of(value) -> np.dtype:
    """The dtype that a value names; TypeError for arrays and numbers of NumPy, whose own dtype np.dtype would take."""
    if not isinstance(value, (type, np.dtype)) and hasattr(value, "dtype"):
        raise TypeError(f"a {type(value).__name__} is no dtype")
    return np.dtype(value)


def format_of(dtype, members=(f32, f16, bf16)) -> Format | None:
    """The first of `members` that stores `dtype` (anything `dtype_of` takes), or None."""
    dtype = dtype_of(dtype)
    return next((member for member in members if member.holds(dtype)), None)


_UE8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def ue8m0_values(scales: np.ndarray) -> np.ndarray:
    """Float32 values of ue8m0 bytes, exact: 2**(byte - 127), NaN for 255."""
    return _UE8M0[scales]


def ue4m3_values(scales: np.ndarray) -> np.ndarray:
    """Float32 values of ue4m3 bytes, exact: bit 7 is ignored, 0x7f is NaN."""
    return e4m3.values[scales & 0x7F]


# Bits of a code -> how many codes fill how many whole bytes.
_GROUPS = {4: (2, 1), 6: (4, 3)}


def pack(codes: np.ndarray, bits: int, axis: int = -1) -> np.ndarray:
    """Bytes of codes (uint8) of 4, 6 or 8 bits, packed along `axis`, the first code in the lowest bits.

    4 bits: two to a byte. 6 bits: four to three bytes, code i in bits 6i to 6i + 5 of the
    little-endian word. 8 bits: the codes themselves.
    """
    if bits == 8:
        return codes
    group, size = _GROUPS[bits]
    runs = np.moveaxis(codes, axis, -1)
    word = np.zeros((*runs.shape[:-1], runs.shape[-1] // group), np.uint32)
    for i in range(group):
        word |= runs[..., i::group].astype(np.uint32) << np.uint32(bits * i)
    packed = np.stack([word >> np.uint32(8 * byte) for byte in range(size)], axis=-1).astype(np.uint8)
    return np.moveaxis(packed.reshape(*word.shape[:-1], word.shape[-1] * size), -1, axis)


def unpack(packed: np.ndarray, bits: int, axis: int = -1) -> np.ndarray:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    group, size = _GROUPS[bits]
    runs = np.moveaxis(packed, axis, -1)
    word = np.zeros((*runs.shape[:-1], runs.shape[-1] // size), np.uint32)
    for byte in range(size):
        word |= runs[..., byte::size].astype(np.uint32) << np.uint32(8 * byte)
    codes = np.stack(
        [(word >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1) for i in range(group)], axis=-1
    ).astype(np.uint8)
    return np.moveaxis(codes.reshape(*word.shape[:-1], word.shape[-1] * group), -1, axis)


_TWO_BYTES = np.dtype("V2")


def in_native_order(array: np.ndarray) -> np.ndarray:
    """The array with its bytes in the order of this machine: itself, or a copy.

    Items of two untyped bytes (V2) are taken for bfloat16, because NumPy saves bfloat16 so.
    """
    if array.dtype.type is np.void and array.dtype == _TWO_BYTES:
        return array.view(bf16.dtype)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def to_convert(name: str, has_command: bool = True) -> str:
    """The advice in messages about an array of a dtype that no kernel takes. has_command: whether `ptxrt run` has the
    function, too."""
    words = f"convert it to float32, float16 or bfloat16: {name}.astype(numpy.float32)"
    return f"{words}, or --dtype f32 on the command line" if has_command else words
