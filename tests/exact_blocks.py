"""Block formats in exact rational arithmetic, written from their definitions without the package's own code.

MX: OCP Microscaling Formats v1.0, sections 5.3 and 6.3, with the scale rules of torchao's ScaleCalculationMode. NVFP4:
float32 operations as exact results rounded once.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

RULES = ("floor", "ceil", "rceil", "even")


@dataclass(frozen=True)
class Element:
    """A signed element format with `exponent_bits` and `mantissa_bits`; the first `finite` magnitude codes are
    numbers."""

    exponent_bits: int
    mantissa_bits: int
    finite: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def magnitudes(self) -> list[Fraction]:
        """The values of the finite codes, without sign."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        values = []
        for code in range(self.finite):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            fraction = Fraction(mantissa, 2**self.mantissa_bits)
            values.append((1 + fraction if exponent else fraction) * Fraction(2) ** (max(exponent, 1) - bias))
        return values

    def round(self, x: Fraction) -> int:
        """The magnitude code nearest to x >= 0: ties to the even code; values beyond the range saturate."""
        low, high = 0, self.finite - 1
        while low < high:  # find the last magnitude that is not above x
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.magnitudes[middle] <= x else (low, middle - 1)
        if low == self.finite - 1:
            return low
        below, above = x - self.magnitudes[low], self.magnitudes[low + 1] - x
        return low if (below, low % 2) < (above, (low + 1) % 2) else low + 1


E2M1 = Element(2, 1, 8)
E3M2 = Element(3, 2, 32)
E2M3 = Element(2, 3, 32)
E4M3 = Element(4, 3, 127)
E5M2 = Element(5, 2, 124)

MX = {"mxfp4": E2M1, "mxfp8": E4M3, "mxfp8_e5m2": E5M2, "mxfp6_e3m2": E3M2, "mxfp6_e2m3": E2M3}


def floor_log2(x: Fraction) -> int:
    """The exponent e with 2**e <= x < 2**(e + 1)."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x: Fraction) -> int:
    """The exponent e with 2**(e - 1) < x <= 2**e."""
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def f32(x: Fraction) -> Fraction:
    """x rounded to the nearest float32, ties to even, with subnormals; the inputs are too small to overflow."""
    if not x:
        return x
    unit = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    return round(x / unit) * unit  # Python rounds halves to even


@cache
def scale_byte(largest: Fraction, element: Element, rule: str) -> int:
    """The scale byte of a block whose largest magnitude is `largest`, a float32."""
    if not largest:
        return 0
    top = element.magnitudes[-1]
    if rule == "rceil":
        exponent = ceil_log2(f32(largest * f32(1 / top)) or Fraction(1, 2**200))
    elif rule == "ceil":
        exponent = ceil_log2(largest) - floor_log2(top)
    else:
        exponent = floor_log2(largest)
        # Round to the element's mantissa, halves up: the last value of an octave rounds to the next power of two.
        if rule == "even" and largest >= (2 - Fraction(1, 2 ** (element.mantissa_bits + 1))) * Fraction(2) ** exponent:
            exponent += 1
        if exponent > 127:
            return 0xFF
        exponent -= floor_log2(top)
    return max(exponent + 127, 0)


def encode_mx_block(block, element: Element, rule: str) -> tuple[list[int], int]:
    """Codes and scale byte of a block of float32 values."""
    byte = (
        0xFF if not all(np.isfinite(block)) else scale_byte(max(abs(Fraction(float(v))) for v in block), element, rule)
    )
    if byte == 0xFF:
        return [0] * len(block), byte
    scale, sign = Fraction(2) ** (byte - 127), 1 << (element.bits - 1)
    return [element.round(abs(Fraction(float(v))) / scale) | (sign if np.signbit(v) else 0) for v in block], byte


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., K] to bytes [..., K * bits / 8]: each row is one long little-endian number."""
    rows = codes.reshape(-1, codes.shape[-1]) if codes.size else []
    numbers = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in rows]
    size = codes.shape[-1] * bits // 8
    packed = np.frombuffer(b"".join(n.to_bytes(size, "little") for n in numbers), np.uint8)
    return packed.reshape(*codes.shape[:-1], size)


def _encode(x: np.ndarray, block: int, bits: int, encode_block) -> tuple[np.ndarray, np.ndarray]:
    blocks = [encode_block(values) for values in np.asarray(x, np.float32).reshape(-1, block)]
    codes = np.array([codes for codes, _ in blocks], np.uint8).reshape(x.shape)
    scales = np.array([byte for _, byte in blocks], np.uint8).reshape(*x.shape[:-1], x.shape[-1] // block)
    return pack(codes, bits), scales


def encode(x: np.ndarray, format: str = "mxfp4", rule: str = "floor") -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales of x [..., K] in an MX format."""
    element = MX[format]
    return _encode(x, 32, element.bits, lambda block: encode_mx_block(block, element, rule))


# NVFP4


def global_scale(x: np.ndarray) -> np.float32:
    """The global scale of an array, from its finite values."""
    finite = [abs(Fraction(float(v))) for v in np.asarray(x, np.float32).ravel() if np.isfinite(v)]
    return np.float32(float(f32(max(finite, default=Fraction(0)) / 2688))) or np.float32(1)


def _nv_candidate(values: list[Fraction], largest: Fraction, g: Fraction, top: int):
    """Scale code, step and quotients of a block that maps its largest magnitude to `top`."""
    ratio = f32(f32(largest / top) / g)
    scale = E4M3.round(min(max(ratio, Fraction(1, 512)), Fraction(448)))
    step = f32(g * E4M3.magnitudes[scale])
    return scale, step, [f32(v / step) for v in values] if step else None


def _squared_error(quotients: list[Fraction], scale: int) -> Fraction:
    """The sum of squared errors in units of g: every operation rounded to float32, neighbors added pairwise."""
    errors = []
    for q in quotients:
        nearest = E2M1.magnitudes[E2M1.round(abs(q))]
        error = f32(f32(abs(q) - nearest) * E4M3.magnitudes[scale])
        errors.append(f32(error * error))
    while len(errors) > 1:
        errors = [f32(a + b) for a, b in zip(errors[0::2], errors[1::2])]
    return errors[0]


def encode_nvfp4_block(block, g: Fraction, rule: str) -> tuple[list[int], int]:
    """Codes and the scale byte of 16 float32 values under the global scale g."""
    if not all(np.isfinite(block)):
        return [0] * 16, 0x7F
    values = [Fraction(float(v)) for v in block]
    largest = max(map(abs, values))
    scale, step, quotients = _nv_candidate(values, largest, g, 6)
    if quotients is None:
        return [0] * 16, scale
    if rule == "four_over_six":
        other = _nv_candidate(values, largest, g, 4)
        if _squared_error(other[2], other[0]) < _squared_error(quotients, scale):
            scale, step, quotients = other
    return [E2M1.round(abs(q)) | (8 if np.signbit(v) else 0) for q, v in zip(quotients, block)], scale


def encode_nvfp4(x: np.ndarray, g, rule: str = "amax") -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales of x [..., K] in NVFP4 under the global scale g."""
    exact = Fraction(float(np.float32(g)))
    return _encode(x, 16, 4, lambda block: encode_nvfp4_block(block, exact, rule))


# Inputs


def _neighbors(value: np.float32, steps: int) -> list[np.float32]:
    """The finite float32 numbers within `steps` of a positive one."""
    bits = int(np.float32(value).view(np.uint32)) + np.arange(-steps, steps + 1)
    return list(bits[(bits >= 0) & (bits < 0x7F800000)].astype(np.uint32).view(np.float32))


# Every exponent at which subnormals or the largest numbers begin to matter, and some in between.
EXPONENTS = [*range(-149, -100), -60, -13, -3, -2, -1, 0, 1, 2, 3, 9, 17, 64, *range(104, 128)]


def decision_magnitudes(element: Element) -> np.ndarray:
    """Largest magnitudes at which some rule changes the scale of a block, and the float32 numbers within two steps."""
    top = float(element.magnitudes[-1])
    half = 2 - 2.0 ** -(element.mantissa_bits + 1)  # from here `even` rounds to the next octave
    points = [1.0, half, top / 2 ** floor_log2(element.magnitudes[-1]), 1.5]
    found = [v for e in EXPONENTS for p in points for v in _neighbors(np.float32(np.ldexp(p, e)), 2)]
    return np.unique(np.array(found, np.float32))


def decision_blocks(element: Element, block: int = 32) -> np.ndarray:
    """One block for each of `decision_magnitudes`, [blocks, block], with smaller values of many magnitudes beside
    it."""
    largest = decision_magnitudes(element)
    rest = np.float32(0.99) * np.float32(0.7) ** np.arange(block, dtype=np.float32)
    x = largest[:, None] * (rest * np.where(np.arange(block) % 3 == 1, -1, 1)).astype(np.float32)
    x[np.arange(len(x)), np.arange(len(x)) % block] = largest
    return x


def hard_blocks(element: Element = E2M1, block: int = 32) -> np.ndarray:
    """Float32 blocks at the decisions of rounding, scaling and special values, [blocks, block].

    Every rounding boundary and code value, and their neighbors one step away, under largest values around powers of two
    over the whole exponent range; subnormals, outliers, zeros of both signs, NaN and infinity.
    """
    values = element.magnitudes
    points = sorted({(a + b) / 2 for a, b in zip(values, values[1:])} | set(values))
    rows = []
    for exponent in [-149, -148, -140, -133, -128, -127, -126, -125, -121, -60, -1, 0, 1, 3, 64, 120, 125, 126, 127]:
        scale = max(exponent - floor_log2(values[-1]), -127)
        near = []
        for point in points:
            middle = np.float32(np.ldexp(float(point), scale))
            near += _neighbors(middle, 1)
        with np.errstate(over="ignore"):
            top = np.float32(np.ldexp(1.0, exponent))
        for largest in (
            top,
            np.nextafter(top, np.float32(np.inf)),
            np.nextafter(np.float32(2) * min(top, np.float32(2.0**126)), np.float32(0)),
        ):
            body = np.array([v for v in near if v <= largest] or [0], np.float32)
            body = np.resize(body, -(-len(body) // (block - 1)) * (block - 1)).reshape(-1, block - 1)
            chunk = np.concatenate([body, np.full((len(body), 1), largest, np.float32)], axis=1)
            chunk *= np.where(np.arange(chunk.size).reshape(chunk.shape) % 3 == 1, -1, 1)
            rows += list(np.roll(chunk, 13, axis=1))
    return np.concatenate([np.stack(rows), special_blocks(block)]).astype(np.float32)


def special_blocks(block: int = 32) -> np.ndarray:
    """Zeros of both signs, outliers, NaN of both signs and infinities, [blocks, block]."""
    zeros, slope = np.zeros(block, np.float32), np.linspace(-3, 3, block, dtype=np.float32)
    rows = [zeros, -zeros, np.where(np.arange(block) % 2, -zeros, zeros)]
    for outlier in (1e4, -1e30, 3.4e38):
        rows.append(np.where(np.arange(block) == 5, np.float32(outlier), slope))
    for special in (np.nan, np.inf, -np.inf):
        rows.append(np.where(np.arange(block) == 7, np.float32(special), slope))
    rows.append(np.full(block, np.nan, np.float32))
    rows.append(slope.copy())
    rows[-1].view(np.uint32)[block - 1] = 0xFF800001
    return np.stack(rows).astype(np.float32)
