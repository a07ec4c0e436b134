"""Whole programs that nvcc compiled from C++ (tests/data), and the emulator's checks."""

import gc
import math
import struct
import weakref
from fractions import Fraction
from math import isqrt

import ml_dtypes
import numpy as np
import pytest
from programs import launch, program, text

from ptxrt.emulator import Emulator

TEXTS = ["", ".portable"]
M32, M64 = 2**32 - 1, 2**64 - 1


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# -- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", ".portable", ".debug"])
@pytest.mark.parametrize("n", [0, 1, 3, 5, 7, 9, 15])
def test_features(kind, n, rng):
    count = 256
    x = np.abs(rng.standard_normal(count)).astype(np.float32)
    out = np.zeros(count, np.float32)
    b = [0.5, 2.25, -1.5]
    launch(
        text(f"features{kind}.ptx"),
        "features",
        out,
        x,
        struct.pack("<i3fd", 7, *b, 3.0),
        n,
        grid=2,
        block=128,
        shared_bytes=512,
    )
    exchanged = x.astype(float).reshape(-1, 128)[:, np.arange(128) ^ 1].reshape(-1)
    total = np.zeros(count)
    for i in range(n):
        total += exchanged * b[i % 3] + 1 + (i & 7)
    local = {(j * n) & 15: x.astype(float) * j for j in range(16)}
    for j in range(n):
        total += local[j]
    ending = {
        0: lambda s: s + 1,
        1: lambda s: 2 * s,
        3: np.sqrt,
        5: lambda s: s / 3.7,
        7: lambda s: np.exp(s * 1e-3),
        9: np.sin,
    }
    total = ending.get(n, lambda s: s)(total) + 32 + 5 + 10
    np.testing.assert_allclose(out, total, rtol=1e-5, atol=2e-4)


# -- integers -------------------------------------------------------------------------------------------------------


def _funnel(high: int, low: int) -> int:
    return high << 32 | low


def _bytes(a: int) -> list[int]:
    return [a >> 8 * i & 0xFF for i in range(4)]


def _permute(a: int, b: int, selector: int) -> int:
    pool = _bytes(a) + _bytes(b)
    return sum(pool[selector >> 4 * i & 7] << 8 * i for i in range(4))


def expected_integers(a: int, b: int) -> tuple[list[int], list[int]]:
    s, t = signed(a), signed(b)
    x = ((a << 32 | b) * 0x9E3779B97F4A7C15) & M64
    y = b << 32 | a
    u, v = signed(x, 64), signed((y >> (b & 31)) - 1000, 64)
    clz = 32 - a.bit_length()
    dp4a = sum(signed(p, 8) * signed(q, 8) for p, q in zip(_bytes(a), _bytes(b))) + 17
    f32 = np.float32(s)
    narrow = [
        a * b >> 32, s * t >> 32, int(f"{a:032b}"[::-1], 2), clz, bin(a).count("1"), (a & -a).bit_length(),
        _funnel(b, a) << (b >> 3 & 31) >> 32, _funnel(b, a) >> min(b >> 5, 32), _permute(a, b, 0x5140), _permute(a, b, b & 0x7777),
        a // (b | 1), a % (b | 1), quotient(s, signed(b | 1)), s - signed(b | 1) * quotient(s, signed(b | 1)), dp4a, abs(s - t) + 5,
        s >> (b & 31), a >> (b & 31), min(s, t) + max(a, b), abs(s >> 3), (a & b) ^ (a | ~b), a if s < t else b,
        (a & 0xFFFF) * (b & 0xFFFF), signed(a, 8) + signed(b, 16), a // 7 + b % 10, int(f32.view(np.uint32)),
        int(np.uint32(b & 0x7FFFFF | 0x4A000000).view(np.float32)), sum((p + q & 0xFF) << 8 * i for i, (p, q) in enumerate(zip(_bytes(a), _bytes(b)))),
        sum(max(p, q) << 8 * i for i, (p, q) in enumerate(zip(_bytes(a), _bytes(b)))), a + b >> 1, s + t >> 1, a >> 5 & 0x3FF,
    ]  # fmt: skip
    product = x * y + x
    wide = [
        x // (y | 1), x % (y | 1), quotient(u, signed(v | 1, 64)), u - signed(v | 1, 64) * quotient(u, signed(v | 1, 64)), x * y >> 64, u * v >> 64,
        u >> (b & 63), x << (a & 63), (64 - x.bit_length()) + 100 * bin(x).count("1") + 10000 * (x & -x).bit_length(),
        product >> 64, product >> 13, int(f"{x:064b}"[::-1], 2) + (u < v),
    ]  # fmt: skip
    return [value & M32 for value in narrow], [value & M64 for value in wide]


@pytest.mark.parametrize("kind", TEXTS)
def test_integers(kind, rng):
    corners = [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, M32, M32 - 1, 0x12345678]
    pairs = [(a, b) for a in corners for b in corners] + rng.integers(0, 2**32, (100, 2)).tolist()
    given = np.array(pairs, np.uint32)
    out, wide = np.zeros((len(pairs), 32), np.uint32), np.zeros((len(pairs), 12), np.uint64)
    launch(text(f"integers{kind}.ptx"), "integers", out, wide, given, len(pairs), grid=2, block=100)
    for row, (a, b) in enumerate(pairs):
        narrow, big = expected_integers(a, b)
        assert out[row].tolist() == narrow, (a, b)
        assert wide[row].tolist() == big, (a, b)


# -- floats ---------------------------------------------------------------------------------------------------------


def rounded(value: Fraction, mode: str, precision: int, smallest: int, largest: float, zero: float = 0.0) -> float:
    """An exact value rounded to a binary format: `precision` bits; `smallest` is the exponent of the lowest subnormal
    bit."""
    if value == 0:
        return zero
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    below = magnitude // unit
    rest = magnitude - below * unit
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and below % 2 == 1),
        "rz": False,
        "ru": value > 0 and rest > 0,
        "rd": value < 0 and rest > 0,
    }[mode]
    result = (below + up) * unit
    if result > Fraction(largest):
        overflow = mode == "rn" or (mode == "ru" and value > 0) or (mode == "rd" and value < 0)
        number = float("inf") if overflow else largest
    else:
        number = float(result)
    return -number if value < 0 else number


def f32(value, mode="rn", zero=0.0):
    return np.float32(rounded(value, mode, 24, -149, float(np.finfo(np.float32).max), zero))


SINGLES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1.5,
    3.0,
    1e-38,
    -1e-40,
    1e38,
    -3.4e38,
    2.0**-149,
    16777217.0,
    0.1,
    -7.7,
    2.0**-75,
    1 + 2.0**-23,
]


@pytest.mark.parametrize("kind", TEXTS)
def test_singles(kind, rng):
    values = np.array(SINGLES, np.float32)
    triples = np.array([(a, b, c) for a in values for b in values for c in values[::3]], np.float32)
    more = (rng.standard_normal((400, 3)) * np.exp2(rng.integers(-70, 60, (400, 3)))).astype(np.float32)
    # Sums close to a tie, where double rounding would show.
    tied = np.array(
        [[1 + i * 2.0**-12, 1 + 2.0**-12, sign * 2.0**-60] for i in range(1, 40) for sign in (1, -1)], np.float32
    )
    given = np.concatenate([triples, more, tied])
    count = len(given)
    out = np.zeros((count, 24), np.float32)
    launch(text(f"floats{kind}.ptx"), "singles", out, given, count, grid=-(-count // 128), block=128)
    for (a, b, c), got in zip(given.tolist(), out):
        x, y, z = Fraction(a), Fraction(b), Fraction(c)
        want = []
        for mode in ("rn", "rz", "ru", "rd"):
            cancelled = (
                -0.0 if (np.signbit(a) and np.signbit(b)) or (mode == "rd" and np.signbit(a) != np.signbit(b)) else 0.0
            )
            want.append(f32(x + y, mode, cancelled))
        want += [f32(x * y, mode, np.copysign(0.0, a) * np.copysign(1, b)) for mode in ("rn", "rz", "ru", "rd")]
        negative = np.signbit(a) != np.signbit(b)
        for mode in ("rn", "rz", "ru", "rd"):
            cancelled = (
                -0.0 if (negative and np.signbit(c)) or (mode == "rd" and negative != bool(np.signbit(c))) else 0.0
            )
            want.append(f32(x * y + z, mode, cancelled))
        for mode in ("rn", "rz", "ru", "rd"):
            if b:
                want.append(f32(x / y, mode, np.copysign(0.0, a) * np.copysign(1, b)))
            else:
                want.append(np.float32(np.nan) if a == 0 else np.float32(np.copysign(np.inf, a) * np.copysign(1, b)))
        want += [_root(abs(x), mode) for mode in ("rn", "ru")]
        want += [f32(1 / x, mode) if a else np.copysign(np.float32(np.inf), np.float32(a)) for mode in ("rn", "rd")]
        want += [
            _extreme(min, a, b, -1),
            _extreme(max, b, c, 1),
            np.float32(min(max(a, 0.0), 1.0) + 0.0),
            np.copysign(np.float32(a), np.float32(b)),
        ]
        assert [_bits(value) for value in got] == [_bits(value) for value in want], (a, b, c, got, want)


def _bits(value) -> str:
    return "nan" if np.isnan(value) else hex(int(np.float32(value).view(np.uint32)))


def _extreme(choose, a, b, sign):
    if a == 0 and b == 0:
        negative = (np.signbit(a) or np.signbit(b)) if sign < 0 else (np.signbit(a) and np.signbit(b))
        return np.float32(-0.0 if negative else 0.0)
    return np.float32(choose(a, b))


def _root(x: Fraction, mode: str):
    if x == 0:
        return np.float32(0)
    scale = 2**400
    root = Fraction(isqrt(x.numerator * x.denominator * scale**2), x.denominator * scale)
    if root * root != x:
        root += Fraction(1, scale * x.denominator * 2)  # above the truncated root: never representable, rounds right
    return f32(root, mode)


def test_doubles(rng):
    given = np.concatenate([rng.standard_normal((300, 3)) * np.exp2(rng.integers(-40, 40, (300, 3))), [[1.0, 2.0, -2.0], [1e300, 1e10, -1e308], [1e-200, 1e-200, 1e-310], [1 + 2.0**-52, 1 + 2.0**-52, -1.0]]])  # fmt: skip
    out = np.zeros((len(given), 10))
    for kind in TEXTS:
        launch(text(f"floats{kind}.ptx"), "doubles", out, given, len(given), grid=3, block=128)
        for (a, b, c), got in zip(given.tolist(), out):
            x, y, z = Fraction(a), Fraction(b), Fraction(c)
            largest = float(np.finfo(float).max)

            def f64(value, mode="rn", largest=largest):
                return rounded(value, mode, 53, -1074, largest)

            want = [
                a + b,
                a * b,
                f64(x * y + z),
                a / b,
                float(np.sqrt(abs(a))),
                None,
                f64(x + y, "ru"),
                f64(x * y, "rd"),
                min(a, c),
            ]
            for position, value in enumerate(want):
                assert value is None or got[position] == value, (position, a, b, c, got[position], value)
            assert got[5] == pytest.approx(math.exp(min(a * 1e-3, 700)), rel=1e-13) or a > 7e5
            if abs(a) < 2**62:
                assert got[9] == float(int(a)) + float(np.float32(b))


@pytest.mark.parametrize("kind", TEXTS)
def test_halves(kind, rng):
    bits = rng.integers(0, 2**16, (300, 3, 2)).astype(np.uint16)
    bits[:50] = rng.choice(
        np.array([0, 0x8000, 0x3C00, 0x0001, 0x7BFF, 0x3F80, 0x0080, 0x0100, 0xC000], np.uint16), (50, 3, 2)
    )
    half, brain = bits.view(np.float16), bits.view(ml_dtypes.bfloat16)
    out, out_b = np.zeros((300, 8, 2), np.float16), np.zeros((300, 8, 2), ml_dtypes.bfloat16)
    raw_b = out_b.view(np.uint16)
    launch(text(f"floats{kind}.ptx"), "halves", out, raw_b, half, bits, 300, grid=3, block=128)
    for values, found, precision, smallest, largest in (
        (half, out, 11, -24, 65504.0),
        (brain, out_b, 8, -133, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
    ):
        with np.errstate(invalid="ignore"):
            values, found = values.astype(np.float64), found.astype(np.float64)
        for lane in range(2):
            for (a, b, c), got in zip(values[:, :, lane].tolist(), found[:, :, lane]):
                if not np.isfinite([a, b, c]).all():
                    continue
                x, y, z = Fraction(a), Fraction(b), Fraction(c)

                def near(value):
                    return rounded(value, "rn", precision, smallest, largest)

                fused = near(x * y + z)
                want = [near(x + y), near(x * y), fused, min(a, b), max(b, c), -abs(a), near(x - z), max(fused, 0.0)]
                assert got.tolist() == want, (a, b, c)


# -- control flow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXTS)
def test_loops_that_end_at_different_times(kind):
    start = np.arange(1, 301, dtype=np.uint32)
    steps = np.full(300, -1, np.int32)

    def collatz(x):
        count = 0
        while x != 1:
            x = 3 * x + 1 if x & 1 else x // 2
            count += 1
        return count

    launch(text(f"control{kind}.ptx"), "collatz", steps, start, 300, grid=3, block=128)
    assert steps.tolist() == [collatz(int(x)) for x in start]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_producer_and_consumers(kind, rounds, rng):
    given = rng.integers(-1000, 1000, (rounds, 96)).astype(np.int32)
    out = np.zeros((2, 96), np.int32)
    launch(text(f"control{kind}.ptx"), "producer", out, given, rounds, grid=2, block=128)
    want = sum(2 * given[r, (np.arange(96) + r) % 96] for r in range(rounds))
    assert (out == want).all()


@pytest.mark.parametrize("kind", TEXTS)
def test_grids_in_three_dimensions(kind):
    nx, ny, nz = 21, 13, 6
    out = np.zeros((nz, ny, nx), np.int32)
    launch(text(f"control{kind}.ptx"), "cube", out, nx, ny, nz, grid=(3, 5, 2), block=(8, 3, 4))
    z, y, x = np.indices(out.shape)
    assert (out == x + 100 * y + 10000 * z).all()


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("block", [1, 7, 32, 33, 50, 100, 1024])
def test_blocks_of_any_size(kind, block, rng):
    given = rng.integers(-1000, 1000, (3, 211)).astype(np.int32)
    out = np.zeros(3, np.int32)
    launch(text(f"control{kind}.ptx"), "block_sum", out, given, 211, grid=3, block=block)
    assert out.tolist() == given.sum(axis=1).tolist()


@pytest.mark.parametrize("kind", TEXTS)
def test_shuffles_of_half_warps(kind, rng):
    given = rng.integers(0, 100, 64).astype(np.int32)
    out = np.zeros(64, np.int32)
    launch(text(f"control{kind}.ptx"), "warp_sum", out, given, block=64)
    for warp in (0, 32):
        values = np.where(np.arange(32) < 16, given[warp : warp + 16].max(), given[warp + 16 : warp + 32].sum())
        assert out[warp : warp + 32].tolist() == (values + (values & 1).sum()).tolist()


def test_threads_that_wait_for_each_other_in_a_loop():
    out, counter = np.zeros(40, np.int32), np.zeros(2, np.int32)
    for kind in TEXTS:
        counter[:] = 0
        launch(text(f"control{kind}.ptx"), "ticket", out, counter, block=40)
        assert out.tolist() == list(range(40)) and counter.tolist() == [40, 40]


@pytest.mark.parametrize("kind", TEXTS)
def test_switch(kind, rng):
    given = rng.integers(0, 10**6, 128).astype(np.int32)
    out = np.zeros(128, np.int32)
    cases = [lambda x, t: x * 3 + 1, lambda x, t: x ^ 0x55, lambda x, t: x << 2, lambda x, t: x * x, lambda x, t: x - 77, lambda x, t: ~x,
             lambda x, t: x // 3, lambda x, t: x % 5, lambda x, t: x | 1024, lambda x, t: -1, lambda x, t: x + t, lambda x, t: x * 7, lambda x, t: 0]  # fmt: skip
    launch(text(f"control{kind}.ptx"), "jump", out, given, block=128)
    assert out.tolist() == [signed(cases[x % 13](x, t)) for t, x in enumerate(given.tolist())]


# -- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXTS)
def test_atomics(kind):
    n = 128
    threads = range(n)
    i = np.array([0, 0, 1000, -5, -1, 0, 0, 0, 0], np.int32)
    u = np.array([0, 4, 0, 0, 0, 0, 0, 0], np.uint32)
    wide, f, d = np.zeros(3, np.uint64), np.zeros(2, np.float32), np.zeros(1)
    h, b = np.zeros(2, np.float16), np.zeros(2, np.uint16)
    olds = np.zeros(n, np.int32)
    launch(text(f"atomics{kind}.ptx"), "atomics", i, u, wide, f, d, h, b, olds, grid=2, block=64)
    assert olds.tolist() == [sum(1 + t % 3 for t in range(k)) for k in threads]
    xor = 0
    for t in threads:
        xor ^= t
    shared = 2 * 64 + 32
    assert i.tolist() == [
        sum(1 + t % 3 for t in threads),
        -sum(threads),
        50 - 127,
        381,
        0,
        2**29 - 1,
        xor,
        64,
        2 * shared,
    ]
    inc, dec = 0, 4
    for _ in threads:
        inc = 0 if inc >= 6 else inc + 1
        dec = 9 if dec == 0 or dec > 9 else dec - 1
    assert u.tolist() == [inc, dec, 0xFFFFFFF0, 127, 1, 2, 3, 4]
    assert wide.tolist() == [0x100000001 * sum(threads), 127 << 33, 2 * 64 * (3 << 32)]
    assert f.tolist() == [0.5 * sum(range(0, n, 2)), 0.5 * sum(range(1, n, 2))]
    total = 0.0
    for t in threads:
        total += 1.0 / (1 + t)
    assert d[0] == total
    assert h.tolist() == [64.0, -128.0] and b.view(ml_dtypes.bfloat16).astype(float).tolist() == [128.0, 32.0]


@pytest.mark.parametrize("kind", TEXTS)
def test_one_warp_after_the_other(kind, rng):
    """The schedule of one warp after the other gives the same results, also where warps wait for each other in a
    loop."""
    given, out = rng.integers(-1000, 1000, (5, 96)).astype(np.int32), np.zeros((2, 96), np.int32)
    launch(
        text(f"control{kind}.ptx"), "producer", out, given, 5, grid=2, block=128, emulator=Emulator(schedule="warps")
    )
    assert (out == sum(2 * given[r, (np.arange(96) + r) % 96] for r in range(5))).all()
    out, counter = np.zeros(40, np.int32), np.zeros(2, np.int32)
    launch(text(f"control{kind}.ptx"), "ticket", out, counter, block=40, emulator=Emulator(schedule="warps"))
    assert sorted(out.tolist()) == list(range(40))


# -- translations shared by emulators -------------------------------------------------------------------------------


BOX = program("mov.u64 %rd2, box; st.global.u64 [%rd0], %rd2;", before=".global .u32 box = 7;\n.const .u32 facts = 1;")


def loaded(text, used=0, **options):
    """Load a program into a new emulator after allocating `used` bytes."""
    emulator = Emulator(**options)
    emulator.alloc(used)
    return emulator, emulator.load_text(text, "test.ptx")


def address_of_box(emulator, module):
    out = np.zeros(1, np.uint64)
    launch(None, "k", out, block=1, emulator=emulator, module=module)
    return int(out[0])


def test_emulators_share_what_one_has_translated():
    (first, module), (second, other) = loaded(BOX), loaded(BOX, races=True, schedule="warps")
    assert module.code("k") is other.code("k")
    for emulator, text in (first, module), (second, other):
        assert address_of_box(emulator, text) == text.address("box")
    assert sum(module.counts["k"]) == sum(other.counts["k"]) == 1


def test_nothing_is_shared_that_differs():
    first, module = loaded(BOX)
    others = loaded(BOX, used=4096), loaded(BOX, arithmetic="hardware"), loaded(BOX, profile=True), loaded(BOX + "\n")
    for emulator, other in others:
        assert module.code("k") is not other.code("k")
        assert address_of_box(emulator, other) == other.address("box")
    assert others[0][1].address("box") != module.address("box")


def test_what_is_shared_keeps_no_emulator_alive():
    emulator, module = loaded(BOX)
    second = loaded(BOX)
    assert module.code("k") is second[1].code("k")
    address_of_box(emulator, module)
    gone = weakref.ref(emulator)
    del emulator, module
    gc.collect()
    assert gone() is None and address_of_box(*second) == second[1].address("box")
