"""Number formats: what an item of memory holds, and the encoders and decoders that references use.

Element formats carry their PTX names (`e2m1x2`, `ue8m0`, `bf16`); block formats their usual ones
(`mxfp4`). All encoders are exact: they compare with rounding boundaries and never divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np


@dataclass(frozen=True, eq=False)
class Format:
    """What one item of memory holds: a PTX name and the NumPy dtype that stores it.

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
e2m1x2 = Format("e2m1x2", np.dtype(np.uint8), "code")
ue8m0 = Format("ue8m0", np.dtype(np.uint8), "code", accepts=(np.dtype(ml_dtypes.float8_e8m0fnu),))

FORMATS = {f.name: f for f in (f32, f16, bf16, i32, u32, i64, u64, u8, e2m1x2, ue8m0)}


def format_of(dtype, members=(f32, f16, bf16)) -> Format | None:
    """The first of `members` that stores `dtype` (anything np.dtype takes), or None."""
    dtype = np.dtype(dtype)
    return next((member for member in members if member.holds(dtype)), None)


@dataclass(frozen=True)
class Minifloat:
    """A sign, `exponent_bits` and `mantissa_bits`, without infinities or NaN (OCP MX v1.0, 5.3.3)."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every code, as float32."""
        code = np.arange(1 << self.bits)
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        significand = mantissa + np.where(exponent > 0, 1 << self.mantissa_bits, 0)
        value = np.ldexp(significand, np.maximum(exponent, 1) - bias - self.mantissa_bits)
        return np.where(code >> (self.bits - 1), -value, value).astype(np.float32)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.values[: 1 << (self.bits - 1)].max())

    @cached_property
    def _boundaries(self) -> np.ndarray:
        """For each magnitude code above 0 the smallest float32 that rounds to it: ties go to even codes."""
        magnitudes = self.values[: 1 << (self.bits - 1)]
        middle = (magnitudes[:-1] + magnitudes[1:]) / np.float32(2)
        upper_is_odd = np.arange(1, magnitudes.size) % 2 == 1
        return np.where(upper_is_odd, np.nextafter(middle, np.float32(np.inf)), middle)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes (uint8) of float32 `x`, any shape: to nearest, ties to even, saturating, sign of zero kept."""
        magnitude = np.searchsorted(self._boundaries, np.abs(x), side="right")
        return (magnitude | (np.signbit(x).astype(np.int64) << (self.bits - 1))).astype(np.uint8)


e2m1 = Minifloat("e2m1", 2, 1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes per byte along the last axis, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_nibbles`: the last axis doubles."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@dataclass(frozen=True)
class BlockFormat:
    """Codes of `element` with one ue8m0 scale (2**(byte - 127)) per `block` values of the last axis."""

    name: str
    element: Minifloat
    block: int

    @property
    def _largest_exponent(self) -> int:
        """floor(log2(largest value of an element))."""
        return int(np.floor(np.log2(self.element.largest)))

    def encode(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes [..., K / 2] and scales [..., K / block] of `x` [..., K], computed in float32.

        The scale is 2**(floor(log2(largest magnitude)) - exponent of the largest element value), no
        less than 2**-127; a value that then lies above the largest element value saturates. A block
        of zeros has scale byte 0; a block with a NaN or an infinity has scale byte 0xff and codes 0.

        Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
        """
        blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)
        # abs keeps NaN bits above those of infinity, so the largest bit pattern finds either.
        exponent = (np.abs(blocks).view(np.uint32).max(axis=-1) >> 23).astype(np.int64)
        special = exponent == 255
        scales = np.where(special, 255, np.maximum(exponent - self._largest_exponent, 0)).astype(np.uint8)
        # 2**(127 - scale) as float32 bits: exact, since a scale byte never exceeds 252 here.
        inverse = ((254 - np.where(special, 127, scales).astype(np.uint32)) << 23).view(np.float32)
        finite = np.where(special[..., None], np.float32(0), blocks)
        codes = self.element.encode(finite * inverse[..., None]).reshape(x.shape)
        return pack_nibbles(codes), scales

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Values [..., K] as float32: exact, infinite beyond its range, NaN in the blocks whose scale byte is 0xff."""
        values = self.element.values[unpack_nibbles(codes)].reshape(*scales.shape, self.block)
        exponent = scales.astype(np.int32)[..., None] - 127
        with np.errstate(over="ignore"):
            scaled = np.ldexp(values, exponent)
        return np.where(exponent == 128, np.float32(np.nan), scaled).reshape(*scales.shape[:-1], scales.shape[-1] * self.block)


mxfp4 = BlockFormat("mxfp4", e2m1, 32)

BLOCK_FORMATS = {f.name: f for f in (mxfp4,)}
