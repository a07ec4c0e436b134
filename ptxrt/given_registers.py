"""Registers of a matrix instruction from matrices of codes, and back, as `probe_mma_registers` takes and returns them.

A code is the content of an element's container, in uint32: a byte of an 8-bit container, padding included; a nibble; 16
bits; a float32 word for tf32. `ptxrt.atlas` gives its place.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from . import formats
from .atlas import LANES, Kind

_REGISTERS = {"a": 4, "b": 2, "c": 4, "scales_a": 1, "scales_b": 1}


def _bits(kind: Kind, operand: str) -> int:
    return 8 if operand.startswith("scales") else kind.bits(operand)


def put(kind: Kind, operand: str, codes: np.ndarray) -> np.ndarray:
    """Registers uint32 [trials, 32, registers] that hold the codes [trials, rows, columns] of an operand.

    operand: one of `atlas.OPERANDS`; scales lie where selectors 0, 0 find them, and have one register.
    """
    lane, register, position = np.moveaxis(kind.places(operand), -1, 0)
    bits = _bits(kind, operand)
    held = np.zeros((len(codes), LANES, _REGISTERS[operand]), np.uint32)
    for place in range(32 // bits):
        here = position == place
        held[:, lane[here], register[here]] |= codes[:, here].astype(np.uint32) << np.uint32(bits * place)
    return held


def take(kind: Kind, operand: str, registers: np.ndarray) -> np.ndarray:
    """The codes of an operand, uint32 [trials, rows, columns], that registers [trials, 32, registers] hold."""
    lane, register, position = np.moveaxis(kind.places(operand), -1, 0)
    bits = _bits(kind, operand)
    shift = (bits * position).astype(np.uint32)
    return registers[:, lane, register] >> shift & np.uint32((1 << bits) - 1)


@cache
def _table(type: str, bits: int) -> np.ndarray | None:
    """float64 value of each code in a container of some bits; None for types of 32 bits."""
    if type in ("ue8m0", "ue4m3"):
        values = formats.ue8m0_values if type == "ue8m0" else formats.ue4m3_values
        return values(np.arange(256, dtype=np.uint8)).astype(np.float64)
    if type in ("s8", "u8"):
        return np.arange(256, dtype=np.uint8).view(np.int8 if type == "s8" else np.uint8).astype(np.float64)
    if bits == 16:
        codes = np.arange(1 << 16, dtype=np.uint16)
        with np.errstate(invalid="ignore"):  # of NaN
            return codes.view(np.float16 if type == "f16" else ml_dtypes.bfloat16).astype(np.float64)
    if bits == 32:
        return None
    minifloat = getattr(formats, type)
    codes = np.arange(1 << bits) >> shift_of(type, bits) & (1 << minifloat.bits) - 1
    return minifloat.values[codes].astype(np.float64)


def shift_of(type: str, bits: int) -> int:
    """The bits below an element in its container: e2m1 lies in bits 5 to 2 of a byte."""
    return 2 if type == "e2m1" and bits == 8 else 0


def values(type: str, bits: int, codes: np.ndarray) -> np.ndarray:
    """float64 values of codes of a type in containers of `bits` bits. The low 13 bits of tf32 are ignored."""
    table = _table(type, bits)
    if table is not None:
        return table[codes]
    return (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def sums(kind: Kind, codes: np.ndarray) -> np.ndarray:
    """The float64 values of codes of C or D; integers keep their value."""
    types = {"f32": np.float32, "s32": np.int32}
    if kind.accumulator == "f16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    return np.ascontiguousarray(codes, np.uint32).view(types[kind.accumulator]).astype(np.float64)


def codes_of_sums(kind: Kind, numbers: np.ndarray) -> np.ndarray:
    """The codes of C or D for numbers, rounded to nearest even; integers wrap."""
    if kind.accumulator == "f16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    if kind.accumulator == "s32":
        return numbers.astype(np.int64).astype(np.uint32)
    return numbers.astype(np.float32).view(np.uint32)


def multiply(kind: Kind, type: str, a, b, c, scales) -> np.ndarray:
    """Registers of D = A B + C, rounded once to nearest even. Bits of C's registers that hold no element are kept."""
    left, right = (values(type, kind.bits(each), take(kind, each, x)) for each, x in (("a", a), ("b", b)))
    if kind.scales:
        for index, operand in enumerate(("scales_a", "scales_b")):
            factors = values(kind.scales.type, 8, take(kind, operand, scales[..., index, None]))
            axis = 2 if index == 0 else 1
            factors = np.repeat(factors, kind.depth // kind.scales.blocks, axis)
            left, right = (left * factors, right) if index == 0 else (left, right * factors)
    d = codes_of_sums(kind, sums(kind, take(kind, "c", c)) + left @ right)
    registers = put(kind, "c", d)
    held = put(kind, "c", np.full_like(d, (1 << kind.bits("c")) - 1))
    return registers | c & ~held
