"""Encoders and decoders against exact rational arithmetic and against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import exact_mxfp4
from ptxrt.formats import FORMATS, bf16, e2m1, e2m1x2, f16, f32, format_of, mxfp4, pack_nibbles, ue8m0, unpack_nibbles


def test_e2m1_has_the_values_of_ml_dtypes():
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(e2m1.values.view(np.uint32), theirs.view(np.uint32))
    assert e2m1.largest == 6


def test_e2m1_rounds_as_ml_dtypes_does():
    boundaries = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    grid = np.concatenate([np.linspace(-8, 8, 4001, dtype=np.float32), boundaries, -boundaries])
    x = np.concatenate([grid, np.nextafter(grid, np.float32(9)), np.nextafter(grid, np.float32(-9)), [np.float32(-0.0)]])
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(e2m1.encode(x), theirs)


def test_scales_have_the_values_of_ml_dtypes():
    scales = np.arange(256, dtype=np.uint8)[:, None]
    one = np.full((256, 16), 0x22, np.uint8)
    theirs = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(mxfp4.decode(one, scales), np.broadcast_to(theirs, (256, 32)))


def test_decode_is_exact_for_every_code_and_scale():
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(255, dtype=np.uint8))
    got = mxfp4.decode(np.repeat(codes[..., None], 16, -1), scales[..., None])
    for low in range(16):
        value = float(exact_mxfp4.E2M1[low & 7]) * (-1 if low & 8 else 1)
        exact = value * 2.0 ** (np.arange(255) - 127.0)
        wanted = np.where(np.abs(exact) < 2.0**128, exact, np.copysign(np.inf, value))
        np.testing.assert_array_equal(got[:, low, 0].astype(np.float64), wanted)


def test_hard_blocks_encode_exactly():
    x = exact_mxfp4.hard_blocks()
    codes, scales = mxfp4.encode(x)
    wanted_codes, wanted_scales = exact_mxfp4.encode(x)
    np.testing.assert_array_equal(scales, wanted_scales)
    np.testing.assert_array_equal(codes, wanted_codes)


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, (1, 64)))
def test_any_float_bits_encode_exactly(bits):
    x = bits.view(np.float32)
    for got, wanted in zip(mxfp4.encode(x), exact_mxfp4.encode(x)):
        np.testing.assert_array_equal(got, wanted)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, (2, 32), elements=st.floats(-(2.0**120), 2.0**120, width=32)), st.integers(-140, 100))
def test_scaled_floats_encode_exactly(x, exponent):
    with np.errstate(over="ignore"):
        x = np.ldexp(x, exponent).astype(np.float32)
    for got, wanted in zip(mxfp4.encode(x), exact_mxfp4.encode(x)):
        np.testing.assert_array_equal(got, wanted)


def test_known_blocks():
    one = np.ones((1, 32), np.float32)
    assert [a.tolist() for a in mxfp4.encode(6 * one)] == [[[0x77] * 16], [[127]]]
    assert [a.tolist() for a in mxfp4.encode(one)] == [[[0x66] * 16], [[125]]]
    assert [a.tolist() for a in mxfp4.encode(0 * one)] == [[[0] * 16], [[0]]]
    assert [a.tolist() for a in mxfp4.encode(-0.0 * one)] == [[[0x88] * 16], [[0]]]
    assert [a.tolist() for a in mxfp4.encode(np.nan * one)] == [[[0] * 16], [[255]]]


def test_encoding_what_was_decoded_changes_nothing(rng):
    codes = rng.integers(0, 256, (64, 48), dtype=np.uint8)
    codes[:, ::16] |= 0x44  # a magnitude of 2 or more in every block, so that the scale is found again
    codes[:, ::16] &= 0xFE
    scales = rng.integers(10, 240, (64, 3), dtype=np.uint8)
    codes[:, ::16] |= 0x66
    again = mxfp4.encode(mxfp4.decode(codes, scales))
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], scales)


def test_nibbles_pack_even_low():
    assert pack_nibbles(np.array([1, 2, 3, 4], np.uint8)).tolist() == [0x21, 0x43]
    assert unpack_nibbles(np.array([0x21, 0x43], np.uint8)).tolist() == [1, 2, 3, 4]


def test_formats_know_their_dtypes():
    assert format_of(np.float32) is f32 and format_of("bfloat16") is bf16 and format_of(np.float64) is None
    assert ue8m0.holds(np.dtype(ml_dtypes.float8_e8m0fnu)) and not e2m1x2.holds(np.dtype(np.int8))
    assert str(f32 | f16 | bf16) == "f32|f16|bf16"
    assert all(name == member.name for name, member in FORMATS.items())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_inputs_encode_as_their_float32_values(rng, dtype):
    x = rng.standard_normal((4, 64)).astype(dtype)
    for got, wanted in zip(mxfp4.encode(x), mxfp4.encode(x.astype(np.float32))):
        np.testing.assert_array_equal(got, wanted)
