"""Element formats against exact rational arithmetic and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import exact_blocks
from ptxrt.formats import (
    FORMATS,
    bf16,
    e2m1,
    e2m1x2,
    e2m3,
    e3m2,
    e4m3,
    e5m2,
    f16,
    f32,
    format_of,
    pack,
    ue4m3,
    ue4m3_values,
    ue8m0,
    ue8m0_values,
    unpack,
)

# Each element format with its exact definition and its dtype in ml_dtypes.
ELEMENTS = [
    (e2m1, exact_blocks.E2M1, ml_dtypes.float4_e2m1fn),
    (e3m2, exact_blocks.E3M2, ml_dtypes.float6_e3m2fn),
    (e2m3, exact_blocks.E2M3, ml_dtypes.float6_e2m3fn),
    (e4m3, exact_blocks.E4M3, ml_dtypes.float8_e4m3fn),
    (e5m2, exact_blocks.E5M2, ml_dtypes.float8_e5m2),
]
each_element = pytest.mark.parametrize("ours, exact, theirs", ELEMENTS, ids=[e[0].name for e in ELEMENTS])


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@each_element
def test_values_are_those_of_the_definition_and_of_ml_dtypes(ours, exact, theirs):
    codes = np.arange(1 << ours.bits, dtype=np.uint8)
    table = codes.view(theirs).astype(np.float32)
    numbers = ~np.isnan(table)
    np.testing.assert_array_equal(bits(ours.values[numbers]), bits(table[numbers]))
    np.testing.assert_array_equal(np.isnan(ours.values), ~numbers)
    assert ours.values[: ours.largest_code + 1].tolist() == [float(v) for v in exact.magnitudes]
    assert ours.largest == exact.magnitudes[-1] and ours.largest_exponent == exact_blocks.floor_log2(
        exact.magnitudes[-1]
    )


@each_element
def test_rounding_at_every_boundary(ours, exact, theirs):
    """All midpoints and values, and two neighbors on either side, against both."""
    values = ours.values[: ours.largest_code + 1].astype(np.float64)
    points = np.unique(np.concatenate([values, (values[1:] + values[:-1]) / 2])).astype(np.float32)
    near = (bits(points).astype(np.int64)[:, None] + np.arange(-2, 3)).ravel()
    x = near[near >= 0].astype(np.uint32).view(np.float32)
    x = np.concatenate([x, -x])
    want = [exact.round(abs(exact_blocks.Fraction(float(v)))) | (np.signbit(v) << (ours.bits - 1)) for v in x]
    np.testing.assert_array_equal(ours.encode(x), np.array(want, np.uint8))
    inside = np.abs(x) <= ours.largest
    np.testing.assert_array_equal(ours.encode(x[inside]), x[inside].astype(theirs).view(np.uint8))


@each_element
def test_what_is_beyond_saturates(ours, exact, theirs):
    top, sign = ours.largest_code, 1 << (ours.bits - 1)
    huge = np.array([ours.largest * 1.01, 3.4e38, np.inf], np.float32)
    assert ours.encode(huge).tolist() == [top] * 3 and ours.encode(-huge).tolist() == [top | sign] * 3
    assert ours.encode(np.float32([0.0, -0.0])).tolist() == [0, sign]
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    assert ours.encode(nan).tolist() == [sign - 1] * 3


@each_element
@settings(max_examples=60, deadline=None)
@given(x=arrays(np.float32, 64, elements=st.floats(-60000, 60000, width=32)), exponent=st.integers(-24, 4))
def test_any_numbers_round_exactly(ours, exact, theirs, x, exponent):
    x = np.ldexp(x, exponent).astype(np.float32)
    want = [exact.round(abs(exact_blocks.Fraction(float(v)))) | (np.signbit(v) << (ours.bits - 1)) for v in x]
    np.testing.assert_array_equal(ours.encode(x), np.array(want, np.uint8))


def test_scales_have_the_values_of_ml_dtypes():
    scales = np.arange(256, dtype=np.uint8)
    powers = ue8m0_values(scales)
    np.testing.assert_array_equal(powers, scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    signed = ue4m3_values(scales)
    np.testing.assert_array_equal(signed, np.abs(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)))


@pytest.mark.parametrize("width", [4, 6, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_packing_is_one_little_endian_number(rng, width, axis):
    codes = rng.integers(0, 1 << width, (8, 12, 4), dtype=np.uint8)
    packed = pack(codes, width, axis)
    rows = exact_blocks.pack(np.moveaxis(codes, axis, -1), width)
    np.testing.assert_array_equal(packed, np.moveaxis(rows, -1, axis))
    np.testing.assert_array_equal(unpack(packed, width, axis), codes)


def test_known_bytes():
    assert pack(np.array([1, 2, 3, 4], np.uint8), 4).tolist() == [0x21, 0x43]
    assert pack(np.array([0x3F, 0, 0, 1], np.uint8), 6).tolist() == [0x3F, 0, 0x04]
    assert pack(np.array([0, 0x3F, 0, 0], np.uint8), 6).tolist() == [0xC0, 0x0F, 0]


def test_formats_know_their_dtypes():
    assert format_of(np.float32) is f32 and format_of("bfloat16") is bf16 and format_of(np.float64) is None
    assert ue8m0.holds(np.dtype(ml_dtypes.float8_e8m0fnu)) and not e2m1x2.holds(np.dtype(np.int8))
    assert ue4m3.holds(np.dtype(ml_dtypes.float8_e4m3fn)) and e5m2.storage.holds(np.dtype(ml_dtypes.float8_e5m2))
    assert str(f32 | f16 | bf16) == "f32|f16|bf16"
    assert [m.storage.name for m, _, _ in ELEMENTS] == ["e2m1x2", "e3m2x4", "e2m3x4", "e4m3", "e5m2"]
    assert all(name == member.name for name, member in FORMATS.items())
