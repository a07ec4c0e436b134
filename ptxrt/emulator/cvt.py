"""cvt: conversions between number formats (PTX ISA 9.7.9.21).

In x2 forms with two sources, the first source becomes the high half. A NaN becomes the canonical NaN of a float
destination (0x7fffffff, 0x7fff), the largest value of a format without NaN, and 0 as an integer; if source or
destination has 64 bits, the integer is the sign bit alone.

The supported forms are those that ptxas 13.0 assembles, plus those of ptxas 13.4 between bf16x2 or f16x2 and narrower
formats, except the scaled ones (.scaled::n2::ue8m0). ptxas has fewer forms for bf16 than the ISA text (no .sat, no
8-bit integers) and one more: f16 to bf16 and back without a rounding, which means .rn.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .instruction import DTYPES, Lanes, Semantics, Unsupported, define
from .numbers import CANONICAL_NAN_F32, FORMATS, canonical, encode, flushed, rounded

_INTEGERS = {f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)}
_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT_ROUNDING = ("rn", "rz", "rm", "rp")
_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@define("cvt")
def cvt(modifiers: tuple[str, ...]) -> Semantics:
    """cvt{.rounding}{.ftz}{.relu}{.sat|.satfinite}.dtype.atype d, a{, b}."""
    if len(modifiers) < 2:
        raise Unsupported("expected cvt{.rounding}...dtype.atype")
    *flags, destination, source = modifiers
    if len(set(flags)) != len(flags):
        raise Unsupported("a modifier stands twice")
    options = set(flags)
    if destination in ("f16x2", "bf16x2") and source == "f32":
        return _pair_from_f32(options, destination)
    if destination.endswith("x2") and source in ("f32", "f16x2", "bf16x2"):
        return _narrow_from(options, destination, source)
    if destination in ("f16x2", "bf16x2"):
        return _pair_from_narrow(options, destination, source)
    if destination == "tf32":
        return _tf32(options, source)
    if destination in _INTEGERS and source in _INTEGERS:
        return _integer_from_integer(options, destination, source)
    if destination in _INTEGERS and source in _FLOATS:
        return _integer_from_float(options, destination, source)
    if destination in _FLOATS and source in _INTEGERS:
        return _float_from_integer(options, destination, source)
    if destination in _FLOATS and source in _FLOATS:
        return _float_from_float(options, destination, source)
    raise Unsupported(f"no conversion from .{source} to .{destination}")


def _take(options: set[str], *choices: str) -> str | None:
    """Remove the member of `choices` that is in `options`; return it, or None. Unsupported if there are several."""
    found = [choice for choice in choices if choice in options]
    if len(found) > 1:
        raise Unsupported(f".{found[0]} and .{found[1]} exclude each other")
    options.difference_update(found)
    return found[0] if found else None


def _nothing_left(options: set[str]) -> None:
    if options:
        raise Unsupported(f"modifier .{sorted(options)[0]} is not known for these types")


# Integers


def _integer_from_integer(options: set[str], destination: str, source: str) -> Semantics:
    """Truncate or extend; with .sat clamp to the range of the destination."""
    saturate = _take(options, "sat")
    _nothing_left(options)
    to = DTYPES[destination]
    if not saturate:
        return Lanes(destination, source, lambda a: np.asarray(a).astype(to))
    into, out_of = np.iinfo(to), np.iinfo(DTYPES[source])
    if into.min <= out_of.min and out_of.max <= into.max:
        raise Unsupported(f".sat: every .{source} fits .{destination}")
    low, high = DTYPES[source].type(max(into.min, out_of.min)), DTYPES[source].type(min(into.max, out_of.max))
    return Lanes(destination, source, lambda a: np.clip(a, low, high).astype(to))


def _integer_from_float(options: set[str], destination: str, source: str) -> Semantics:
    """Round to an integer by .rni, .rzi, .rmi or .rpi, then clamp to the range of the destination."""
    mode = _take(options, *_INTEGER_ROUNDING)
    if mode is None:
        raise Unsupported("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
    flush = _take_ftz(options, destination, source)
    _check_bf16(options, destination, source)
    _take(options, "sat")  # no effect: results are always clamped
    _nothing_left(options)
    to = DTYPES[destination]
    range_ = np.iinfo(to)
    round_ = _INTEGER_ROUNDING[mode]
    not_a_number = 0
    if source == "f64" or range_.bits == 64:
        not_a_number = range_.min if range_.min else 1 << (range_.bits - 1)

    def convert(a):
        value = round_(_to_float64(a, source, flush))
        # float64 holds 2 ** 63 and 2 ** 64, but not the largest integers below them: compare with >= before converting.
        above, below, nan = value >= float(range_.max + 1), value <= float(range_.min), np.isnan(value)
        inside = np.where(above | below | nan, 0.0, value).astype(to)
        result = np.where(above, to.type(range_.max), np.where(below, to.type(range_.min), inside))
        return np.where(nan, to.type(not_a_number), result)

    return Lanes(destination, source, convert)


def _float_from_integer(options: set[str], destination: str, source: str) -> Semantics:
    """Round by .rn, .rz, .rm or .rp; with .sat clamp to [0, 1]."""
    mode = _take(options, *_FLOAT_ROUNDING)
    if mode is None:
        raise Unsupported("a conversion from an integer needs .rn, .rz, .rm or .rp")
    _take_ftz(options, destination, source)
    _check_bf16(options, destination, source)
    saturate = _take(options, "sat")
    _nothing_left(options)
    wide = DTYPES[source].itemsize == 8

    def convert(a):
        a = np.asarray(a)
        if mode == "rn" and destination in ("f32", "f64"):
            result = a.astype(DTYPES[destination])  # NumPy rounds once, to nearest even
        elif wide and destination == "f64":
            result = _float64_from_wide(a, mode)
        else:
            exact = _sticky_float64(a) if wide else a.astype(np.float64)
            result = _from_float64(exact, destination, mode)
        return _clamp01(result, destination) if saturate else result

    return Lanes(destination, source, convert)


def _check_bf16(options: set[str], destination: str, source: str) -> None:
    """Refuse the conversions of bf16 that ptxas refuses."""
    if "bf16" in (destination, source):
        if "sat" in options:
            raise Unsupported(".sat does not go with bf16")
        if {destination, source} & {"u8", "s8"}:
            raise Unsupported("no conversion between bf16 and integers of 8 bits")


def _sticky_float64(a: np.ndarray) -> np.ndarray:
    """64-bit integers as float64 that round to narrower formats as the integers do.

    Magnitudes from 2 ** 53 on lose their low 11 bits. Their lowest remaining bit is sticky: it is set if any lost bit
    was set.
    """
    magnitude = _magnitude(a)
    large = magnitude >= np.uint64(1 << 53)
    low = (magnitude & np.uint64(0x7FF)) != 0
    reduced = np.where(large, (magnitude >> np.uint64(11)) | low, magnitude).astype(np.float64)
    value = np.where(large, reduced * 2048.0, reduced)
    return np.where(a < 0, -value, value) if a.dtype.kind == "i" else value


def _float64_from_wide(a: np.ndarray, mode: str) -> np.ndarray:
    """64-bit integers to float64 in a directed mode: the sum of the two 32-bit halves to nearest, moved by one ulp
    where its error has the wrong sign."""
    magnitude = _magnitude(a)
    high = (magnitude >> np.uint64(32)).astype(np.float64) * 2.0**32
    low = (magnitude & np.uint64(0xFFFFFFFF)).astype(np.float64)
    total = high + low
    error = low - (total - high)  # exact, because high is 0 or the larger of the two
    negative = a < 0 if a.dtype.kind == "i" else np.zeros(a.shape, bool)
    outward = np.full(a.shape, False) if mode == "rz" else negative == (mode == "rm")
    total = np.where((error < 0) & ~outward, np.nextafter(total, 0.0), total)
    total = np.where((error > 0) & outward, np.nextafter(total, np.inf), total)
    return np.where(negative, -total, total)


def _magnitude(a: np.ndarray) -> np.ndarray:
    bits = a.astype(np.uint64)
    return np.where(a < 0, np.uint64(0) - bits, bits) if a.dtype.kind == "i" else bits


# Floats


def _float_from_float(options: set[str], destination: str, source: str) -> Semantics:
    """Widen exactly, narrow by .rn, .rz, .rm or .rp, or round to an integral value by .rni, .rzi, .rmi or .rpi."""
    integral = _take(options, *_INTEGER_ROUNDING)
    mode = _take(options, *_FLOAT_ROUNDING)
    flush = _take_ftz(options, destination, source)
    _check_bf16(options, destination, source)
    relu = _take(options, "relu")
    saturate = _take(options, "sat", "satfinite")
    _nothing_left(options)
    narrowing = _FLOATS[destination] < _FLOATS[source] or {destination, source} == {"f16", "bf16"}
    if integral and (destination != source or mode):
        raise Unsupported(f".{integral} rounds to an integral value of the same type")
    if source == "bf16" and destination in ("f32", "f64"):
        mode = None  # a rounding is allowed but has no effect: the conversion is exact
    if narrowing and _FLOATS[source] == 16:
        mode = mode or "rn"
    if narrowing != (mode is not None):
        raise Unsupported(
            f"from .{source} to .{destination} a rounding .rn .rz .rm .rp is {'needed' if narrowing else 'not allowed'}"
        )
    limited = [f".{word}" for word in (relu, saturate) if word in ("relu", "satfinite")]
    if limited and not (narrowing and source == "f32" and mode in ("rn", "rz") and not flush and saturate != "sat"):
        raise Unsupported(f"{limited[0]} goes with f16 and bf16 from f32, with .rn or .rz, and without .ftz and .sat")

    plain = not (integral or flush or relu or saturate)
    if plain and (destination, source) in _DIRECT and mode in (None, "rn"):
        return Lanes(destination, source, _DIRECT[destination, source])

    def convert(a):
        value = _to_float64(a, source, flush)
        if integral:
            value = _INTEGER_ROUNDING[integral](value)
        if relu:
            value = _relu(value)
        result = _from_float64(value, destination, mode or "rn", saturate == "satfinite")
        if flush and destination == "f32":
            result = flushed(result)
        return _clamp01(result, destination) if saturate == "sat" else result

    return Lanes(destination, source, convert)


def _take_ftz(options: set[str], destination: str, source: str) -> bool:
    flush = _take(options, "ftz") is not None
    if flush and "f32" not in (destination, source):
        raise Unsupported(".ftz goes with .f32 only")
    return flush


def _to_float64(a, source: str, flush: bool = False) -> np.ndarray:
    a = np.asarray(a)
    if source == "bf16":
        return _f32_from_bf16(a).astype(np.float64)
    if flush and source == "f32":
        a = flushed(a)
    return a.astype(np.float64)


def _from_float64(value: np.ndarray, destination: str, mode: str, saturate: bool = False) -> np.ndarray:
    if destination == "f64":
        return value
    format = FORMATS[destination]
    if destination == "f32":
        return canonical(rounded(value, 24, -126, format.largest, mode).astype(np.float32))
    codes = encode(value, format, mode, saturate)
    return codes.view(np.float16) if destination == "f16" else codes


def _relu(value: np.ndarray) -> np.ndarray:
    """Negative values and -0 become +0; NaN stays."""
    return np.where(value <= 0, value.dtype.type(0), value)


def _clamp01(value: np.ndarray, type_: str) -> np.ndarray:
    """.sat of a float result: [0, 1], NaN becomes +0."""
    if type_ == "bf16":
        number = _f32_from_bf16(value)
        return np.where(number > 0, np.minimum(value, np.uint16(0x3F80)), np.uint16(0))
    zero, one = value.dtype.type(0), value.dtype.type(1)
    return np.where(value > zero, np.minimum(value, one), zero)


def _f32_from_bf16(a: np.ndarray) -> np.ndarray:
    return canonical((np.asarray(a).astype(np.uint32) << np.uint32(16)).view(np.float32))


def _bf16_from_f32(a: np.ndarray) -> np.ndarray:
    """f32 to bf16 codes, to nearest, ties to even."""
    bits = np.asarray(a, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    code = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(a)
    return np.where(nan, np.uint16(0x7FFF), code) if nan.any() else code


def _f16_from_f32(a: np.ndarray) -> np.ndarray:
    result = np.asarray(a, np.float32).astype(np.float16)
    nan = np.isnan(a)
    return np.where(nan, np.uint16(0x7FFF).view(np.float16), result) if nan.any() else result


@cache
def _f16_values() -> np.ndarray:
    """The f32 values of all f16 codes, (65536,). The look-up is several times faster than NumPy's conversion."""
    return canonical(FORMATS["f16"].values.astype(np.float32))


def _f32_from_f16(a: np.ndarray) -> np.ndarray:
    return _f16_values()[np.asarray(a).view(np.uint16)]


#: (destination, source): fast functions for the common conversions without flags.
_DIRECT = {
    ("bf16", "f32"): _bf16_from_f32,
    ("f16", "f32"): _f16_from_f32,
    ("f32", "bf16"): _f32_from_bf16,
    ("f32", "f16"): _f32_from_f16,
    ("f32", "f64"): lambda a: canonical(np.asarray(a).astype(np.float32)),
    ("f64", "f32"): lambda a: np.asarray(a).astype(np.float64),
}


def _tf32(options: set[str], source: str) -> Semantics:
    """cvt.{rn|rz|rna}{.satfinite}{.relu}.tf32.f32: 10 explicit mantissa bits; the low 13 bits of the register are
    zero."""
    mode = _take(options, "rn", "rz", "rna")
    saturate, relu = _take(options, "satfinite"), _take(options, "relu")
    _nothing_left(options)
    if source != "f32" or mode is None or (mode == "rna" and relu):
        raise Unsupported("expected cvt.rna{.satfinite}.tf32.f32 or cvt.{rn|rz}{.satfinite}{.relu}.tf32.f32")

    def convert(a):
        a = np.asarray(a, np.float32)
        bits = (_relu(a) if relu else a).view(np.uint32)
        if mode == "rna":
            bits = bits + np.uint32(0x1000)
        elif mode == "rn":
            bits = bits + (np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
        result = bits & np.uint32(0xFFFFE000)
        if saturate:
            infinite = (result & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
            result = np.where(infinite, (result & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), result)
        return np.where(np.isnan(a), CANONICAL_NAN_F32.view(np.uint32), result)

    return Lanes("tf32", "f32", convert)


def _pair_from_f32(options: set[str], destination: str) -> Semantics:
    """cvt.{rn|rz}{.relu}{.satfinite}.{f16x2|bf16x2}.f32 d, high, low."""
    mode = _take(options, "rn", "rz")
    relu, saturate = _take(options, "relu"), _take(options, "satfinite")
    _nothing_left(options)
    if mode is None:
        raise Unsupported(f"expected cvt.{{rn|rz}}{{.relu}}{{.satfinite}}.{destination}.f32")
    format = FORMATS[destination[:-2]]
    if mode == "rn" and not saturate:
        direct = _DIRECT[format.name, "f32"]

        def codes(a):
            a = np.asarray(a, np.float32)
            return direct(_relu(a) if relu else a).view(np.uint16).astype(np.uint32)

    else:

        def codes(a):
            value = np.asarray(a).astype(np.float64)
            return encode(_relu(value) if relu else value, format, mode, bool(saturate)).astype(np.uint32)

    return Lanes(destination, "f32, f32", lambda high, low: (codes(high) << np.uint32(16)) | codes(low))


# Formats narrower than 16 bits, two per register. Conversions are look-ups by a 16-bit code. An f32 is first rounded to
# odd in bf16: truncated, with the lowest bit set if the rest is not zero. bf16 has at least two bits more precision
# than the target, so the second rounding, in the table, gives the same result as a single rounding.


def _odd_bf16(a) -> np.ndarray:
    bits = np.asarray(a, np.float32).view(np.uint32)
    return ((bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)).astype(np.uint16)


@cache
def _narrow_codes(source: str, destination: str, relu: bool) -> np.ndarray:
    """The `destination` code of every 16-bit code of `source`, to nearest even, saturated; uint8 (65536,)."""
    values = FORMATS[source].values
    return encode(_relu(values) if relu else values, FORMATS[destination], "rn", saturate=True).astype(np.uint8)


@cache
def _scale_codes(mode: str, saturate: bool) -> np.ndarray:
    """The ue8m0 code of the magnitude of every bf16 code, rounded up (rp) or down (rz) to a power of two; uint8
    (65536,)."""
    values = np.abs(FORMATS["bf16"].values)
    significand, exponent = np.frexp(np.where(np.isfinite(values) & (values > 0), values, 1.0))
    exponent = exponent - (significand == 0.5) if mode == "rp" else exponent - 1
    codes = np.clip(exponent + 127, 0, 254 if saturate else 255)
    codes = np.where(values == 0, 0, codes)
    codes = np.where(np.isinf(values), 254 if saturate else 255, codes)
    return np.where(np.isnan(values), 255, codes).astype(np.uint8)


def _narrow_from(options: set[str], destination: str, source: str) -> Semantics:
    """cvt.rn.satfinite{.relu}.{e4m3x2|...}.{f32|f16x2|bf16x2} and cvt.{rp|rz}{.satfinite}.ue8m0x2.{f32|bf16x2}."""
    name = destination[:-2]
    if name == "ue8m0" and source in ("f32", "bf16x2"):
        mode, saturate = _take(options, "rp", "rz"), _take(options, "satfinite") is not None
        if mode is None or options:
            raise Unsupported("expected cvt.{rp|rz}{.satfinite}.ue8m0x2." + source)
        table = _scale_codes(mode, saturate)
    elif name in _NARROW:
        relu = _take(options, "relu") is not None
        if options != {"rn", "satfinite"}:
            raise Unsupported(f"expected cvt.rn.satfinite{{.relu}}.{destination}.{source}")
        table = _narrow_codes("f16" if source == "f16x2" else "bf16", name, relu)
    else:
        raise Unsupported(f"no conversion from .{source} to .{destination}")

    if name == "e2m1":

        def pack(high, low):
            return (table[high] << np.uint8(4)) | table[low]

    else:

        def pack(high, low):
            return (table[high].astype(np.uint16) << np.uint16(8)) | table[low]

    if source == "f32":
        return Lanes(destination, "f32, f32", lambda a, b: pack(_odd_bf16(a), _odd_bf16(b)))
    return Lanes(destination, source, lambda a: pack(a >> np.uint32(16), a & np.uint32(0xFFFF)))


@cache
def _pair_codes(narrow: str, destination: str, relu: bool, saturate: bool) -> np.ndarray:
    """The packed pair of `destination` for every packed code pair of `narrow`; uint32 (256,) or (65536,)."""
    format, into = FORMATS[narrow], FORMATS[destination]
    values = _relu(format.values) if relu else format.values
    codes = encode(values, into, "rn", saturate).astype(np.uint32)
    pairs = np.arange(1 << (8 if narrow == "e2m1" else 16))
    high, low = (pairs >> 4, pairs & 15) if narrow == "e2m1" else (pairs >> 8, pairs & 255)
    # The six-bit formats do not use the upper two bits of their byte.
    high, low = high & ((1 << format.bits) - 1), low & ((1 << format.bits) - 1)
    return (codes[high] << np.uint32(16)) | codes[low]


def _pair_from_narrow(options: set[str], destination: str, source: str) -> Semantics:
    """cvt.rn{.relu}.f16x2.{e4m3x2|...}, cvt.rn{.relu}{.satfinite}.bf16x2.{e4m3x2|...} and cvt.rn.bf16x2.ue8m0x2; exact.

    .satfinite makes infinities (of e5m2) the largest bf16.
    """
    name = source[:-2]
    wide = destination == "bf16x2" and source.endswith("x2") and name in _NARROW
    relu = _take(options, "relu") is not None
    saturate = wide and _take(options, "satfinite") is not None
    scale = destination == "bf16x2" and source == "ue8m0x2" and not relu
    number = destination == "f16x2" and source.endswith("x2") and name in _NARROW
    if options != {"rn"} or not (scale or number or wide):
        narrow = "{e4m3x2|e5m2x2|e3m2x2|e2m3x2|e2m1x2}"
        raise Unsupported(
            f"expected cvt.rn{{.relu}}.f16x2.{narrow}, cvt.rn{{.relu}}{{.satfinite}}.bf16x2.{narrow} or "
            "cvt.rn.bf16x2.ue8m0x2"
        )
    table = _pair_codes(name, destination[:-2], relu, saturate)
    return Lanes(destination, source, lambda a: table[a])
