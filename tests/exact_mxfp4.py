"""MXFP4 in exact rational arithmetic, written from OCP MX v1.0, section 6.3, without the package's own code."""

from fractions import Fraction

import numpy as np

E2M1 = [Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6)]


def floor_log2(x: Fraction) -> int:
    """The exponent e with 2**e <= x < 2**(e + 1)."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** e > x:
        e -= 1
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    return e


def round_e2m1(x: Fraction) -> int:
    """The magnitude code nearest to x >= 0: ties to the even code, 6 where x is larger."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - x), code % 2))


def encode_block(block) -> tuple[list[int], int]:
    """32 codes and the scale byte of 32 float32 values."""
    if not all(np.isfinite(block)):
        return [0] * 32, 0xFF
    values = [Fraction(float(v)) for v in block]
    largest = max(map(abs, values))
    byte = max(floor_log2(largest) - 2 + 127, 0) if largest else 0
    scale = Fraction(2) ** (byte - 127)
    return [round_e2m1(abs(v) / scale) | (8 if np.signbit(x) else 0) for v, x in zip(values, block)], byte


def encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [rows, cols / 2] and scales [rows, cols / 32] of x [rows, cols]."""
    blocks = [encode_block(block) for block in np.asarray(x, np.float32).reshape(-1, 32)]
    codes = np.array([codes for codes, _ in blocks], np.uint8).reshape(x.shape)
    scales = np.array([byte for _, byte in blocks], np.uint8).reshape(*x.shape[:-1], -1)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scales


def hard_blocks() -> np.ndarray:
    """Blocks of 32 float32 values where rounding, scaling and special values are decided, [blocks, 32].

    Every rounding boundary and code value and their neighbors one step away, under largest values around
    powers of two over the whole exponent range; subnormals, huge values, zeros of both signs, NaN and infinity.
    """
    f32 = np.float32
    points = sorted({abs(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])} | set(E2M1))
    rows = []
    for exponent in [*range(-149, -120), -60, -3, -1, 0, 1, 2, 3, 17, 64, *range(120, 128)]:
        scale = max(exponent - 2, -127)
        near = []
        for point in points:
            value = f32(np.ldexp(float(point), scale)) if point else f32(0)
            near += [value, np.nextafter(value, f32(np.inf)), np.nextafter(value, f32(0))]
        with np.errstate(over="ignore"):
            top = f32(np.ldexp(1.0, exponent))
        for largest in (top, np.nextafter(top, f32(np.inf)), np.nextafter(f32(2) * min(top, f32(2.0**126)), f32(0))):
            body = [v for v in near if np.isfinite(v) and v <= largest]
            body = (body * (31 // max(len(body), 1) + 1))[:31]
            signs = np.where(np.arange(32) % 3 == 1, -1, 1).astype(f32)
            rows.append(np.array([*body, largest], f32) * signs)
            rows.append(np.roll(rows[-1], 13)[::-1])
    zeros = np.zeros(32, f32)
    rows += [zeros, -zeros, np.where(np.arange(32) % 2, -zeros, zeros)]
    for special in (np.nan, np.inf, -np.inf):
        rows.append(np.where(np.arange(32) == 7, f32(special), np.linspace(-3, 3, 32, dtype=f32)))
    rows.append(np.full(32, np.nan, f32))
    negative_nan = np.linspace(-3, 3, 32, dtype=f32)
    negative_nan.view(np.uint32)[31] = 0xFF800001
    rows.append(negative_nan)
    return np.stack(rows).astype(f32)
