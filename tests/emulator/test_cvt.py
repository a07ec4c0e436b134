"""cvt in isolation, against conversions computed in Python integers and fractions from PTX ISA 9.7.9.21."""

import math
import re
import struct
import subprocess
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import build
from ptxrt.emulator.instruction import Unsupported, resolve

# (exponent bits, mantissa bits, bias, meaning of the largest exponent)
FORMATS = {
    "f64": (11, 52, 1023, "ieee"),
    "f32": (8, 23, 127, "ieee"),
    "f16": (5, 10, 15, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "e5m2": (5, 2, 15, "ieee"),
    "e4m3": (4, 3, 7, "nan"),
    "e3m2": (3, 2, 3, "none"),
    "e2m3": (2, 3, 1, "none"),
    "e2m1": (2, 1, 1, "none"),
}


def power(exponent):
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def floor_log2(number):
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    return exponent if number >= power(exponent) else exponent - 1


@cache
def decode(name, code):
    """A Fraction, or math.inf, -math.inf, math.nan; zeros lose their sign."""
    exponent_bits, mantissa_bits, bias, specials = FORMATS[name]
    mantissa, field = code & ((1 << mantissa_bits) - 1), code >> mantissa_bits & ((1 << exponent_bits) - 1)
    negative = code >> (exponent_bits + mantissa_bits) & 1
    if field == (1 << exponent_bits) - 1:
        if specials == "ieee":
            return math.nan if mantissa else (-math.inf if negative else math.inf)
        if specials == "nan" and mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    significand = mantissa + ((1 << mantissa_bits) if field else 0)
    return (-1) ** negative * significand * power(max(field, 1) - bias - mantissa_bits)


def sign_of(name, code):
    return code >> sum(FORMATS[name][:2]) & 1


def largest_code(name):
    exponent_bits, mantissa_bits, _, specials = FORMATS[name]
    return (1 << (exponent_bits + mantissa_bits)) - {"none": 1, "nan": 2, "ieee": 1 + (1 << mantissa_bits)}[specials]


def round_to(number, mode):
    """Round a fraction to an integer: n nearest even, z to zero, m down, p up."""
    return {"n": round, "z": math.trunc, "m": math.floor, "p": math.ceil}[mode](number)


def encode(name, number, negative, mode, saturate=False):
    """The code of a number (Fraction, infinity, NaN); `negative` is the sign of a zero."""
    exponent_bits, mantissa_bits, bias, specials = FORMATS[name]
    sign = 1 << (exponent_bits + mantissa_bits)
    top = ((1 << exponent_bits) - 1) << mantissa_bits
    if isinstance(number, float) and math.isnan(number):
        return sign - 1  # canonical NaN, or the largest value if the format has no NaN
    largest = largest_code(name)
    signed = sign if negative else 0
    if isinstance(number, float):
        return signed | (largest if saturate or specials != "ieee" else top)
    exponent = max(floor_log2(abs(number)), 1 - bias) if number else 1 - bias
    steps = abs(round_to(number / power(exponent - mantissa_bits), mode))
    code = steps + ((exponent + bias - 1) << mantissa_bits)
    if code > largest:
        inward = mode == "z" or mode == ("p" if negative else "m")
        code = largest if saturate or specials != "ieee" or inward else top
    return signed | code


def f32_codes(extra=()):
    """f32 bit patterns: special values, all exponents, and the neighbors of every value and tie of the small
    formats."""
    generator = np.random.default_rng(1)
    codes = [
        0,
        1,
        2,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
        0x7FFFFFFF,
        0x3F800000,
        0x3F800001,
    ]
    numbers = {Fraction(step, 16) for step in range(0, 130)} | {Fraction(step) for step in range(400, 520, 4)}
    numbers |= {Fraction(step, 2**17) for step in range(1, 40)} | {
        Fraction(65504 + step) for step in (-16, 0, 8, 15, 16, 17)
    }
    numbers |= {Fraction(step * 1024) for step in range(50, 66)} | {Fraction(step, 2**25) for step in range(1, 20)}
    for number in numbers:
        bits = struct.unpack("<I", struct.pack("<f", float(number)))[0]
        codes += [bits, max(bits - 1, 0), bits + 1]
    codes += generator.integers(0, 1 << 31, 200).tolist()
    codes = np.array(sorted(set(codes)) + list(extra), np.uint32)
    codes = np.concatenate([codes, codes | np.uint32(0x80000000)])
    return np.resize(codes, -(-len(codes) // 32) * 32)


def convert(execute, opcode, source, values, destination):
    types = (
        {"a": (source, values)}
        if not isinstance(values, tuple)
        else dict(zip("ab", ((source, each) for each in values)))
    )
    operands = ", ".join(f"%{name}" for name in types)
    return execute(f"cvt.{opcode} %d, {operands};", types, {"d": destination})["d"]


def hexes(array):
    return [hex(item) for item in array.tolist()]


# Integers


INTEGERS = [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "us"]


def bounds(name):
    bits = int(name[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if name[0] == "s" else (0, (1 << bits) - 1)


def wrap(number, name):
    low, high = bounds(name)
    return (number - low) % (high - low + 1) + low


def register_of(name):
    return f"b{max(int(name[1:]), 16)}"


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("destination", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(execute, source, destination, saturate):
    low, high = bounds(source)
    if saturate and bounds(destination)[0] <= low and high <= bounds(destination)[1]:
        assert not resolvable(f"cvt.sat.{destination}.{source}")  # nothing to clamp
        return
    numbers = sorted(
        {
            wrap(number, source)
            for bits in (7, 8, 15, 16, 31, 32, 63, 64)
            for number in ((1 << bits) - 1, 1 << bits, -(1 << bits))
        }
        | {0, 5, low, high, wrap(-5, source)}
    )
    numbers = (numbers * 32)[:32]
    width = int(register_of(source)[1:])
    values = np.array([number % (1 << width) for number in numbers], f"u{width // 8}")
    opcode = ("sat." if saturate else "") + f"{destination}.{source}"
    found = convert(execute, opcode, register_of(source), values, register_of(destination))
    into = bounds(destination)
    expected = [min(max(number, into[0]), into[1]) if saturate else wrap(number, destination) for number in numbers]
    assert found.tolist() == [
        number % (1 << int(register_of(destination)[1:])) for number in expected
    ]  # sign- or zero-extended to the register


@pytest.mark.parametrize("mode", ["n", "z", "m", "p"])
@pytest.mark.parametrize("destination", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_float_to_integer(execute, source, destination, mode):
    if source == "bf16" and destination in ("s8", "u8"):
        assert not resolvable(f"cvt.r{mode}i.{destination}.bf16")
        return
    low, high = bounds(destination)
    numbers = [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.5,
        3.5,
        100.5,
        127.5,
        128.0,
        255.0,
        256.0,
        32767.5,
        65535.0,
        2.0**31,
        2.0**32,
        2.0**63,
        2.0**64,
        1e30,
        math.inf,
    ]
    floats = [sign * number for number in numbers for sign in (1.0, -1.0)] + [math.nan, 2.0**31 - 1, 2.0**53 + 2]
    exact = [Fraction(number) if math.isfinite(number) else number for number in floats]
    codes = [encode(source, number, math.copysign(1, original) < 0, "n") for number, original in zip(exact, floats)]
    codes = (codes * 2)[:64]
    width = max(FORMATS[source][0] + FORMATS[source][1] + 1, 16)
    found = convert(
        execute,
        f"r{mode}i.{destination}.{source}",
        f"b{width}",
        np.array(codes, f"u{width // 8}"),
        register_of(destination),
    )
    for code, result in zip(codes, found.tolist()):
        number = decode(source, code)
        if isinstance(number, float) and math.isnan(number):
            wide = source == "f64" or destination[1:] == "64"
            expected = 1 << (int(destination[1:]) - 1) if wide else 0
            expected = wrap(expected, destination)
        elif isinstance(number, float):
            expected = high if number > 0 else low
        else:
            expected = min(max(round_to(number, mode), low), high)
        assert result == expected % (1 << int(register_of(destination)[1:])), number


def test_flushed_subnormals_round_to_zero(execute):
    """Without .ftz the smallest subnormal rounds up to 1."""
    values = np.full(32, 1, np.uint32)
    assert (convert(execute, "rpi.s32.f32", "b32", values, "b32") == 1).all()
    assert (convert(execute, "rpi.ftz.s32.f32", "b32", values, "b32") == 0).all()


@pytest.mark.parametrize("mode", ["n", "z", "m", "p"])
@pytest.mark.parametrize("destination", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("source", ["u8", "s8", "s16", "u32", "s32", "u64", "s64"])
def test_integer_to_float(execute, source, destination, mode):
    if destination == "bf16" and source in ("s8", "u8"):
        assert not resolvable(f"cvt.r{mode}.bf16.{source}")
        return
    low, high = bounds(source)
    numbers = {
        0,
        1,
        low,
        high,
        high - 1,
        low + 1,
        65519,
        65520,
        65505,
        257,
        258,
        2049,
        2051,
        4097,
        16777217,
        16777219,
        (1 << 24) + 3,
        (1 << 53) + 1,
        (1 << 53) + 3,
    }
    numbers |= {
        (1 << 63) + (1 << 10),
        (1 << 63) + (1 << 10) + 1,
        (1 << 62) + 1,
        (1 << 40) + 1,
        (1 << 62) + (1 << 38) + 1,
        -((1 << 62) + (1 << 38)),
        -16777217,
        -2049,
    }
    numbers = sorted({wrap(number, source) for number in numbers})
    numbers = (numbers * 32)[:32]
    width = int(register_of(source)[1:])
    values = np.array([number % (1 << width) for number in numbers], f"u{width // 8}")
    bits = sum(FORMATS[destination][:2]) + 1
    found = convert(execute, f"r{mode}.{destination}.{source}", register_of(source), values, f"b{bits}")
    assert hexes(found) == [hex(encode(destination, Fraction(number), number < 0, mode)) for number in numbers]


# Floats


@pytest.mark.parametrize("mode", ["n", "z", "m", "p"])
@pytest.mark.parametrize("destination", ["f16", "bf16"])
def test_f32_to_half(execute, destination, mode):
    codes = f32_codes()
    found = convert(execute, f"r{mode}.{destination}.f32", "b32", codes, "b16")
    assert hexes(found) == [
        hex(encode(destination, decode("f32", code), sign_of("f32", code), mode)) for code in codes.tolist()
    ]


@pytest.mark.parametrize("destination", ["f16", "bf16"])
def test_relu_and_satfinite_of_half(execute, destination):
    codes = f32_codes()
    relu = convert(execute, f"rn.relu.{destination}.f32", "b32", codes, "b16")
    saturated = convert(execute, f"rz.relu.satfinite.{destination}.f32", "b32", codes, "b16")
    for code, first, second in zip(codes.tolist(), relu.tolist(), saturated.tolist()):
        number = decode("f32", code)
        number = Fraction(0) if number <= 0 else number  # NaN compares false and stays
        assert first == encode(destination, number, False, "n")
        assert second == encode(destination, number, False, "z", saturate=True)


@pytest.mark.parametrize("mode", ["", "n", "z", "m", "p"])
@pytest.mark.parametrize("destination, source", [("f16", "bf16"), ("bf16", "f16")])
def test_between_the_halves(execute, destination, source, mode):
    """Without a rounding modifier the result is that of .rn: ptxas emits the same F2F for both."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    found = convert(execute, (f"r{mode}." if mode else "") + f"{destination}.{source}", "b16", codes, "b16")
    for code in [
        *range(0, 1 << 16, 37),
        0x477F,
        0x4780,
        0x3F81,
        0x7C00,
        0xFC00,
        0x7F80,
        0xFF80,
        0x7FC0,
        1,
        0x8001,
        0x8000,
    ]:
        assert found[code] == encode(destination, decode(source, code), sign_of(source, code), mode or "n"), hex(code)


@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_half_to_wider(execute, source):
    codes = np.arange(1 << 16, dtype=np.uint16)
    found = convert(execute, f"f32.{source}", "b16", codes, "b32")
    wide = convert(execute, f"f64.{source}", "b16", codes[: 1 << 15], "b64")
    for code in [*range(0, 1 << 16, 37), 0x7C00, 0xFC00, 0x7C01, 0x7F80, 0xFF80, 0x7F81, 0x8000, 1, 0x8001]:
        number, sign = decode(source, code), sign_of(source, code)
        assert found[code] == encode("f32", number, sign, "n")
        if code < 1 << 15 and number == number:
            assert wide[code] == encode("f64", number, sign, "n")


@pytest.mark.parametrize("mode", ["n", "z", "m", "p"])
def test_f64_to_narrower(execute, mode):
    generator = np.random.default_rng(3)
    numbers = [
        1 + 2**-24,
        1 + 2**-24 + 2**-52,
        1 + 3 * 2**-24,
        1 + 2**-11,
        1 + 2**-11 + 2**-40,
        2**-149,
        2**-150,
        1.5 * 2**-150,
        3.5e38,
        65519.99,
        65520.0,
        0.0,
        -0.0,
        math.inf,
        math.nan,
        2**-25,
    ]
    values = np.array(numbers + [-number for number in numbers] + generator.standard_normal(96).tolist())
    codes = values.view(np.uint64)
    for destination, register in (("f32", "b32"), ("f16", "b16"), ("bf16", "b16")):
        found = convert(execute, f"r{mode}.{destination}.f64", "b64", codes, register)
        assert hexes(found) == [
            hex(encode(destination, decode("f64", code), sign_of("f64", code), mode)) for code in codes.tolist()
        ]


def test_f32_to_f64(execute):
    codes = f32_codes()
    codes = codes[~np.isnan(codes.view(np.float32))]
    codes = np.resize(codes, -(-len(codes) // 32) * 32)
    found = convert(execute, "f64.f32", "b32", codes, "b64")
    assert hexes(found) == [
        hex(encode("f64", decode("f32", code), sign_of("f32", code), "n")) for code in codes.tolist()
    ]


def test_flush_saturate_and_integral_rounding(execute):
    numbers = np.array(
        [
            -0.0,
            0.4,
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            2.0**-140,
            -(2.0**-140),
            1.0,
            3.0,
            np.inf,
            -np.inf,
            np.nan,
            8388607.5,
            1e30,
        ],
        np.float32,
    )
    numbers = np.tile(numbers, 2)
    bits = numbers.view(np.uint32)

    def run(opcode):
        return convert(execute, opcode, "b32", bits, "b32").view(np.float32)[:16]

    def same(found, expected):
        assert found.view(np.uint32).tolist() == [
            0x7FFFFFFF if number != number else int(np.float32(number).view(np.uint32)) for number in expected
        ]

    same(run("sat.f32.f32"), [0, 0.4, 0.5, 1, 1, 0, 0, 2.0**-140, 0, 1, 1, 1, 0, 0, 1, 1])
    same(
        run("sat.ftz.f32.f32") if resolvable("cvt.sat.ftz.f32.f32") else run("ftz.sat.f32.f32"),
        [0, 0.4, 0.5, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1],
    )
    same(
        run("ftz.f32.f32"),
        [-0.0, 0.4, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, 1, 3, np.inf, -np.inf, np.nan, 8388607.5, 1e30],
    )
    same(run("rni.f32.f32"), [-0.0, 0, 0, 2, 2, -0.0, -2, 0, -0.0, 1, 3, np.inf, -np.inf, np.nan, 8388608, 1e30])
    same(run("rmi.f32.f32"), [-0.0, 0, 0, 1, 2, -1, -2, 0, -1, 1, 3, np.inf, -np.inf, np.nan, 8388607, 1e30])
    same(run("rpi.f32.f32"), [-0.0, 1, 1, 2, 3, -0.0, -1, 1, -0.0, 1, 3, np.inf, -np.inf, np.nan, 8388608, 1e30])
    same(run("rpi.ftz.f32.f32"), [-0.0, 1, 1, 2, 3, -0.0, -1, 0, -0.0, 1, 3, np.inf, -np.inf, np.nan, 8388608, 1e30])
    same(run("rzi.f32.f32"), [-0.0, 0, 0, 1, 2, -0.0, -1, 0, -0.0, 1, 3, np.inf, -np.inf, np.nan, 8388607, 1e30])


def resolvable(opcode):
    try:
        resolve(opcode)
    except Unsupported:
        return False
    return True


def test_tf32_keeps_ten_mantissa_bits(execute):
    cases = [  # input, rn, rz, rna
        (0x3F800000, 0x3F800000, 0x3F800000, 0x3F800000),
        (0x3F800FFF, 0x3F800000, 0x3F800000, 0x3F800000),
        (0x3F801000, 0x3F800000, 0x3F800000, 0x3F802000),  # a tie: to even, down, away from zero
        (0x3F801001, 0x3F802000, 0x3F800000, 0x3F802000),
        (0x3F803000, 0x3F804000, 0x3F802000, 0x3F804000),
        (0xBF803000, 0xBF804000, 0xBF802000, 0xBF804000),
        (0x7F7FFFFF, 0x7F800000, 0x7F7FE000, 0x7F800000),
        (0x7F800000, 0x7F800000, 0x7F800000, 0x7F800000),
        (0xFFC12345, 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF),
        (0x00001001, 0x00002000, 0x00000000, 0x00002000),
    ]
    values = np.resize(np.array([case[0] for case in cases], np.uint32), 32)
    for column, mode in ((1, "rn"), (2, "rz"), (3, "rna")):
        found = convert(execute, f"{mode}.tf32.f32", "b32", values, "b32")
        assert hexes(found[: len(cases)]) == [hex(case[column]) for case in cases]


# Pairs: the first source in the high half


@pytest.mark.parametrize("destination", ["f16", "bf16"])
def test_pair_of_halves(execute, destination):
    codes = f32_codes()
    found = convert(execute, f"rn.{destination}x2.f32", "b32", (codes, codes[::-1].copy()), "b32")
    halves = [encode(destination, decode("f32", code), sign_of("f32", code), "n") for code in codes.tolist()]
    assert hexes(found) == [hex(high << 16 | low) for high, low in zip(halves, reversed(halves))]


def pair_register(name):
    return ("b8", 4) if name == "e2m1" else ("b16", 8)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_narrow_from_f32(execute, name, relu):
    codes = f32_codes()
    register, width = pair_register(name)
    found = convert(
        execute, f"rn.satfinite{'.relu' if relu else ''}.{name}x2.f32", "b32", (codes, codes[::-1].copy()), register
    )
    expected = []
    for code in codes.tolist():
        number, negative = decode("f32", code), sign_of("f32", code)
        if relu and number <= 0:
            number, negative = Fraction(0), 0
        expected.append(encode(name, number, negative, "n", saturate=True))
    assert hexes(found) == [hex(high << width | low) for high, low in zip(expected, reversed(expected))]


def test_e2m1_by_hand(execute):
    """Ties and range limits written out: value -> code."""
    cases = [(0.0, 0), (-0.0, 8), (0.25, 0), (0.26, 1), (-0.2, 8), (0.5, 1), (0.75, 2), (1.0, 2), (1.25, 2), (1.3, 3), (1.5, 3), (1.75, 4), (2.0, 4),
             (2.5, 4), (2.6, 5), (3.0, 5), (3.5, 6), (4.0, 6), (5.0, 6), (5.1, 7), (6.0, 7), (100.0, 7), (-100.0, 15), (math.inf, 7), (-math.inf, 15),
             (-1.0, 10), (math.nan, 7)]  # fmt: skip
    values = np.resize(np.array([number for number, _ in cases], np.float32), 32).view(np.uint32)
    codes = [code for _, code in cases]
    found = convert(execute, "rn.satfinite.e2m1x2.f32", "b32", (values, np.zeros(32, np.uint32)), "b8")
    assert (found >> 4).tolist()[: len(cases)] == codes
    found = convert(execute, "rn.satfinite.e2m1x2.f32", "b32", (np.zeros(32, np.uint32), values), "b8")
    assert found.tolist()[: len(cases)] == codes


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_narrow_from_pairs_of_16_bits(execute, name, source, relu):
    codes = np.arange(1 << 16, dtype=np.uint32)
    packed = codes | (codes[::-1] << np.uint32(16))
    opcode = f"rn.satfinite{'.relu' if relu else ''}.{name}x2.{source}x2"
    found = convert(execute, opcode, "b32", packed, pair_register(name)[0])
    for index in [*range(0, 1 << 16, 29), 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1]:
        expected = []
        for code in ((1 << 16) - 1 - index, index):
            number, negative = decode(source, code), sign_of(source, code)
            if relu and number <= 0:
                number, negative = Fraction(0), 0
            expected.append(encode(name, number, negative, "n", saturate=True))
        assert found[index] == expected[0] << pair_register(name)[1] | expected[1], hex(index)


@pytest.mark.parametrize("wide, saturate", [("f16", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_pair_of_16_bits_from_narrow(execute, name, wide, saturate):
    register, width = pair_register(name)
    mask = (1 << (sum(FORMATS[name][:2]) + 1)) - 1
    pairs = np.arange(1 << (2 * width), dtype=np.uint16 if width == 8 else np.uint8)
    for relu in (False, True):
        opcode = f"rn{'.relu' if relu else ''}{'.satfinite' if saturate else ''}.{wide}x2.{name}x2"
        found = convert(execute, opcode, register, pairs, "b32")
        for index in range(0, len(pairs), 1 if width == 4 else 97):
            halves = []
            for code in (index >> width & mask, index & ((1 << width) - 1) & mask):
                number, negative = decode(name, code), sign_of(name, code)
                if relu and number <= 0:
                    number, negative = Fraction(0), 0
                halves.append(encode(wide, number, negative, "n", saturate=saturate))
            assert found[index] == halves[0] << 16 | halves[1], hex(index)


def scale_code(number, mode, saturate):
    """ue8m0 of a magnitude: 2^(code - 127), rounded up or down to a power of two."""
    if isinstance(number, float):
        return 0xFF if math.isnan(number) else (0xFE if saturate else 0xFF)
    number = abs(number)
    if number == 0:
        return 0
    exponent = floor_log2(number)
    if mode == "rp" and number > power(exponent):
        exponent += 1
    return min(max(exponent + 127, 0), 0xFE if saturate else 0xFF)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", ["rp", "rz"])
def test_scales_from_f32_and_bf16(execute, mode, saturate):
    codes = f32_codes([0x3F800001, 0x3FFFFFFF, 0x40000000, 0x7F000000, 0x7F000001, 0x00400000, 0x00400001, 0x003FFFFF])
    opcode = f"{mode}{'.satfinite' if saturate else ''}.ue8m0x2"
    found = convert(execute, f"{opcode}.f32", "b32", (codes, codes[::-1].copy()), "b16")
    expected = [scale_code(decode("f32", code), mode, saturate) for code in codes.tolist()]
    assert hexes(found) == [hex(high << 8 | low) for high, low in zip(expected, reversed(expected))]
    halves = codes >> np.uint32(16)
    found = convert(execute, f"{opcode}.bf16x2", "b32", halves | halves[::-1] << np.uint32(16), "b16")
    expected = [scale_code(decode("bf16", code), mode, saturate) for code in halves.tolist()]
    assert hexes(found) == [hex(high << 8 | low) for high, low in zip(reversed(expected), expected)]


def test_scales_by_hand(execute):
    numbers = np.resize(
        np.array(
            [0.0, 1.0, 1.0000001, 1.99, 2.0, -3.0, 2.0**127, 3e38, 2.0**-127, 2.0**-149, np.inf, np.nan], np.float32
        ),
        32,
    )
    for opcode, expected in {
        "rp.satfinite.ue8m0x2.f32": [0, 0x7F, 0x80, 0x80, 0x80, 0x81, 0xFE, 0xFE, 0, 0, 0xFE, 0xFF],
        "rz.satfinite.ue8m0x2.f32": [0, 0x7F, 0x7F, 0x7F, 0x80, 0x80, 0xFE, 0xFE, 0, 0, 0xFE, 0xFF],
        "rp.ue8m0x2.f32": [0, 0x7F, 0x80, 0x80, 0x80, 0x81, 0xFE, 0xFF, 0, 0, 0xFF, 0xFF],
    }.items():
        found = convert(execute, opcode, "b32", (numbers.view(np.uint32), np.zeros(32, np.uint32)), "b16")
        assert hexes(found[:12] >> 8) == [hex(code) for code in expected]


def test_bf16_pair_from_scales(execute):
    pairs = np.arange(1 << 16, dtype=np.uint16)
    found = convert(execute, "rn.bf16x2.ue8m0x2", "b16", pairs, "b32")

    def half(code):
        return 0x7FFF if code == 0xFF else encode("bf16", Fraction(2) ** (code - 127), 0, "n")

    for index in range(0, 1 << 16, 31):
        assert found[index] == half(index >> 8) << 16 | half(index & 0xFF)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, (1 << 32) - 1), min_size=32, max_size=32),
    st.sampled_from(["e2m1", "e4m3", "e5m2", "e2m3", "e3m2"]),
)
def test_any_f32_to_narrow(execute, codes, name):
    register, width = pair_register(name)
    found = convert(
        execute, f"rn.satfinite.{name}x2.f32", "b32", (np.zeros(32, np.uint32), np.array(codes, np.uint32)), register
    )
    assert hexes(found) == [
        hex(encode(name, decode("f32", code), sign_of("f32", code), "n", saturate=True)) for code in codes
    ]


@pytest.mark.parametrize(
    "opcode, reason",
    [
        ("cvt.s32.f32", "needs .rni"),
        ("cvt.f32.s32", "needs .rn"),
        ("cvt.f16.f32", "is needed"),
        ("cvt.rn.f32.f16", "not allowed"),
        ("cvt.rn.e2m1x2.f32", "satfinite"),
        ("cvt.rz.satfinite.e4m3x2.f32", "expected cvt.rn.satfinite"),
        ("cvt.rn.satfinite.ue8m0x2.f32", "expected cvt.{rp"),
        ("cvt.rn.satfinite.f16x2.e4m3x2", "expected"),
        ("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", "expected"),
        ("cvt.rn.e4m3x2.bf16x2", "expected cvt.rn.satfinite"),
        ("cvt.rs.satfinite.e2m1x4.f32", "no conversion"),
        ("cvt.ftz.f64.f16", "ftz"),
        ("cvt.sat.u32.u16", "every .u16 fits .u32"),
        ("cvt.rni.sat.s32.bf16", ".sat does not go with bf16"),
        ("cvt.rn.bf16.u8", "integers of 8 bits"),
        ("cvt.rm.relu.f16.f32", "with .rn or .rz"),
        ("cvt.rn.ftz.satfinite.bf16.f32", "without .ftz"),
    ],
)
def test_other_conversions_are_refused_by_name(opcode, reason):
    with pytest.raises(Unsupported, match=re.escape(opcode) + " is not implemented.*" + re.escape(reason)):
        resolve(opcode)


NARROW = ("e4m3x2", "e5m2x2", "e3m2x2", "e2m3x2", "e2m1x2", "ue8m0x2")
#: The register type of each type that cvt converts.
REGISTERS = {
    **{name: "h" if name[1:] == "16" else "l" if name[1:] == "64" else "r" for name in INTEGERS},
    **{"f16": "h", "bf16": "h", "f32": "r", "f64": "l", "tf32": "r", "f16x2": "r", "bf16x2": "r"},
    **{name: "b" if name == "e2m1x2" else "h" for name in NARROW},
}


#: What ptxas 13.4 also assembles (.version 9.4, sm_120a).
LATER = {
    f"cvt.rn.satfinite{relu}.{name}.{source}"
    for name in NARROW[:-1]
    for source in (("bf16x2", "f16x2") if name in ("e3m2x2", "e2m3x2") else ("bf16x2",))
    for relu in ("", ".relu")
} | {
    f"cvt.rn{saturate}{relu}.bf16x2.{name}"
    for name in NARROW[:-1]
    for saturate in ("", ".satfinite")
    for relu in ("", ".relu")
}


def test_every_form_that_ptxas_assembles_and_no_other(tmp_path):
    try:
        ptxas = build.find_toolchain().ptxas
    except build.ToolchainMissing as missing:
        pytest.skip(str(missing))
    forms = {}
    for destination, source in product(REGISTERS, repeat=2):
        for flags in product(
            ("", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"),
            ("", "ftz"),
            ("", "sat", "satfinite"),
            ("", "relu"),
        ):
            opcode = ".".join(["cvt", *filter(None, flags), destination, source])
            pair = source == "f32" and (destination in NARROW or destination.endswith("16x2"))
            forms[opcode] = f"{opcode} %{REGISTERS[destination]}1, %{REGISTERS[source]}2{', %r3' if pair else ''};"
    head = [".version 9.0", ".target sm_120a", ".address_size 64", ".visible .entry k()", "{"]
    head += [f".reg .b{bits} %{name}<4>;" for name, bits in (("b", 8), ("h", 16), ("r", 32), ("l", 64))]
    text = tmp_path / "cvt.ptx"
    text.write_text("\n".join([*head, *forms.values(), "ret;", "}"]))
    done = subprocess.run(
        [ptxas, "-arch", "sm_120a", "-o", tmp_path / "cvt.cubin", text], capture_output=True, text=True
    )
    refused = {int(line) for line in re.findall(r"line (\d+); error", done.stdout + done.stderr)}
    assembled = {opcode for line, opcode in enumerate(forms, len(head) + 1) if line not in refused}
    assert len(assembled) == 867, "ptxas 13.0 assembles 867 of these forms"
    assert {opcode for opcode in forms if resolvable(opcode)} == assembled | LATER and not assembled & LATER
