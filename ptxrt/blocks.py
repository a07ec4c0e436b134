"""Block formats: runs of 16 or 32 codes that share a scale, and the rules that choose the scale.

`encode` and `decode` are the reference of every quantizer, to the byte, in NumPy and in float32.
Declarations, functions and documentation take the formats from the table BLOCK_FORMATS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .formats import (
    Format,
    Minifloat,
    e2m1,
    e2m3,
    e3m2,
    e4m3,
    e5m2,
    pack,
    ue4m3,
    ue4m3_values,
    ue8m0,
    ue8m0_values,
    unpack,
)

_F32 = np.float32
_INFINITY = 0x7F800000  # bits of the float32 infinity; those of NaN are larger, of numbers smaller
UE8M0_NAN = 0xFF
UE4M3_NAN = 0x7F


# The scale byte of a block from the float32 bits of its largest magnitude (finite, int64), before it is clamped at 0;
# UE8M0_NAN if no byte represents the scale. The rules are those of torchao's ScaleCalculationMode.


def _floor(bits: np.ndarray, element: Minifloat) -> np.ndarray:
    """The exponent of the largest magnitude, less that of the largest code."""
    return (bits >> 23) - element.largest_exponent


def _ceil(bits: np.ndarray, element: Minifloat) -> np.ndarray:
    """The exponent rounded up: one more than `floor` unless the largest magnitude is a power of two."""
    return _floor(bits, element) + ((bits & 0x7FFFFF) > 0)


def _rceil(bits: np.ndarray, element: Minifloat) -> np.ndarray:
    """The exponent of (largest magnitude * 1 / largest value), a float32 product, rounded up."""
    ratio = bits.astype(np.uint32).view(_F32) * (_F32(1) / _F32(element.largest))
    ratio_bits = ratio.view(np.uint32).astype(np.int64)
    exponent, mantissa = ratio_bits >> 23, ratio_bits & 0x7FFFFF
    # Byte 0 is 2**-127, which is a subnormal: half the mantissa's range lies above it.
    return exponent + np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)


def _even(bits: np.ndarray, element: Minifloat) -> np.ndarray:
    """`floor` after the largest magnitude is rounded to the mantissa bits of a code, halves up."""
    rounded = bits + (1 << (22 - element.mantissa_bits))
    return np.where(rounded >= _INFINITY, UE8M0_NAN, _floor(rounded, element))


_MX_RULES = {"floor": _floor, "ceil": _ceil, "rceil": _rceil, "even": _even}


@dataclass(frozen=True)
class BlockFormat:
    """Codes of `element` with one scale per `block` values of an axis.

    scale: the format of the scales. rules: how a scale may be chosen, the first one is the default; a
    kernel takes the number of a rule in this order. two_level: whether a float32 scale of the whole
    array multiplies the block scales.
    """

    name: str
    element: Minifloat
    block: int
    scale: Format
    rules: tuple[str, ...]
    two_level: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.element.bits

    def padded(self, length: int) -> int:
        """The next multiple of the block."""
        return -(-length // self.block) * self.block

    def _split(self, x: np.ndarray, axis: int) -> np.ndarray:
        """Float32 blocks [..., K / block, block] of x, whose `axis` has length K and becomes the last."""
        runs = np.moveaxis(np.asarray(x, _F32), axis, -1)
        return runs.reshape(*runs.shape[:-1], runs.shape[-1] // self.block, self.block)

    def _join(self, codes: np.ndarray, scales: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes and scales with their axes in the order of x again."""
        codes = codes.reshape(*scales.shape[:-1], scales.shape[-1] * self.block)
        return np.moveaxis(pack(codes, self.bits), -1, axis), np.moveaxis(scales, -1, axis)

    def _scaled(self, codes: np.ndarray, scales: np.ndarray, axis: int) -> np.ndarray:
        """Values of packed codes times float32 scales, one product each."""
        runs = unpack(np.moveaxis(codes, axis, -1), self.bits)
        scales = np.moveaxis(scales, axis, -1)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.element.values[runs].reshape(*scales.shape[:-1], self.block) * scales
        return np.moveaxis(values.reshape(runs.shape), -1, axis)


@dataclass(frozen=True)
class MXFormat(BlockFormat):
    """A format of OCP Microscaling v1.0: power-of-two scales, 2**(byte - 127), per 32 values."""

    block: int = 32
    scale: Format = ue8m0
    rules: tuple[str, ...] = tuple(_MX_RULES)

    def scale_bytes(self, bits: np.ndarray, rule: str = "floor") -> np.ndarray:
        """Scale bytes from the float32 bits of the largest magnitudes; UE8M0_NAN for infinity, NaN and magnitudes that
        no scale reaches.
        """
        bits = bits.astype(np.int64)
        special = bits >= _INFINITY
        byte = _MX_RULES[rule](np.where(special, 0, bits), self.element)
        return np.where(special, UE8M0_NAN, np.maximum(byte, 0)).astype(np.uint8)

    def encode(self, x: np.ndarray, rule: str = "floor", axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes and scales of `x`, whose `axis` has a length K that is a multiple of the block.

        The axis has K * bits / 8 bytes in the codes and K / block in the scales. Values are divided by
        their scale, exactly, and rounded to nearest, ties to even; what exceeds the largest code
        saturates. A block with a NaN, an infinity or no scale byte has scale 0xff and codes 0.
        Source: OCP Microscaling Formats (MX) v1.0, section 6.3; torchao, ScaleCalculationMode.
        """
        blocks = self._split(x, axis)
        # abs keeps the bits of NaN above those of infinity, so the largest bit pattern finds either.
        scales = self.scale_bytes(np.abs(blocks).view(np.uint32).max(axis=-1), rule)
        special = scales == UE8M0_NAN
        # 2**(127 - byte) as float32 bits: a normal number, since no finite block has a byte above 253.
        inverse = ((254 - np.where(special, 127, scales).astype(np.uint32)) << 23).view(_F32)
        finite = np.where(special[..., None], _F32(0), blocks)
        return self._join(self.element.encode(finite * inverse[..., None]), scales, axis)

    def decode(self, codes: np.ndarray, scales: np.ndarray, axis: int = -1) -> np.ndarray:
        """Float32 values: exact, infinite beyond float32's range, NaN in the blocks whose scale byte is 0xff."""
        return self._scaled(codes, ue8m0_values(scales), axis)


@dataclass(frozen=True)
class NVFormat(BlockFormat):
    """NVFP4: e2m1 codes, ue4m3 scales per 16 values, and a float32 scale g of the whole array.

    Values are code * (g * scale), the inner product rounded to float32 first.
    """

    block: int = 16
    scale: Format = ue4m3
    rules: tuple[str, ...] = ("amax", "four_over_six")
    two_level: bool = True

    def global_scale(self, amax) -> np.float32:
        """g = amax / (448 * 6), or 1 for 0: the largest finite magnitude of an array then gets the largest scale and
        code.
        """
        return (_F32(amax) / _F32(e4m3.largest * self.element.largest)) or _F32(1)

    def encode(self, x: np.ndarray, global_scale, rule: str = "amax", axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes and scales of `x`, whose `axis` has a length that is a multiple of 16; all in float32.

        s = e4m3(clip(blockmax / 6 / g, 2**-9, 448)), code = e2m1(x / (g * s)), where every operation is
        rounded to nearest even and subnormals are kept. Where g * s is 0 all codes are 0. A block with a
        NaN or an infinity has scale 0x7f and codes 0. "four_over_six" scales a block to 4 instead of 6
        where that makes the sum of its squared errors smaller; see `_squared_error`.
        """
        blocks, g = self._split(x, axis), _F32(global_scale)
        largest = np.abs(blocks).max(axis=-1)
        special = ~np.isfinite(largest)
        blocks = np.where(special[..., None], _F32(0), blocks)
        largest = np.where(special, _F32(0), largest)
        with np.errstate(all="ignore"):
            scales, codes, error = self._scaled_to(6, blocks, largest, g)
            if rule == "four_over_six":
                to_4 = self._scaled_to(4, blocks, largest, g)
                # A scale of 6 that vanishes has no error to compare.
                better = (to_4[2] < error) & (g * ue4m3_values(scales) != 0)
                scales, codes = np.where(better, to_4[0], scales), np.where(better[..., None], to_4[1], codes)
        codes = np.where(special[..., None], 0, codes).astype(np.uint8)
        return self._join(codes, np.where(special, UE4M3_NAN, scales).astype(np.uint8), axis)

    def _scaled_to(self, top: int, blocks: np.ndarray, largest: np.ndarray, g: np.float32):
        """Scales, codes and squared error of blocks whose largest magnitude becomes `top`."""
        # fmax and fmin keep the bound where the quotient is NaN, as the hardware's max and min do.
        quotient = np.fmin(np.fmax(largest / _F32(top) / g, _F32(2**-9)), _F32(e4m3.largest))
        scales = e4m3.encode(quotient)
        step = (g * ue4m3_values(scales))[..., None]
        scaled = blocks / step
        codes = np.where(step == 0, 0, self.element.encode(scaled))
        return scales, codes, self._squared_error(scaled, codes, scales)

    def _squared_error(self, scaled: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The sum over a block of ((scaled - code) * s)**2, in units of g, so that no magnitude overflows.

        Every operation is rounded to float32; the sum is a balanced tree over neighbors.
        """
        error = (scaled - self.element.values[codes]) * ue4m3_values(scales)[..., None]
        total = error * error
        while total.shape[-1] > 1:
            total = total[..., 0::2] + total[..., 1::2]
        return total[..., 0]

    def decode(self, codes: np.ndarray, scales: np.ndarray, global_scale, axis: int = -1) -> np.ndarray:
        """Float32 values: code * (g * scale), two products; NaN where the scale is 0x7f (bit 7 is ignored)."""
        with np.errstate(over="ignore", under="ignore"):
            return self._scaled(codes, _F32(global_scale) * ue4m3_values(scales), axis)


mxfp4 = MXFormat("mxfp4", e2m1)
mxfp8 = MXFormat("mxfp8", e4m3)
mxfp8_e5m2 = MXFormat("mxfp8_e5m2", e5m2)
mxfp6_e3m2 = MXFormat("mxfp6_e3m2", e3m2)
mxfp6_e2m3 = MXFormat("mxfp6_e2m3", e2m3)
nvfp4 = NVFormat("nvfp4", e2m1)

BLOCK_FORMATS = {f.name: f for f in (mxfp4, mxfp8, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, nvfp4)}


# The 128x4 layout of scales, as cuBLAS and CUTLASS take them: tiles of 128 rows and 4 blocks, 512 bytes each.
TILE_ROWS, TILE_BLOCKS, TILE_BYTES = 128, 4, 512


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Bytes of rows x blocks scales in whole tiles."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_BYTES


def swizzled_offsets(rows: int, blocks: int) -> np.ndarray:
    """Where the scale of each row and block lies, [rows, blocks]: tiles are row-major, quarters of 32 rows interleave.

    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    row, block = np.ogrid[:rows, :blocks]
    tile = row // TILE_ROWS * -(-blocks // TILE_BLOCKS) + block // TILE_BLOCKS
    return tile * TILE_BYTES + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + block % TILE_BLOCKS
