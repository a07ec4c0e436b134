"""Approximate functions in isolation: special values by the tables of PTX ISA 9.7.3, ordinary ones within one
rounding."""

import math
import struct

import numpy as np
import pytest

from ptxrt.emulator.instruction import Unsupported, resolve

INF, NAN = math.inf, math.nan
TINY = 2.0**-140  # subnormal in f32
REFERENCES = {
    "ex2": lambda a: 2.0**a,
    "lg2": math.log2,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "rcp": lambda a: 1 / a,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1 / math.sqrt(a),
}

# Special operand -> result, without and with .ftz. Negative zero, which equals zero as a key, has its own table below.
SPECIALS = {
    "ex2": {
        -INF: 0.0,
        INF: INF,
        NAN: NAN,
        0.0: 1.0,
        TINY: 1.0,
        -TINY: 1.0,
        -1.0: 0.5,
        128.0: INF,
        -151.0: 0.0,
        3.0: 8.0,
    },
    "lg2": {-INF: NAN, INF: INF, NAN: NAN, 0.0: -INF, TINY: -140.0, -TINY: NAN, 1.0: 0.0, -1.0: NAN, 8.0: 3.0},
    "sin": {-INF: NAN, INF: NAN, NAN: NAN, 0.0: 0.0, TINY: TINY, -TINY: -TINY},
    "cos": {-INF: NAN, INF: NAN, NAN: NAN, 0.0: 1.0, TINY: 1.0},
    "rcp": {-INF: -0.0, INF: 0.0, NAN: NAN, 0.0: INF, TINY: INF, -TINY: -INF, 4.0: 0.25, 2.0**127: 2.0**-127},
    "sqrt": {-INF: NAN, INF: INF, NAN: NAN, 0.0: 0.0, TINY: 2.0**-70, -TINY: NAN, 9.0: 3.0, -1.0: NAN},
    "rsqrt": {-INF: NAN, INF: 0.0, NAN: NAN, 0.0: INF, TINY: 2.0**70, -TINY: NAN, 0.25: 2.0, -1.0: NAN},
}
FLUSHED = {
    "ex2": {-140.0: 0.0},
    "lg2": {TINY: -INF, -TINY: -INF},
    "sin": {TINY: 0.0, -TINY: -0.0},
    "cos": {},
    "rcp": {2.0**127: 0.0, -(2.0**127): -0.0},
    "sqrt": {TINY: 0.0, -TINY: -0.0},
    "rsqrt": {TINY: INF, -TINY: -INF},
}


def apply(execute, opcode, numbers, register="f32"):
    values = np.resize(np.asarray(numbers, np.float32) if register == "f32" else numbers, -(-len(numbers) // 32) * 32)
    return execute(f"{opcode} %d, %a;", {"a": (register, values)}, {"d": register})["d"][: len(numbers)]


def bits(numbers):
    return [0x7FFFFFFF if number != number else int(np.float32(number).view(np.uint32)) for number in numbers]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", SPECIALS)
def test_special_values(execute, name, flush):
    expected = SPECIALS[name] | (FLUSHED[name] if flush else {})
    if flush:
        expected = {
            a: result for a, result in expected.items() if abs(result) >= 2.0**-126 or result == 0 or result != result
        }
    found = apply(execute, f"{name}.approx{'.ftz' if flush else ''}.f32", list(expected))
    assert found.view(np.uint32).tolist() == bits(expected.values())


NEGATIVE_ZERO = {
    "ex2": 1.0,
    "lg2": -INF,
    "sin": -0.0,
    "cos": 1.0,
    "rcp": -INF,
    "sqrt": -0.0,
    "rsqrt": -INF,
    "tanh": -0.0,
}


@pytest.mark.parametrize("name", NEGATIVE_ZERO)
def test_negative_zero(execute, name):
    assert apply(execute, f"{name}.approx.f32", [-0.0]).view(np.uint32).tolist() == bits([NEGATIVE_ZERO[name]])


@pytest.mark.parametrize("name", [*SPECIALS, "tanh"])
def test_ordinary_values_are_rounded_once(execute, name):
    """Python's libm is within an ulp of float64: its result rounded to f32 is correctly rounded except for rare
    ties."""
    generator = np.random.default_rng(7)
    numbers = np.float32(generator.standard_normal(256) * 4)
    if name in ("lg2", "sqrt", "rsqrt"):
        numbers = abs(numbers)
    if name == "ex2":
        numbers = numbers * np.float32(9)
    found = apply(execute, f"{name}.approx.f32", numbers)
    expected = [np.float32(REFERENCES[name](float(number))) for number in numbers]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["ex2", "tanh"])
@pytest.mark.parametrize("pair", [False, True])
def test_f16(execute, name, pair):
    codes = np.arange(1 << 16, dtype=np.uint16)
    if pair:
        words = codes.astype(np.uint32) | codes[::-1].astype(np.uint32) << np.uint32(16)
        words = apply(execute, f"{name}.approx.f16x2", words, "b32")
        found = (words & np.uint32(0xFFFF)).astype(np.uint16)
        assert (words >> np.uint32(16) == found[::-1]).all()
    else:
        found = apply(execute, f"{name}.approx.f16", codes, "b16")
    for code in range(0, 1 << 16, 17):
        number = float(codes[code : code + 1].view(np.float16)[0])
        if number != number:
            assert found[code] == 0x7FFF
            continue
        result = (math.inf if number > 16 else 2.0**number) if name == "ex2" else math.tanh(number)
        with np.errstate(over="ignore"):
            assert found[code] == np.float16(result).view(np.uint16), number


@pytest.mark.parametrize("opcode", ["ex2.approx.ftz", "tanh.approx"])
def test_bf16(execute, opcode):
    codes = np.arange(1 << 16, dtype=np.uint16)
    found = apply(execute, f"{opcode}.bf16", codes, "b16")
    words = apply(execute, f"{opcode}.bf16x2", codes.astype(np.uint32) << np.uint32(16) | codes, "b32")
    assert (words == found.astype(np.uint32) << np.uint32(16) | found).all()

    def half(number):
        return int(np.float32(number).view(np.uint32)) >> 16

    cases = {
        0x0000: 1.0,
        0x3F80: 2.0,
        0xBF80: 0.5,
        0x7F80: INF,
        0xFF80: 0.0,
        0x0001: 1.0,
        half(-127.0): 0.0,
        half(-126.0): 2.0**-126,
        half(10.0): 1024.0,
    }
    if opcode.startswith("tanh"):
        cases = {0x0000: 0.0, 0x8000: -0.0, 0x7F80: 1.0, 0xFF80: -1.0, half(20.0): 1.0, 0x0001: 2.0**-133}
    assert {code: found[code] for code in cases} == {code: half(number) for code, number in cases.items()}
    assert found[0x7FC1] == found[0xFF81] == 0x7FFF


DOUBLES = [1.0, -3.0, 0.1, 7e100, -2e-300, 1.5e308, INF, -INF, 0.0, -0.0, NAN, 5e-324, -5e-324]


def execute_doubles(execute, opcode, numbers):
    values = np.resize(np.float64(numbers), 32)
    return execute(f"{opcode} %d, %a;", {"a": ("f64", values)}, {"d": "f64"})["d"][: len(numbers)].view(np.float64)


def first_guess(number, function):
    """The function of a double with its lower 32 bits cleared, rounded to the nearest double whose lower 32 bits are
    0."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    (number,) = struct.unpack("<d", struct.pack("<Q", bits & 0xFFFF_FFFF_0000_0000))
    (bits,) = struct.unpack("<Q", struct.pack("<d", function(number)))
    (result,) = struct.unpack("<d", struct.pack("<Q", bits + (1 << 31) & 0xFFFF_FFFF_0000_0000))
    return result if abs(result) >= 2.0**-1022 else math.copysign(0.0, result)


def test_first_guesses_in_double_precision(execute):
    """PTX ISA 9.7.3: rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 with their tables of special values."""
    want = [first_guess(number, lambda a: 1 / a) for number in DOUBLES[:6]] + [0.0, -0.0, INF, -INF, NAN, INF, -INF]
    found = execute_doubles(execute, "rcp.approx.ftz.f64", DOUBLES)
    np.testing.assert_array_equal(found, want)
    assert (np.signbit(found) == np.signbit(want))[~np.isnan(want)].all()

    root = [first_guess(number, lambda a: 1 / math.sqrt(a)) if number > 0 else NAN for number in DOUBLES[:6]]
    found = execute_doubles(execute, "rsqrt.approx.ftz.f64", DOUBLES)
    np.testing.assert_array_equal(found, root + [0.0, NAN, INF, -INF, NAN, INF, -INF])


def test_double_root(execute):
    want = [1 / math.sqrt(number) if number > 0 else NAN for number in DOUBLES[:6]] + [
        0.0,
        NAN,
        INF,
        -INF,
        NAN,
        1 / math.sqrt(5e-324),
        NAN,
    ]
    np.testing.assert_allclose(execute_doubles(execute, "rsqrt.approx.f64", DOUBLES), want, rtol=2**-52)


def divide(execute, opcode, a, b):
    a, b = (np.resize(np.float32(each), 32) for each in (a, b))
    return execute(f"{opcode} %d, %a, %b;", {"a": ("f32", a), "b": ("f32", b)}, {"d": "f32"})["d"]


def test_division(execute):
    a = [1.0, -1.0, 0.0, 1.0, INF, INF, NAN, TINY, 7.0, 3e38, 1.0, -1.0, INF, 2.0**-100]
    b = [3.0, 0.0, 0.0, INF, 2.0, INF, 1.0, 2.0, 2.0, 0.5, 3e38, 3e38, 3e38, 2.0**40]
    full = [
        np.float32(1 / 3),
        -INF,
        NAN,
        0.0,
        INF,
        NAN,
        NAN,
        TINY / 2,
        3.5,
        INF,
        np.float32(1) / np.float32(3e38),
        -np.float32(1) / np.float32(3e38),
        INF,
        TINY,
    ]
    approx = full[:10] + [0.0, -0.0, NAN, TINY]  # the reciprocal of values above 2^126 is flushed to zero
    count = len(a)
    assert divide(execute, "div.full.f32", a, b)[:count].view(np.uint32).tolist() == bits(full)
    assert divide(execute, "div.approx.f32", a, b)[:count].view(np.uint32).tolist() == bits(approx)
    flushed = [0.0 if abs(number) < 2.0**-126 else number for number in approx]
    flushed[11] = -0.0
    assert divide(execute, "div.approx.ftz.f32", a, b)[:count].view(np.uint32).tolist() == bits(flushed)


@pytest.mark.parametrize(
    "opcode",
    [
        "ex2.approx.bf16",
        "ex2.f32",
        "lg2.approx.f16",
        "tanh.approx.ftz.f32",
        "rcp.approx.f64",
        "div.approx.f64",
        "sin.f32",
        "sqrt.approx.ftz.f64",
    ],
)
def test_other_forms_are_refused(opcode):
    with pytest.raises(Unsupported, match="is not implemented"):
        resolve(opcode)
