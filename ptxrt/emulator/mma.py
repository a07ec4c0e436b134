"""mma.sync: D = A B + C on fragments distributed over the registers of a warp (PTX ISA 9.7.14.5).

Fragments. With lane = 4 g + t, w elements per 32-bit register (element 0 in the lowest bits) and depth K:

    A[r][e]: row g + 8 (r & 1)      k = w t + e + K/2 (r >> 1)    (m16n8k4 of tf32, m16n8k16 of bytes: r is 0 or 1)
    B[r][e]: column g               k = w t + e + K/2 r
    C, D[i]: row g + 8 (i >> 1)     column 2 t + (i & 1)         f16: register i >> 1, half i & 1

Any order of k is valid if A and B agree. The order here is (t, r, e), so that fragments of B need no reordering. C and
D are stored in *register order*: (4, warps, 32), element (i, warp, lane).

There are two arithmetics:

    float64    the exact value of C + A B, rounded to float64 and then to the type of D, both to nearest even. The
               result does not depend on the machine or the summation order of its BLAS. With f16, a sum that
               underflows is +0, as on an H200.
    hardware   the rule published for Hopper and Blackwell tensor cores (MMA-Sim, arXiv 2511.10909): the K exact
               products and C are aligned to the largest exponent among them and truncated toward zero to 25
               fractional bits. Their sum is exact; it is truncated to f32 (or rounded to f16).

Integers (s8, u8) are summed exactly; D wraps, or saturates to s32 with .satfinite. f64 (m8n8k4) is a chain of fused
multiply-adds in the order of k that starts with C (same source), in both arithmetics.

Packed e2m1 with one scale per block of 16 or 32 k (kind::mxf4, kind::mxf4nvf4): the products of a block are summed
exactly, and this sum times both scales is one term. `hardware` always has four terms of 16 k; it aligns C and the terms
to the largest exponent of C and of the scales and truncates them to 35 fractional bits.

`_Rows` and `_Columns` are decoded fragments of A and B, which `prepare` (instruction.py) reuses between MMAs.
`_float64`, `_hardware` and their packed forms are the arithmetics; `mma`, at the end, resolves the modifiers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from .floats import fma_f64
from .instruction import Fault, Semantics, Unsupported, Warps, define
from .numbers import CANONICAL_NAN_F32, FORMATS

_ROWS, _COLUMNS, _LANES = 16, 8, 32
_OUTPUTS = _ROWS * _COLUMNS

_i, _g, _t = np.meshgrid(np.arange(4), np.arange(8), np.arange(4), indexing="ij")
#: Row and column of each of the 128 outputs of a warp, (4, 32).
_ROW = (_g + 8 * (_i >> 1)).reshape(4, _LANES)
_COLUMN = (2 * _t + (_i & 1)).reshape(4, _LANES)
#: Index of each output in a matrix stored as [column][row], and the inverse permutation.
_FROM_COLUMNS = _COLUMN * _ROWS + _ROW
_TO_COLUMNS = np.argsort(_FROM_COLUMNS, axis=None)


@lru_cache(maxsize=64)
def _places(kind: str, warps: int) -> np.ndarray:
    """Flat indices, in register order, into an array (warps, 8, 16), (warps, 16) or (warps, 8)."""
    within, size = {"output": (_FROM_COLUMNS, _OUTPUTS), "row": (_ROW, _ROWS), "column": (_COLUMN, _COLUMNS)}[kind]
    places = np.arange(warps)[:, None] * size + within[:, None]
    places.flags.writeable = False
    return places


def _in_register_order(kind: str, values: np.ndarray) -> np.ndarray:
    """Values per output, row or column of each warp, in register order: (warps, 8, 16), (warps, 16) or (warps, 8) to
    (4, warps, 32)."""
    return values.reshape(-1).take(_places(kind, len(values)))


_FRACTION_BITS = 25
_NO_PRODUCT = -(1 << 13)  # the exponent of zero: below every other, and its double fits int16


# Element types


@dataclass(frozen=True)
class _Element:
    """An element type of A or B: a code in a container of `bits` bits, above `shift` unused bits.

    tf32 is in the upper 19 bits of a register, and the lower 13 are ignored; its container here is the 19-bit code.
    """

    name: str
    bits: int
    shift: int = 0

    @property
    def format(self):
        return FORMATS[self.name]

    @cached_property
    def _codes(self) -> np.ndarray:
        """The format's code in each possible container."""
        return (np.arange(1 << self.bits) >> self.shift) & ((1 << self.format.bits) - 1)

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every container, float64 (2 ** bits,)."""
        return self.format.values[self._codes]

    @cached_property
    def exponents(self) -> np.ndarray:
        """The unbiased exponent of every container, int16 (2 ** bits,). Subnormals have the smallest one, zeros
        `_NO_PRODUCT`."""
        codes, format = self._codes, self.format
        field = (codes >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1)
        exponent = np.maximum(field, 1) - format.bias
        return np.where(self.values == 0, _NO_PRODUCT, exponent).astype(np.int16)

    @property
    def width(self) -> int:
        """Elements per 32-bit register."""
        return 32 // self.bits

    @property
    def padding(self) -> int:
        """The bits of a 32-bit register that belong to no element."""
        unused = ((1 << self.bits) - 1) ^ (((1 << self.format.bits) - 1) << self.shift)
        return unused * 0x01010101 if self.bits == 8 else 0

    @property
    def smallest_step(self) -> int:
        """Exponent of the lowest mantissa bit of subnormals: every value is a multiple of 2 ** smallest_step."""
        return self.format.smallest_exponent - self.format.mantissa_bits


_ELEMENTS = {
    "f16": _Element("f16", 16),
    "bf16": _Element("bf16", 16),
    "tf32": _Element("tf32", 19),
    # Eight-bit containers of kind::mxf8f6f4: six-bit formats in bits 5..0, four-bit ones in bits 5..2.
    "e4m3": _Element("e4m3", 8),
    "e5m2": _Element("e5m2", 8),
    "e3m2": _Element("e3m2", 8),
    "e2m3": _Element("e2m3", 8),
    "e2m1": _Element("e2m1", 8, shift=2),
}


@cache
def _exact_dtype(a: str, b: str, depth: int) -> np.dtype | None:
    """The narrowest float type in which every sum of `depth` products is exact in any order, or None."""
    a, b = _ELEMENTS[a], _ELEMENTS[b]
    if not math.isfinite(a.format.largest * b.format.largest):
        return None
    bits = math.log2(depth * a.format.largest * b.format.largest) - (a.smallest_step + b.smallest_step)
    for dtype in (np.float32, np.float64):
        if bits <= np.finfo(dtype).nmant + 1:
            return np.dtype(dtype)
    return None


# Fragments


def _decoder(element: _Element, dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """A function from raw containers (contiguous, the last axis even) to their values in `dtype`."""
    if element.name == "bf16":
        return lambda raw: (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(dtype, copy=False)
    if element.name == "tf32":
        return lambda raw: (raw << np.uint32(13)).view(np.float32).astype(dtype, copy=False)
    if element.bits == 16:
        table = element.values.astype(dtype)
        return lambda raw: np.take(table, raw, mode="clip")
    # Look-ups of pairs of bytes take half the time; an element of the table is two f32 as one complex64.
    pairs = np.stack(np.meshgrid(element.values, element.values, indexing="ij")[::-1], axis=-1)
    table = pairs.astype(np.float32).reshape(-1).view(np.complex64)
    return lambda raw: np.take(table, raw.view("<u2"), mode="clip").view(np.float32).astype(dtype, copy=False)


class _Fragment(ABC):
    """A decoded A or B fragment. Its properties are computed on first use.

    `raw` holds the containers in the layout of the operands of np.matmul.
    """

    def __init__(self, element: _Element, dtype: np.dtype, raw: np.ndarray):
        self.element = element
        self.dtype = dtype
        self.raw = raw
        self._finite: np.ndarray | None = None

    @cached_property
    def matrix(self) -> np.ndarray:
        """The values, in the layout of `raw`."""
        return _decoders(self.element.name, self.dtype)(self.raw)

    @cached_property
    def special(self) -> bool:
        """Whether any value is an infinity or NaN."""
        return self.element.format.specials != "none" and not bool(np.isfinite(self.matrix).all())

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of all warps."""
        return self._extremes[0]

    @cached_property
    def steps(self) -> float:
        """The largest magnitude of all warps, in units of the lowest mantissa bit of the smallest nonzero magnitude; 0
        if all are zero."""
        largest, smallest = self._extremes
        if not largest:
            return 0.0
        format = self.element.format
        exponent = max(math.frexp(smallest)[1] - 1, format.smallest_exponent)
        return math.ldexp(largest, format.mantissa_bits - exponent)

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        """The largest magnitude and the smallest nonzero magnitude."""
        if self.element.bits == 8:
            magnitude = np.abs(self.matrix)
            return float(magnitude.max()), float(magnitude.min(where=magnitude > 0, initial=np.inf))
        # Codes of magnitudes are ordered as the values. Zero minus one wraps around to the largest code.
        one = self.raw.dtype.type(1)
        magnitude = self.raw & self.raw.dtype.type((1 << self.element.bits - 1) - 1)
        smallest = (int((magnitude - one).min()) + 1) & int(np.iinfo(magnitude.dtype).max)
        values = self.element.values
        return float(values[magnitude.max()]), float(values[smallest])

    @property
    @abstractmethod
    def by_depth(self) -> np.ndarray:
        """`raw` as (depth, 1, 16, warps) for A, (depth, 8, 1, warps) for B."""

    @cached_property
    def exponents_by_depth(self) -> np.ndarray:
        """The exponents, int16 in the layout of `by_depth`."""
        return self.element.exponents.take(self.by_depth)

    def finite_by_depth(self, dtype: np.dtype) -> np.ndarray:
        """The values in the layout of `by_depth`; zero for infinities and NaN."""
        if self._finite is None:
            self._finite = _finite_values(self.element.name, dtype).take(self.by_depth)
        return self._finite


class _Rows(_Fragment):
    """A: `raw` is (warps, depth, 16)."""

    def __init__(self, element: _Element, dtype: np.dtype, registers: Sequence[np.ndarray]):
        raw = _containers(element, registers)  # (warps, g, t, register, element)
        warps, _, _, count, width = raw.shape
        raw = raw.reshape(warps, 8, 4, count // 2, 2, width).transpose(0, 2, 3, 5, 4, 1)
        super().__init__(element, dtype, np.ascontiguousarray(raw).reshape(warps, -1, _ROWS))

    @cached_property
    def largest_of_row(self) -> np.ndarray:
        """The largest magnitude of each row, (warps, 16)."""
        return np.abs(self.matrix).max(axis=1)

    @cached_property
    def steps_of_row(self) -> np.ndarray:
        """The largest magnitude of each row in units of the lowest mantissa bit of its smallest nonzero one; (warps,
        16)."""
        magnitude = np.abs(self.matrix)
        smallest = np.where(magnitude == 0, np.inf, magnitude).min(axis=1)
        return self.largest_of_row / _lowest_bit(self.element, np.minimum(smallest, self.largest_of_row))

    @cached_property
    def by_depth(self) -> np.ndarray:
        """Raw containers as (depth, 1, 16, warps)."""
        return np.ascontiguousarray(self.raw.transpose(1, 2, 0))[:, None]


class _Columns(_Fragment):
    """B: `raw` is (warps, 8, depth)."""

    def __init__(self, element: _Element, dtype: np.dtype, registers: Sequence[np.ndarray]):
        raw = _containers(element, registers)
        super().__init__(element, dtype, raw.reshape(len(raw), _COLUMNS, -1))

    @cached_property
    def by_depth(self) -> np.ndarray:
        """Raw containers as (depth, 8, 1, warps)."""
        return np.ascontiguousarray(self.raw.transpose(2, 1, 0))[:, :, None]


def _containers(element: _Element, registers: Sequence[np.ndarray]) -> np.ndarray:
    """Registers (warps, 32) as containers (warps, g, t, register, element)."""
    stacked = np.empty((*registers[0].shape, len(registers)), np.uint32)
    for index, register in enumerate(registers):
        stacked[..., index] = register
    if element.padding:
        # The ISA does not define these bits, and hardware does not ignore all of them.
        astray = stacked & np.uint32(element.padding)
        if astray.any():
            raise Fault(
                f"a container of an {element.name} fragment has bits set outside of the element", astray.any(axis=-1)
            )
    if element.name == "tf32":
        raw = stacked >> np.uint32(13)
    else:
        raw = stacked.view(np.uint8 if element.bits == 8 else np.uint16)
    return raw.reshape(len(stacked), 8, 4, len(registers), -1)


def _lowest_bit(element: _Element, magnitude):
    """The value of the lowest mantissa bit of positive numbers."""
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, element.format.smallest_exponent)
    return np.ldexp(1.0, exponent - element.format.mantissa_bits)


@cache
def _decoders(name: str, dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return _decoder(_ELEMENTS[name], dtype)


@cache
def _finite_values(name: str, dtype: np.dtype) -> np.ndarray:
    return np.nan_to_num(_ELEMENTS[name].values, nan=0.0, posinf=0.0, neginf=0.0).astype(dtype)


class _Scales:
    """The scales in a 32-bit register: four bytes per lane, (warps, 32, 4)."""

    def __init__(self, register: np.ndarray):
        self.bytes = np.ascontiguousarray(register, np.uint32).view(np.uint8).reshape(len(register), _LANES, 4)
        self.kept: dict = {}  # cached factors of the rows of A

    def codes(self, lanes: np.ndarray, byte: int) -> np.ndarray:
        """The scale codes of some lanes, (warps, len(lanes))."""
        return self.bytes[:, lanes, byte]

    def by_row(self, thread: int, byte: int) -> np.ndarray:
        """The factor of the row of each output, float64 in register order; cached, because the next MMA often uses the
        same."""
        if (thread, byte) not in self.kept:
            factors = FORMATS["ue8m0"].values[self.codes(_SCALE_LANES_A[thread], byte)]
            self.kept[thread, byte] = _in_register_order("row", factors)
        return self.kept[thread, byte]


#: By thread-id: the lanes that hold the scales of the rows of A, and of the columns of B.
_SCALE_LANES_A = 4 * (np.arange(_ROWS) % 8) + np.arange(_ROWS) // 8 + 2 * np.arange(2)[:, None]
_SCALE_LANES_B = 4 * np.arange(_COLUMNS) + np.arange(4)[:, None]


@dataclass(frozen=True)
class _Scaling:
    """The scales of one MMA: the registers of A and B, and the selected byte and lanes (thread-id) of each."""

    a: _Scales
    b: _Scales
    byte_a: int
    thread_a: int
    byte_b: int
    thread_b: int

    @property
    def rows(self) -> np.ndarray:
        """The factor of the row of each output, float64 in register order."""
        return self.a.by_row(self.thread_a, self.byte_a)

    @property
    def columns(self) -> np.ndarray:
        """The factors of the columns, float64 (warps, 8)."""
        return FORMATS["ue8m0"].values[self.b.codes(_SCALE_LANES_B[self.thread_b], self.byte_b)]

    @property
    def factors(self) -> np.ndarray:
        """The factor of each output, row times column, float64 in register order."""
        return self.rows * _in_register_order("column", self.columns)

    @property
    def exponents(self) -> np.ndarray:
        """The sum of the exponents of both scales, (8, 16, warps)."""
        by_row = self.a.codes(_SCALE_LANES_A[self.thread_a], self.byte_a).T.astype(np.int32)
        by_column = self.b.codes(_SCALE_LANES_B[self.thread_b], self.byte_b).T.astype(np.int32)
        return by_row + by_column[:, None] - 2 * FORMATS["ue8m0"].bias


def _checked(a: Sequence, b: Sequence, bytes: Sequence[int] = range(4)) -> tuple[int, int, int, int]:
    """(byte-id-a, thread-id-a, byte-id-b, thread-id-b), checked; `bytes` are the valid byte-ids of the kind."""
    named = (
        ("byte-id-a", a[0], bytes),
        ("thread-id-a", a[1], range(2)),
        ("byte-id-b", b[0], bytes),
        ("thread-id-b", b[1], range(4)),
    )
    return tuple([_uniform(*each) for each in named])


def _uniform(name: str, value, choices: Sequence[int]) -> int:
    number = int(value) if value.ndim == 0 else int(value.flat[0])
    if number not in choices or (value.ndim and (value != number).any()):
        raise Fault(f"{name} of a block-scaled mma is one of {', '.join(map(str, choices))}, the same for all lanes")
    return number


# Arithmetic float64


def _float64(
    rows: _Rows, columns: _Columns, c: np.ndarray, accumulator: "_Accumulator", scaling: _Scaling | None
) -> np.ndarray:
    """D = C + A B, rounded once from float64; C and D have the accumulator's type, in register order."""
    product = np.matmul(columns.matrix, rows.matrix).astype(np.float64, copy=False).reshape(-1, _OUTPUTS)
    if scaling is not None:
        product *= np.repeat(scaling.columns, _ROWS, axis=1)
    product = _in_register_order("output", product)
    if scaling is not None:
        product *= scaling.rows
    depth = columns.raw.shape[-1]
    if _exact_dtype(rows.element.name, columns.element.name, depth) or depth * rows.steps * columns.steps <= 2.0**53:
        product += c
        return accumulator.nearest(product)

    # The last bits of `product` depend on the summation order of BLAS, and so, rarely, does the result. Compute an
    # interval that holds the exact sum. If both ends round to one value, that is the result; otherwise sum exactly.
    error = np.where(depth * rows.steps_of_row * columns.steps > 2.0**53, rows.largest_of_row, 0.0)
    # The error of n additions in any order is at most n u sum |p| + O(u^2), u = 2^-53; doubled to cover O(u^2).
    error = _in_register_order("row", error * (columns.largest * (2 * depth * depth * 2.0**-53)))
    scale = None if scaling is None else scaling.factors
    if scale is not None:
        error *= scale
    wide = c.astype(np.float64)
    low = accumulator.nearest((product - error) + wide)
    high = accumulator.nearest((product + error) + wide)
    doubtful = np.flatnonzero(low != high)
    if len(doubtful):
        high.reshape(-1)[doubtful] = accumulator.nearest(_exact_sums(rows, columns, wide, product, scale, doubtful))
    return high


def _exact_sums(rows, columns, c, product, scale, places: np.ndarray) -> np.ndarray:
    """C + A B rounded once to float64, for the outputs at the flat indices `places` in register order."""
    index, warp, lane = np.unravel_index(places, c.shape)
    terms = rows.matrix[warp, :, _ROW[index, lane]] * columns.matrix[warp, _COLUMN[index, lane]]
    if scale is not None:
        terms *= scale.reshape(-1)[places, None]
    c = c.reshape(-1)[places]
    total = product.reshape(-1)[places] + c
    inexact = np.isfinite(total)
    if len(places) > 64:
        # All terms are multiples of the lowest bit of the smallest one. Sums below 2^53 of these are exact.
        precision = rows.element.format.mantissa_bits + columns.element.format.mantissa_bits + 2
        lowest = np.where(terms == 0, np.inf, np.frexp(terms)[1] - precision).min(axis=-1)
        inexact &= np.abs(terms).sum(axis=-1) > np.exp2(lowest + 53)
    for place in np.flatnonzero(inexact).tolist():
        total[place] = math.fsum((*terms[place].tolist(), c[place]))
    return total


# Arithmetic hardware


def _power_of_two(exponent: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """2 ** exponent; zero below the normal range of `dtype`, clipped above it."""
    if dtype == np.float32:
        return (np.clip(exponent + 127, 0, 254).astype(np.uint32) << np.uint32(23)).view(np.float32)
    return (np.clip(exponent + 1023, 0, 2046).astype(np.uint64) << np.uint64(52)).view(np.float64)


def _hardware(
    rows: _Rows, columns: _Columns, c: np.ndarray, accumulator: "_Accumulator", scaling: _Scaling | None
) -> np.ndarray:
    """D from C by the rule of tensor cores; C and D have the accumulator's type, in register order."""
    # The layout (columns, rows, warps) makes each step of the sum over k contiguous in memory.
    by_column = c.swapaxes(1, 2).reshape(_OUTPUTS, -1)[_TO_COLUMNS].reshape(_COLUMNS, _ROWS, -1)
    finite = np.isfinite(by_column)
    regular = finite.all()
    by_column = by_column if regular else np.where(finite, by_column, c.dtype.type(0))
    total = _fused_sum(rows, columns, by_column, accumulator, None if scaling is None else scaling.exponents)
    result = accumulator.rounded(total).reshape(_OUTPUTS, -1)[_FROM_COLUMNS]
    result = np.ascontiguousarray(result.swapaxes(1, 2))

    factors = None if scaling is None else scaling.factors
    if not regular or rows.special or columns.special or (factors is not None and np.isnan(factors).any()):
        # Infinities and NaN follow IEEE 754 and do not depend on the summation order.
        plain = np.matmul(columns.matrix, rows.matrix).astype(np.float64)
        plain = _in_register_order("output", plain.reshape(-1, _OUTPUTS))
        plain = (plain if factors is None else plain * factors) + c
        result = np.where(np.isfinite(plain), result, plain.astype(c.dtype))
    return result


def _fused_sum(
    rows: _Rows, columns: _Columns, c: np.ndarray, accumulator: "_Accumulator", scale: np.ndarray | None
) -> np.ndarray:
    """The aligned, truncated sum, exact in float64. Arrays are (8, 16, warps); `scale` holds exponents.

    Alignment and truncation of a product p are trunc(p 2^(25 - largest exponent)), without its significand.
    """
    # Every product and its shifted form are exact in `dtype`: 8-bit formats and f16 have few bits and a short range.
    dtype = np.dtype(np.float64 if rows.element.name in ("bf16", "tf32") else np.float32)
    a_exponent, b_exponent = rows.exponents_by_depth, columns.exponents_by_depth
    shape, depth = c.shape, len(a_exponent)
    largest = a_exponent[0] + b_exponent[0]
    buffer = np.empty(shape, np.int16)
    for k in range(1, depth):
        np.maximum(largest, np.add(a_exponent[k], b_exponent[k], out=buffer), out=largest)
    largest = largest.astype(np.int32)
    if scale is not None:
        largest += scale
    np.maximum(largest, accumulator.exponents(c), out=largest)

    relative = largest if scale is None else largest - scale
    total = np.trunc(c * _power_of_two(_FRACTION_BITS - largest, np.dtype(np.float64)))
    unit = _power_of_two(largest - _FRACTION_BITS, np.dtype(np.float64))
    step = rows.element.smallest_step + columns.element.smallest_step
    if rows.dtype == np.float32 and relative.max() <= _FRACTION_BITS + step:  # no product loses bits
        products = np.matmul(columns.matrix, rows.matrix).reshape(-1, _OUTPUTS).T.reshape(shape)
        return (total + products * _power_of_two(_FRACTION_BITS - relative, np.dtype(np.float64))) * unit

    shift = _power_of_two(_FRACTION_BITS - relative, dtype)
    a, b = rows.finite_by_depth(dtype), columns.finite_by_depth(dtype)
    term, aligned = np.empty(shape, dtype), np.empty(shape, np.int32)
    for start in range(0, depth, 16):  # 16 terms below 4 * 2^25 stay within int32
        partial = np.zeros(shape, np.int32)
        for k in range(start, min(start + 16, depth)):
            np.multiply(a[k], b[k], out=term)
            np.multiply(term, shift, out=term)
            np.copyto(aligned, term, casting="unsafe")  # float to int truncates toward zero
            np.add(partial, aligned, out=partial)
        total += partial
    return total * unit


def _f32_toward_zero(values: np.ndarray) -> np.ndarray:
    """float64 to f32, truncated toward zero; magnitudes above the f32 range become infinite."""
    cut = (values.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64)
    tiny = np.abs(values) < 2.0**-126
    if tiny.any():
        cut = np.where(tiny, np.trunc(values * 2.0**149) * 2.0**-149, cut)
    return cut.astype(np.float32)


# Packed e2m1


_PACKED_FRACTION_BITS = 35
_E2M1 = FORMATS["e2m1"].values.astype(np.float32)
#: Both elements of each byte, the low nibble first, as one complex number.
_OF_BYTE = np.stack((np.tile(_E2M1, 16), np.repeat(_E2M1, 16)), axis=-1).reshape(-1).view(np.complex64)


def _words(registers: Sequence[np.ndarray], *axes: int) -> np.ndarray:
    """Registers (warps, 32) as words (h, row / 8, warps, g, t / 2, t % 2), with these axes permuted by `axes`.

    h is the half of k that a register holds. B has one value of row / 8.
    """
    words = np.stack(registers).reshape(2, len(registers) // 2, -1, 8, 2, 2)
    return np.ascontiguousarray(words.transpose(axes))


def _packed_rows(registers: Sequence[np.ndarray]) -> np.ndarray:
    """A as float32 (4 groups of 16 k, warps, 16 k, 16 rows)."""
    words = _words(registers, 0, 4, 2, 5, 1, 3)  # (h, t / 2, warps, t % 2, row, g)
    bytes = words.view(np.uint8).reshape(4, -1, 2, _ROWS, 4).swapaxes(-1, -2)
    codes = np.empty((*bytes.shape[:-1], 2, _ROWS), np.uint8)  # (group, warps, t % 2, byte, nibble, 16)
    np.bitwise_and(bytes, np.uint8(15), out=codes[..., 0, :])
    np.right_shift(bytes, np.uint8(4), out=codes[..., 1, :])
    return _PACKED_DECODER(codes).reshape(4, -1, 16, _ROWS)


def _packed_columns(registers: Sequence[np.ndarray]) -> np.ndarray:
    """B as float32 (4 groups of 16 k, warps, 8 columns, 16 k)."""
    words = _words(registers, 0, 1, 4, 2, 3, 5)  # (h, 1, t / 2, warps, g, t % 2)
    return _OF_BYTE.take(words.view(np.uint8)).view(np.float32).reshape(4, -1, _COLUMNS, 16)


_PACKED_DECODER = _decoder(_Element("e2m1", 8), np.dtype(np.float32))


@dataclass(frozen=True)
class _ScaleType:
    """A scale type of packed operands: value and exponent of each code, blocks per 64 k, and the valid byte-ids.

    The exponent is that of the field; subnormals have the smallest one, zero has -126. A sum of 16 or 32 products of
    elements has at most 13 bits; times two scales it is exact in the dtype of `values`.
    """

    values: np.ndarray
    exponents: np.ndarray
    blocks: int
    bytes: tuple[int, ...]


def _ue4m3() -> _ScaleType:
    code = np.arange(256) & 0x7F  # the sign bit is ignored
    exponents = np.where(code == 0, -126, np.maximum(code >> 3, 1) - 7)
    return _ScaleType(FORMATS["e4m3"].values[code].astype(np.float32), exponents, 4, (0,))


_SCALE_TYPES = {
    "ue8m0": _ScaleType(FORMATS["ue8m0"].values, np.arange(256) - 127, 2, (0, 2)),
    "ue4m3": _ue4m3(),
}


@dataclass(frozen=True)
class _PackedScaling:
    """The scales of one MMA on packed operands."""

    type: _ScaleType
    a: _Scales
    b: _Scales
    byte_a: int
    thread_a: int
    byte_b: int
    thread_b: int

    def _of_rows(self, table: np.ndarray) -> np.ndarray:
        """Entries of `table` for the scales of the rows, (blocks, warps, 128); cached, as the next MMA often uses
        them."""
        key = (self.thread_a, self.byte_a, id(table))
        if key not in self.a.kept:
            codes = self.a.bytes[:, _SCALE_LANES_A[self.thread_a], self.byte_a : self.byte_a + self.type.blocks]
            self.a.kept[key] = np.tile(table.take(codes.transpose(2, 0, 1)), _COLUMNS)
        return self.a.kept[key]

    def _of_columns(self, table: np.ndarray) -> np.ndarray:
        codes = self.b.bytes[:, _SCALE_LANES_B[self.thread_b], self.byte_b : self.byte_b + self.type.blocks]
        return np.repeat(table.take(codes.transpose(2, 0, 1)), _ROWS, axis=-1)

    @property
    def factors(self) -> np.ndarray:
        """The factor of the sum of each block, (blocks, warps, 128), outputs as [column][row]."""
        return self._of_rows(self.type.values) * self._of_columns(self.type.values)

    @property
    def exponents(self) -> np.ndarray:
        """The largest exponent of the blocks, (warps, 128)."""
        return (self._of_rows(self.type.exponents) + self._of_columns(self.type.exponents)).max(axis=0)


def _packed_float64(products: np.ndarray, c: np.ndarray, scaling: _PackedScaling) -> np.ndarray:
    """The exact sum of all products and C, rounded to float64 and then to f32."""
    if scaling.type.blocks == 4:
        terms = products * scaling.factors
        total = terms[0].astype(np.float64)  # exact: ue4m3 has few exponents
        for term in terms[1:]:
            total += term
        return (_in_register_order("output", total) + c).astype(np.float32)
    terms = (products[::2] + products[1::2]) * scaling.factors
    total = terms[0] + terms[1]
    result = _in_register_order("output", total) + c
    lost = (total - terms[0] != terms[1]) & np.isfinite(total)
    if lost.any():  # the scales are so far apart that float64 rounds the sum
        places = np.flatnonzero(_in_register_order("output", lost) & np.isfinite(result))
        of_blocks = [_in_register_order("output", term).reshape(-1)[places].tolist() for term in terms]
        result.reshape(-1)[places] = [math.fsum(each) for each in zip(*of_blocks, c.reshape(-1)[places].tolist())]
    return result.astype(np.float32)


def _packed_hardware(products: np.ndarray, c: np.ndarray, scaling: _PackedScaling) -> np.ndarray:
    """Align the scaled sums and C to the largest exponent, truncate them, and truncate their sum to f32."""
    c = c.swapaxes(0, 1).reshape(-1, _OUTPUTS).take(_TO_COLUMNS, axis=1)
    largest = np.maximum(scaling.exponents, _ACCUMULATORS["f32"].exponents(c))
    shift = _power_of_two(_PACKED_FRACTION_BITS - largest, np.dtype(np.float64))
    total = np.trunc(c * shift)
    factors = scaling.factors
    for group, product in enumerate(products):
        total += np.trunc(product * factors[group * len(factors) // 4] * shift)
    return _in_register_order(
        "output", _f32_toward_zero(total * _power_of_two(largest - _PACKED_FRACTION_BITS, np.dtype(np.float64)))
    )


def _packed_function(arithmetic: Callable, type_: _ScaleType) -> Callable:
    """The function of a packed mma. A, B and the scales are prepared; C and the selectors are not.

    The arithmetic takes the sums of each 16 products, exact in float32 (4, warps, 128) with outputs as [column][row],
    and C in register order. It returns D in register order.
    """
    accumulator = _ACCUMULATORS["f32"]

    def multiply(a: np.ndarray, b: np.ndarray, c, scales_a: _Scales, select_a, scales_b: _Scales, select_b):
        scaling = _PackedScaling(type_, scales_a, scales_b, *_checked(select_a, select_b, type_.bytes))
        products = np.matmul(b, a).reshape(4, -1, _OUTPUTS)
        return accumulator.write(arithmetic(products, accumulator.read(c), scaling))

    return multiply


def _packed_semantics(type_: _ScaleType) -> Semantics:
    functions = {
        "float64": _packed_function(_packed_float64, type_),
        "hardware": _packed_function(_packed_hardware, type_),
    }
    prepare = [_packed_rows, _packed_columns, None, _Scales, None, _Scales, None]
    return Warps("f32*4", "b32*4, b32*2, f32*4, b32, u16*2, b32, u16*2", functions, aligned=True, prepare=prepare)


# The instruction


@dataclass(frozen=True)
class _Accumulator:
    """The type of C and D: its layout in registers, and the rounding of results to it."""

    name: str
    signature: str
    dtype: np.dtype
    nan: object

    def read(self, registers: Sequence[np.ndarray]) -> np.ndarray:
        """C in register order, of type `dtype`."""
        if self.dtype == np.float32:
            return np.concatenate(registers).reshape(4, -1, _LANES)
        low, high = (np.stack(registers) >> np.uint32(shift) for shift in (0, 16))
        halves = np.stack((low, high), axis=1).astype(np.uint16)
        return halves.reshape(4, -1, _LANES).view(np.float16)

    def write(self, result: np.ndarray) -> tuple[np.ndarray, ...]:
        """D's registers; every NaN becomes the canonical one."""
        if np.isnan(result.max()):
            result = np.where(np.isnan(result), self.nan, result)
        if self.dtype == np.float32:
            return tuple(result)
        halves = result.view(np.uint16).astype(np.uint32)
        return tuple((halves[i + 1] << np.uint32(16)) | halves[i] for i in (0, 2))

    def exponents(self, c: np.ndarray) -> np.ndarray:
        """Exponents as the hardware uses them, int32: subnormals have the smallest one, zero has -126."""
        format = FORMATS[self.name]
        bits = c.view(np.uint32 if format.bits == 32 else np.uint16)
        field = (bits >> format.mantissa_bits).astype(np.int32) & ((1 << format.exponent_bits) - 1)
        exponent = np.maximum(field, 1) - format.bias
        return exponent if format.name == "f32" else np.where(c == 0, np.int32(-126), exponent)

    def nearest(self, total: np.ndarray) -> np.ndarray:
        """A float64 sum as D, rounded to nearest even. With f16 a zero result is +0, also if a negative sum
        underflows."""
        if self.dtype == np.float32:
            return total.astype(np.float32)
        return total.astype(np.float16) + np.float16(0)

    def rounded(self, total: np.ndarray) -> np.ndarray:
        """A hardware sum, exact in float64, as D: truncated to f32, or rounded to nearest even to f16."""
        return _f32_toward_zero(total) if self.dtype == np.float32 else self.nearest(total)


_ACCUMULATORS = {
    "f32": _Accumulator("f32", "f32*4", np.dtype(np.float32), CANONICAL_NAN_F32),
    "f16": _Accumulator("f16", "b32*2", np.dtype(np.float16), np.uint16(0x7FFF).view(np.float16)),
}


def _function(arithmetic: Callable, accumulator: _Accumulator) -> Callable:
    """The function of an mma. A, B and the scales are prepared; C and the selectors are not."""

    def multiply(a: _Rows, b: _Columns, c, scales_a=None, select_a=None, scales_b=None, select_b=None):
        scaling = None if scales_a is None else _Scaling(scales_a, scales_b, *_checked(select_a, select_b))
        return accumulator.write(arithmetic(a, b, accumulator.read(c), accumulator, scaling))

    return multiply


def _semantics(a: str, b: str, depth: int, accumulator: str, scaled: bool = False) -> Semantics:
    dtype = _exact_dtype(a, b, depth) or np.dtype(np.float64)
    count_b = depth // (4 * _ELEMENTS[a].width)
    type_ = _ACCUMULATORS[accumulator].signature
    sources = [f"b32*{2 * count_b}", f"b32*{count_b}", type_]
    prepare: list = [
        lambda registers: _Rows(_ELEMENTS[a], dtype, registers),
        lambda registers: _Columns(_ELEMENTS[b], dtype, registers),
        None,
    ]
    if scaled:
        sources += ["b32", "u16*2", "b32", "u16*2"]
        prepare += [_Scales, None, _Scales, None]
    functions = {
        "float64": _function(_float64, _ACCUMULATORS[accumulator]),
        "hardware": _function(_hardware, _ACCUMULATORS[accumulator]),
    }
    return Warps(type_, ", ".join(sources), functions, aligned=True, prepare=prepare)


# Integers


def _integer_rows(dtype: np.dtype, registers: Sequence[np.ndarray]) -> np.ndarray:
    """A as float32 (warps, k, 16 rows); float32 holds every sum of 32 products of bytes exactly."""
    raw = np.stack(registers, axis=-1).view(dtype)
    warps, count = len(raw), len(registers)
    raw = raw.reshape(warps, 8, 4, count // 2, 2, 4).transpose(0, 2, 3, 5, 4, 1)
    return raw.astype(np.float32).reshape(warps, -1, _ROWS)


def _integer_columns(dtype: np.dtype, registers: Sequence[np.ndarray]) -> np.ndarray:
    """B as float32 (warps, 8 columns, k)."""
    raw = np.stack(registers, axis=-1).view(dtype)
    return raw.astype(np.float32).reshape(len(raw), _COLUMNS, -1)


def _integer_semantics(a: str, b: str, depth: int, saturates: bool) -> Semantics:
    types = {"s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}

    def multiply(rows: np.ndarray, columns: np.ndarray, c: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        product = _in_register_order("output", np.matmul(columns, rows).reshape(-1, _OUTPUTS)).astype(np.int64)
        total = product + np.stack([np.broadcast_to(register, product.shape[1:]) for register in c])
        if saturates:
            total = np.clip(total, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
        return tuple(total.astype(np.int32))

    prepare = [
        lambda registers: _integer_rows(types[a], registers),
        lambda registers: _integer_columns(types[b], registers),
        None,
    ]
    return Warps("s32*4", f"b32*{depth // 8}, b32*{depth // 16}, s32*4", multiply, aligned=True, prepare=prepare)


# f64


def _double(a: np.ndarray, b: np.ndarray, c: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """m8n8k4: lane 4 g + t holds A[g][t], B[t][g], and C[g][2 t], C[g][2 t + 1]."""
    warps = len(a)
    rows, columns = a.reshape(warps, 8, 4), b.reshape(warps, 8, 4)  # (row, k), (column, k)
    total = np.stack([np.broadcast_to(register, a.shape) for register in c], axis=-1).reshape(warps, 8, 8)
    for k in range(4):
        left = np.repeat(rows[:, :, k], 8, axis=1).reshape(-1)
        right = np.tile(columns[:, :, k], (1, 8)).reshape(-1)
        total = fma_f64(left, right, total.reshape(-1)).reshape(warps, 8, 8)
    total = total.reshape(warps, _LANES, 2)
    if np.isnan(total).any():
        total = np.where(np.isnan(total), _CANONICAL_NAN_F64, total)
    return np.ascontiguousarray(total[..., 0]), np.ascontiguousarray(total[..., 1])


_CANONICAL_NAN_F64 = np.uint64(0x7FF8000000000000).view(np.float64)


_FORMS = (
    "m16n8k16 and m16n8k8 of bf16 with f32, of f16 with f32 or f16; m16n8k8 and m16n8k4 of tf32 with f32; "
    "m16n8k32 and m16n8k16 of e4m3 and e5m2 with f32 or f16; kind::f8f6f4.m16n8k32 of e4m3, e5m2, e3m2, e2m3 and e2m1 "
    "with f32 or f16; "
    "m16n8k32 and m16n8k16 of s8 and u8 with s32, {.satfinite}; m8n8k4 of f64; "
    "kind::mxf8f6f4.block_scale{.scale_vec::1X}.m16n8k32.row.col.f32.{e4m3|e5m2|e3m2|e2m3|e2m1}.{...}.f32.ue8m0, "
    "kind::mxf4.block_scale{.scale_vec::2X}.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0, and "
    "kind::mxf4nvf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32 with scale_vec::2X and ue8m0 or "
    "scale_vec::4X and ue4m3"
)
#: Types of A and B, and of C and D, of each shape without a kind.
_PLAIN = {
    "m16n8k16": {("bf16", "f32"), ("f16", "f32"), ("f16", "f16")},
    "m16n8k8": {("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32")},
    "m16n8k4": {("tf32", "f32")},
}
_BYTES = ("e4m3", "e5m2")
#: The scale type of each kind and scale vector; kind::mxf4nvf4 has no default.
_SCALES = {
    ("kind::mxf8f6f4",): "ue8m0",
    ("kind::mxf8f6f4", "scale_vec::1X"): "ue8m0",
    ("kind::mxf4",): "ue8m0",
    ("kind::mxf4", "scale_vec::2X"): "ue8m0",
    ("kind::mxf4nvf4", "scale_vec::2X"): "ue8m0",
    ("kind::mxf4nvf4", "scale_vec::4X"): "ue4m3",
}
_SCALING = {word for key in _SCALES for word in key} | {"kind::f8f6f4", "block_scale", "scale_vec::1X"}
_CONTAINED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@define("mma.sync.aligned")
def mma(modifiers: tuple[str, ...]) -> Semantics:
    """mma.sync.aligned: shape.row.col.dtype.atype.btype.ctype, with kind::, block_scale and the scale type for mx.

    The kind may stand before the shape or after .col.
    """
    words = [word for word in modifiers if word not in _SCALING and word != "satfinite"]
    scaling = [word for word in modifiers if word in _SCALING]
    shape, types = words[0] if words else "", words[3:]
    if words[1:3] != ["row", "col"]:
        raise Unsupported(f"expected .row.col; there are {_FORMS}")
    depth = int(shape.partition("k")[2] or 0)
    if scaling in ([], ["kind::f8f6f4"]) and len(types) == 4:
        d, a, b, c = types
        found = _plain(shape, depth, d, a, b, c, bool(scaling), "satfinite" in modifiers)
        if found is not None:
            return found
    elif scaling[1:2] == ["block_scale"] and len(types) == 5:
        kind = (scaling[0], *scaling[2:])
        d, a, b, c, scale = types
        if (d, c, scale) == ("f32", "f32", _SCALES.get(kind)):
            if kind[0] == "kind::mxf8f6f4" and shape == "m16n8k32" and a in _CONTAINED and b in _CONTAINED:
                return _semantics(a, b, 32, "f32", scaled=True)
            if kind[0] != "kind::mxf8f6f4" and shape == "m16n8k64" and a == b == "e2m1":
                return _packed_semantics(_SCALE_TYPES[scale])
    raise Unsupported(f"there are {_FORMS}")


def _plain(shape: str, depth: int, d: str, a: str, b: str, c: str, has_kind: bool, saturates: bool) -> Semantics | None:
    """The semantics of an mma without scales; None if these types have none."""
    bytes_of_16 = shape in ("m16n8k32", "m16n8k16")
    if a in ("s8", "u8") and b in ("s8", "u8"):
        fits = bytes_of_16 and c == d == "s32" and not has_kind
        return _integer_semantics(a, b, depth, saturates) if fits else None
    if saturates or c != d:
        return None
    if (shape, a, b, d, has_kind) == ("m8n8k4", "f64", "f64", "f64", False):
        return Warps("f64*2", "f64, f64, f64*2", _double, aligned=True)
    if a == b and (a, d) in _PLAIN.get(shape, ()) and not has_kind:
        return _semantics(a, b, depth, d)
    contained = _CONTAINED if has_kind and shape == "m16n8k32" else _BYTES
    if bytes_of_16 and d in _ACCUMULATORS and a in contained and b in contained:
        return _semantics(a, b, depth, d)
    return None


# Matrix instructions of other architectures


def _elsewhere(name: str, reason: str) -> None:
    """Refuse a family of instructions; the reason names a replacement."""

    @define(name)
    def refuse(modifiers: tuple[str, ...]) -> Semantics:
        raise Unsupported(reason)


_elsewhere(
    "wgmma", "warpgroups multiply on sm_90a alone; compile for sm_80 or sm_120a, where the same code uses mma.sync"
)
_elsewhere(
    "tcgen05", "tensor memory is of sm_100 and sm_103 alone; compile for sm_120a, where the same code uses mma.sync"
)
_elsewhere("wmma", "the layout of wmma fragments is not documented; use mma.sync and ldmatrix, whose layout is")
