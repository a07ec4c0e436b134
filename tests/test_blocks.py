"""Block formats, the reference of every quantizer, against exact rational arithmetic and tables of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import exact_blocks
from ptxrt.blocks import BLOCK_FORMATS, mxfp4, nvfp4, swizzled_bytes, swizzled_offsets

MX = [BLOCK_FORMATS[name] for name in exact_blocks.MX]
TABLES = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
}
each_format = pytest.mark.parametrize("f", MX, ids=lambda f: f.name)
each_rule = pytest.mark.parametrize("rule", exact_blocks.RULES)


def assert_same(got, want):
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0], want[0])


def test_every_format_is_held_against_its_definition():
    assert set(BLOCK_FORMATS) == {*exact_blocks.MX, "nvfp4"}
    assert all(f.rules == exact_blocks.RULES and f.block == 32 for f in MX) and nvfp4.block == 16


@each_format
@each_rule
def test_hard_blocks(f, rule):
    x = exact_blocks.hard_blocks(exact_blocks.MX[f.name])
    assert_same(f.encode(x, rule), exact_blocks.encode(x, f.name, rule))


@each_format
@each_rule
def test_scales_at_every_decision(f, rule):
    """The decision boundaries of each rule and two float32 steps to either side, from the smallest subnormal to the
    largest number."""
    x = exact_blocks.decision_blocks(exact_blocks.MX[f.name])
    largest = [exact_blocks.Fraction(float(v)) for v in exact_blocks.decision_magnitudes(exact_blocks.MX[f.name])]
    want = [exact_blocks.scale_byte(v, exact_blocks.MX[f.name], rule) for v in largest]
    codes, scales = f.encode(x, rule)
    np.testing.assert_array_equal(scales[:, 0], want)
    assert_same((codes[::9], scales[::9]), exact_blocks.encode(x[::9], f.name, rule))


@each_format
@each_rule
def test_codes_are_those_of_ml_dtypes(f, rule, rng):
    """Scaled values, clipped and rounded by ml_dtypes, have the same codes."""
    x = (rng.standard_normal((64, 128)) * 2.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    codes, scales = f.encode(x, rule)
    scaled = np.ldexp(x, 127 - np.repeat(scales.astype(int), 32, axis=1))
    theirs = np.clip(scaled, -f.element.largest, f.element.largest).astype(TABLES[f.name]).view(np.uint8)
    np.testing.assert_array_equal(codes, exact_blocks.pack(theirs, f.bits))


def test_rules_differ_where_they_should():
    """floor, ceil, rceil and even by hand: 6 is the largest e2m1, and `even` rounds 7 to the next octave."""
    one = np.ones((1, 32), np.float32)
    expected = {
        1.0: (125, 125, 125, 125),
        6.0: (127, 128, 127, 127),
        6.0000005: (127, 128, 128, 127),
        7.0: (127, 128, 128, 128),
    }
    for value, bytes_ in expected.items():
        assert tuple(int(mxfp4.encode(one * np.float32(value), rule)[1][0, 0]) for rule in mxfp4.rules) == bytes_


@each_format
def test_rceil_is_the_smallest_scale_that_does_not_saturate(f):
    """Except for one number, which the float32 product rounds down to 2**-127, as in torchao."""
    element = exact_blocks.MX[f.name]
    top, off = element.magnitudes[-1], []
    for value in filter(None, exact_blocks.decision_magnitudes(element)):
        exact = max(exact_blocks.ceil_log2(exact_blocks.Fraction(float(value)) / top) + 127, 0)
        if f.scale_bytes(np.float32(value).view(np.uint32)[None], "rceil")[0] != exact:
            off.append(value)
    smallest = np.float32(np.ldexp(f.element.largest, -127))
    assert off == [np.nextafter(smallest, np.float32(1))]


@each_format
def test_even_has_no_scale_for_what_it_rounds_to_infinity(f):
    first = np.uint32(0x7F800000 - (1 << (22 - f.element.mantissa_bits)))
    scales = f.scale_bytes(np.array([first - 1, first, 0x7F7FFFFF], np.uint32), "even")
    assert scales.tolist() == [254 - f.element.largest_exponent, 255, 255]
    codes, _ = f.encode(np.full((1, 32), np.finfo(np.float32).max), "even")
    assert not codes.any()


@each_format
@each_rule
def test_no_finite_block_reaches_the_largest_scales(f, rule):
    """The reciprocal of a scale is thus a normal number."""
    finite = f.scale_bytes(np.array([0x7F7FFFFF, 0x7F000000, 0x7EFFFFFF], np.uint32), rule)
    assert finite[finite != 255].max() <= 253


@each_format
@settings(max_examples=40, deadline=None)
@given(bits=arrays(np.uint32, (1, 64)), rule=st.sampled_from(exact_blocks.RULES))
def test_any_float_bits_encode_exactly(f, bits, rule):
    x = bits.view(np.float32)
    assert_same(f.encode(x, rule), exact_blocks.encode(x, f.name, rule))


@each_format
@settings(max_examples=40, deadline=None)
@given(
    x=arrays(np.float32, (2, 32), elements=st.floats(-(2.0**120), 2.0**120, width=32)),
    exponent=st.integers(-140, 100),
    rule=st.sampled_from(exact_blocks.RULES),
)
def test_scaled_floats_encode_exactly(f, x, exponent, rule):
    with np.errstate(over="ignore"):
        x = np.ldexp(x, exponent).astype(np.float32)
    assert_same(f.encode(x, rule), exact_blocks.encode(x, f.name, rule))


@each_format
def test_every_code_under_every_scale_decodes_exactly(f):
    codes = np.tile(np.resize(np.arange(1 << f.bits, dtype=np.uint8), 256), (255, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, axis=1)
    values = f.decode(exact_blocks.pack(codes, f.bits), scales)
    table = codes.view(TABLES[f.name]).astype(np.float64)
    exact = table * 2.0 ** (np.arange(255.0)[:, None] - 127)
    with np.errstate(over="ignore", invalid="ignore"):
        want = exact.astype(np.float32)
    assert np.array_equal(values, want, equal_nan=True)
    finite = np.isfinite(want) & np.isfinite(table)
    np.testing.assert_array_equal(want[finite].astype(np.float64), exact[finite])
    assert np.isnan(f.decode(exact_blocks.pack(codes[:1], f.bits), np.full((1, 8), 255, np.uint8))).all()


def test_known_blocks():
    one = np.ones((1, 32), np.float32)
    assert [a.tolist() for a in mxfp4.encode(6 * one)] == [[[0x77] * 16], [[127]]]
    assert [a.tolist() for a in mxfp4.encode(one)] == [[[0x66] * 16], [[125]]]
    assert [a.tolist() for a in mxfp4.encode(0 * one)] == [[[0] * 16], [[0]]]
    assert [a.tolist() for a in mxfp4.encode(-0.0 * one)] == [[[0x88] * 16], [[0]]]
    assert [a.tolist() for a in mxfp4.encode(np.nan * one)] == [[[0] * 16], [[255]]]


def test_encoding_what_was_decoded_changes_nothing(rng):
    codes = rng.integers(0, 256, (64, 48), dtype=np.uint8)
    codes[:, ::16] |= 0x66  # every block has a magnitude of 4 or 6, which determines its scale
    scales = rng.integers(10, 240, (64, 3), dtype=np.uint8)
    assert_same(mxfp4.encode(mxfp4.decode(codes, scales)), (codes, scales))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_inputs_encode_as_their_float32_values(rng, dtype):
    x = rng.standard_normal((4, 64)).astype(dtype)
    assert_same(mxfp4.encode(x), mxfp4.encode(x.astype(np.float32)))


@pytest.mark.parametrize("f", BLOCK_FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_any_axis_is_the_last_one_moved(f, axis, rng):
    x = rng.standard_normal((64, 96, 32)).astype(np.float32)[:, :, :32]
    level = (0.01,) if f.two_level else ()
    codes, scales = f.encode(x, *level, axis=axis)
    want = f.encode(np.moveaxis(x, axis, -1), *level)
    assert_same((codes, scales), [np.moveaxis(a, -1, axis) for a in want])
    np.testing.assert_array_equal(
        f.decode(codes, scales, *level, axis=axis), np.moveaxis(f.decode(*want, *level), -1, axis)
    )


# NVFP4


def nv_blocks(rng):
    """Normal values of many magnitudes, boundaries of e2m1, special values."""
    sizes = np.repeat(2.0 ** np.array([-149, -140, -127, -126, -60, -8, -3, 0, 1, 5, 30, 100, 120]), 6)[:, None]
    normal = (rng.standard_normal((sizes.size, 16)) * sizes).astype(np.float32)
    return np.concatenate([normal, exact_blocks.hard_blocks(block=16)[::3], exact_blocks.special_blocks(16)])


GLOBAL_SCALES = [None, 1.0, 2.0**-149, 3 * 2.0**-149, 1e-41, 2.0**-126, 1e-10, 1 / 2688, 0.37, 17.0, 1e10, 3e38]


@pytest.mark.parametrize("rule", nvfp4.rules)
@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_blocks(rng, g, rule):
    x = nv_blocks(rng)
    g = exact_blocks.global_scale(x) if g is None else np.float32(g)
    assert_same(nvfp4.encode(x, g, rule), exact_blocks.encode_nvfp4(x, g, rule))


@pytest.mark.parametrize("rule", nvfp4.rules)
@settings(max_examples=60, deadline=None)
@given(
    x=arrays(np.float32, (1, 32), elements=st.floats(width=32)),
    g=st.floats(2.0**-149, 2.0**127, width=32, exclude_min=False),
)
def test_nvfp4_of_any_numbers(rule, x, g):
    assert_same(nvfp4.encode(x, g, rule), exact_blocks.encode_nvfp4(x, g, rule))


@pytest.mark.parametrize("rule", nvfp4.rules)
def test_nvfp4_scales_at_every_decision(rule):
    """Largest magnitudes whose quotient lies on a boundary of e4m3, and two float32 steps to either side."""
    values = exact_blocks.E4M3.magnitudes
    points = [float((a + b) / 2 * 6) for a, b in zip(values, values[1:])] + [
        6 * 2.0**-9,
        6 * 448.0,
        6 * 464.0,
        4 * 448.0,
    ]
    near = np.unique((np.float32(points).view(np.uint32)[:, None] + np.arange(-2, 3)).astype(np.uint32)).view(
        np.float32
    )
    x = near[:, None] * np.float32(0.8) ** np.arange(16, dtype=np.float32)
    assert_same(nvfp4.encode(x, 1.0, rule), exact_blocks.encode_nvfp4(x, 1.0, rule))


def test_known_nvfp4_blocks():
    zeros = np.zeros((1, 16), np.float32)
    assert [a.tolist() for a in nvfp4.encode(zeros, 1.0)] == [[[0] * 8], [[1]]]
    assert [a.tolist() for a in nvfp4.encode(zeros - 0.0 + 6, 1.0)] == [[[0x77] * 8], [[0x38]]]
    assert [a.tolist() for a in nvfp4.encode(zeros * np.nan, 1.0)] == [[[0] * 8], [[0x7F]]]
    vanishing = np.float32(2**-149)
    assert [a.tolist() for a in nvfp4.encode(-zeros, vanishing)] == [[[0] * 8], [[1]]]  # g * s is 0, and signs are lost


def test_four_over_six_takes_the_smaller_error():
    """Values of nine tenths of the largest: scaled to 6 they are 5.4, far from 4 and 6; scaled to 4 they are 3.6, close
    to 4."""
    x = np.full((1, 16), 0.9, np.float32)
    x[0, 0] = 1
    amax, adaptive = (np.abs(nvfp4.decode(*nvfp4.encode(x, 1.0, rule), 1.0) - x).sum() for rule in nvfp4.rules)
    assert adaptive < amax
    assert nvfp4.encode(x, 1.0, "four_over_six")[1] > nvfp4.encode(x, 1.0, "amax")[1]


def test_four_over_six_is_never_worse(rng):
    x = rng.standard_normal((512, 16)).astype(np.float32)
    g = nvfp4.global_scale(np.abs(x).max())
    errors = [np.square(nvfp4.decode(*nvfp4.encode(x, g, rule), g) - x).sum(axis=1) for rule in nvfp4.rules]
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all() and errors[1].sum() < 0.95 * errors[0].sum()


def test_global_scale():
    assert nvfp4.global_scale(2688) == 1 and nvfp4.global_scale(0) == 1 and nvfp4.global_scale(2.0**-149) == 1
    x = np.float32([1.5, -7.25, np.inf, np.nan])
    assert nvfp4.global_scale(7.25) == exact_blocks.global_scale(x) == np.float32(7.25) / np.float32(2688)


def test_nvfp4_decodes_by_two_products():
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2, axis=1)
    codes = np.tile(np.arange(256, dtype=np.uint8)[:16], (256, 1))
    g = np.float32(0.3)
    got = nvfp4.decode(codes, scales, g)
    step = g * np.abs(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    table = np.stack([codes & 15, codes >> 4], -1).reshape(256, 32).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(got, table * np.repeat(step, 16, axis=1), equal_nan=True) and np.isnan(got[0x7F]).all()


# The 128x4 layout


@pytest.mark.parametrize("rows, blocks", [(1, 1), (128, 4), (129, 5), (300, 9), (0, 4), (4, 0)])
def test_swizzled_offsets_are_distinct_places_in_whole_tiles(rows, blocks):
    offsets = swizzled_offsets(rows, blocks)
    assert offsets.shape == (rows, blocks) and np.unique(offsets).size == rows * blocks
    assert not offsets.size or offsets.max() < swizzled_bytes(rows, blocks)


def test_swizzled_offsets_by_hand():
    offsets = swizzled_offsets(256, 8)
    for (row, block), offset in {
        (0, 0): 0,
        (0, 3): 3,
        (1, 0): 16,
        (31, 0): 496,
        (32, 0): 4,
        (96, 1): 13,
        (127, 3): 511,
        (0, 4): 512,
        (128, 0): 1024,
    }.items():
        assert offsets[row, block] == offset
    assert swizzled_bytes(128, 4) == 512 and swizzled_bytes(129, 5) == 2048 and swizzled_bytes(0, 3) == 0
