"""`rope` against float64: both styles, parts of rows, the inverse, every dtype and block format."""

import ml_dtypes
import numpy as np
import pytest

import ptxrt
from ptxrt.errors import ArgumentError

BF16 = ml_dtypes.bfloat16
TYPES = [np.float32, np.float16, BF16]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def pairs_of(width, first, style):
    """The columns of the first and of the second values of all pairs."""
    i = np.arange(width // 2)
    return (first + i, first + i + width // 2) if style == "halves" else (first + 2 * i, first + 2 * i + 1)


def exact(x, table, positions, style="halves", first=0, inverse=False):
    """Rows rotated pair by pair in float64."""
    width = table.shape[1]
    y = x.astype(np.float64)
    angles = table.astype(np.float64)[np.asarray(positions)]
    angles = angles.reshape(*np.shape(positions), *[1] * (x.ndim - 1 - np.ndim(positions)), width)
    cosine, sine = angles[..., : width // 2], angles[..., width // 2 :] * (-1 if inverse else 1)
    one, other = pairs_of(width, first, style)
    a, b = y[..., one], y[..., other]
    with np.errstate(invalid="ignore"):
        y[..., one], y[..., other] = a * cosine - b * sine, b * cosine + a * sine
    return y


def assert_within_two_ulp(got, x, table, positions, style="halves", first=0, **options):
    """Check an error of at most two float32 ulp of the larger value of each pair."""
    want = exact(x, table, positions, style, first, **options)
    one, other = pairs_of(table.shape[1], first, style)
    size = np.abs(want)
    size[..., one] = size[..., other] = np.maximum(np.abs(x[..., one]), np.abs(x[..., other])).astype(np.float64)
    ulp = np.spacing(np.maximum(size, 1e-30).astype(np.float32)).astype(np.float64)
    error = np.abs(got.astype(np.float64) - want) / ulp
    assert error.max() <= 2, error.max()


# (columns, rotated columns, the first of them): pairs within one lane, across two lanes, and at odd columns.
PARTS = [(64, 64, 0), (128, 128, 0), (128, 64, 64), (96, 96, 0), (80, 24, 8), (40, 22, 5), (576, 64, 512)]


@pytest.mark.parametrize("style", ["halves", "pairs"])
@pytest.mark.parametrize("cols, width, first", PARTS)
def test_against_float64(text_machine, cols, width, first, style):
    table = ptxrt.rope_table(width, 5000)
    positions = np.array([0, 1, 4999, 77])
    x = normal(4, 3, cols)
    options = dict(style=style, first=first)
    y = ptxrt.rope(x, table, positions, **options)
    assert_within_two_ulp(y, x, table, positions, **options)
    kept = np.delete(np.arange(cols), np.arange(first, first + width))
    np.testing.assert_array_equal(y[..., kept], x[..., kept])
    np.testing.assert_array_equal(y[0], x[0])  # position 0
    back = ptxrt.rope(y, table, positions, inverse=True, **options)
    assert_within_two_ulp(back, y, table, positions, inverse=True, **options)
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: np.dtype(t).name)
def test_types(text_machine, dtype):
    table, positions = ptxrt.rope_table(64, 100), [3, 99]
    x = normal(2, 5, 64, dtype=dtype)
    y = ptxrt.rope(x, table, positions)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, ptxrt.rope(x, table, positions, out_dtype=np.float32).astype(dtype))
    assert_within_two_ulp(ptxrt.rope(x, table, positions, out_dtype=np.float32), x.astype(np.float32), table, positions)


def test_one_pair_known_to_the_bit(text_machine):
    table = np.array([[1, 0], [0.5, 0.25]], np.float32)  # a cosine and a sine that belong to no angle
    x = np.array([[4, 8]], np.float32)
    for style in ("halves", "pairs"):
        np.testing.assert_array_equal(ptxrt.rope(x, table, [1], style=style), [[0, 5]])
        np.testing.assert_array_equal(ptxrt.rope(x, table, [1], style=style, inverse=True), [[4, 3]])


def test_styles_are_alike_but_for_the_order_of_columns(text_machine):
    table, x = ptxrt.rope_table(32, 50), normal(3, 2, 32, dtype=BF16)
    order = np.arange(32).reshape(2, 16).T.reshape(-1)  # 0, 16, 1, 17, ..
    halves, pairs = ptxrt.rope(x, table, [1, 2, 49]), ptxrt.rope(x[..., order], table, [1, 2, 49], style="pairs")
    np.testing.assert_array_equal(halves[..., order], pairs)


def test_positions_belong_to_the_first_axes(text_machine):
    table, x = ptxrt.rope_table(16, 50), normal(2, 3, 4, 16)
    for positions in (7, [4, 9], np.arange(6).reshape(2, 3), np.arange(24).reshape(2, 3, 4)):
        assert_within_two_ulp(ptxrt.rope(x, table, positions), x, table, positions)
    np.testing.assert_array_equal(ptxrt.rope(x[0, 0, 0], table, 5), ptxrt.rope(x, table, 5)[0, 0, 0])


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_the_bytes_of_quantize(text_machine, format, layout):
    rule = {"mxfp8": "rceil", "mxfp4": "even", "nvfp4": "amax"}[format]
    level = dict(global_scale=0.013) if format == "nvfp4" else {}
    options = dict(scale_rule=rule, scale_layout=layout, **level)
    for style, cols, width, first in (("halves", 128, 128, 0), ("pairs", 90, 64, 6)):
        table, x = ptxrt.rope_table(width, 60), normal(11, 13, cols, dtype=BF16)
        for rounding in ("once", "16"):
            turns = dict(style=style, first=first)
            dtype, positions = np.float32 if rounding == "once" else None, np.arange(11) * 5
            plain = ptxrt.rope(x, table, positions, out_dtype=dtype, **turns)
            got = ptxrt.rope(x, table, positions, rounding=rounding, format=format, **options, **turns)
            want = ptxrt.quantize(plain, format, pad=True, **options)
            np.testing.assert_array_equal(got.codes, want.codes)
            np.testing.assert_array_equal(got.scales, want.scales)
            assert got.layout == want.layout


@pytest.mark.parametrize(
    "dtype, inverse", list(zip(TYPES, (False, True, False))), ids=["float32", "float16", "bfloat16"]
)
def test_every_form(text_machine, dtype, inverse):
    """Kernels of 16-bit rows have a loop for each form, where all columns are rotated; rows that are not aligned take
    another."""
    table, x, positions = ptxrt.rope_table(64, 60), normal(11, 13, 64, dtype=dtype), np.arange(11) * 5
    call = lambda **options: ptxrt.rope(x, table, positions, inverse=inverse, **options)
    plain = call(out_dtype=np.float32)
    assert_within_two_ulp(plain, x.astype(np.float32), table, positions, inverse=inverse)
    for rounding in ("once", "16"):
        np.testing.assert_array_equal(call(rounding=rounding), plain.astype(dtype))
        values = plain if rounding == "once" else plain.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(call(rounding=rounding, out_dtype=np.float32), values)
        for format, rule in ("mxfp8", "rceil"), ("mxfp4", "even"), ("nvfp4", "amax"):
            options = dict(scale_layout="128x4", **(dict(global_scale=0.013) if format == "nvfp4" else {}))
            got = call(rounding=rounding, format=format, **options)
            want = ptxrt.quantize(values, format, scale_rule=rule, pad=True, **options)
            np.testing.assert_array_equal(got.codes, want.codes)
            np.testing.assert_array_equal(got.scales, want.scales)
    wide = np.pad(x, ((0, 0), (0, 0), (3, 2)))
    got = ptxrt.rope(wide[..., 3:67], table, positions, inverse=inverse, out_dtype=np.float32)
    np.testing.assert_array_equal(got, plain)
    got = ptxrt.rope(ptxrt.to_device(wide)[..., 3:67], table, positions, inverse=inverse, out_dtype=np.float32)
    np.testing.assert_array_equal(got.to_numpy(), plain)
    if dtype != np.float16:  # of values below 2^-60 nvfp4 computes a sixth in other steps
        small = x * dtype(2.0**-70)
        got = ptxrt.rope(small, table, positions, format="nvfp4", global_scale=2.0**-70)
        want = ptxrt.rope(small, table, positions, out_dtype=np.float32)
        want = ptxrt.quantize(want, "nvfp4", global_scale=2.0**-70)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)


def test_any_strides(text_machine):
    table = ptxrt.to_device(ptxrt.rope_table(32, 50))
    qkv = normal(6, 5 * 32 + 7, dtype=BF16)
    for whole in (qkv, ptxrt.to_device(qkv)):
        heads = whole[:, 32:128].reshape(6, 3, 32)
        for x in (heads, heads[::2], heads[:, ::2], heads.transpose(1, 0, 2), whole[:, 3:67:2]):
            host = np.ascontiguousarray(x if whole is qkv else x.to_numpy())
            positions = np.arange(len(host))
            want = ptxrt.rope(host, table.to_numpy(), positions)
            np.testing.assert_array_equal(ptxrt.rope(x, table, positions).to_numpy(), want)
    out = ptxrt.zeros((6, 3, 100), np.float32)
    for part in (out[..., 5:37], out[..., 1:65:2]):
        x = ptxrt.to_device(qkv)[:, :96].reshape(6, 3, 32)
        want = ptxrt.rope(x, table, np.arange(6), out_dtype=np.float32)
        assert ptxrt.rope(x, table, np.arange(6), out=part) is part
        np.testing.assert_array_equal(part.to_numpy(), want.to_numpy())


def test_what_is_not_finite_stays_in_its_pair(text_machine):
    table = ptxrt.rope_table(64, 9)
    for style in ("halves", "pairs"):
        x = normal(4, 64)
        x[0, 3], x[1, 40], x[2, 63] = np.nan, np.inf, -np.inf
        got, want = ptxrt.rope(x, table, np.arange(1, 5), style=style), exact(x, table, np.arange(1, 5), style)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
        assert np.isfinite(got).sum() == 4 * 64 - 6


def test_positions_on_the_device_that_the_table_does_not_have_make_nan(text_machine):
    x, table = normal(4, 2, 48), ptxrt.to_device(ptxrt.rope_table(32, 9))
    positions = ptxrt.to_device(np.array([8, 9, -1, 2**31 - 1], np.int32))
    for style in ("halves", "pairs"):
        got = ptxrt.rope(ptxrt.to_device(x), table, positions, first=5, style=style).to_numpy()
        assert np.isfinite(got[0]).all() and np.isnan(got[1:, :, 5:37]).all()
        kept = np.r_[:5, 37:48]
        np.testing.assert_array_equal(got[..., kept], x[..., kept])


def test_no_bit_depends_on_other_rows(text_machine):
    table, x = ptxrt.rope_table(64, 40), normal(37, 64, dtype=BF16)
    whole = ptxrt.rope(x, table, np.arange(37), out_dtype=np.float32)
    np.testing.assert_array_equal(ptxrt.rope(x[17], table, 17, out_dtype=np.float32), whole[17])


def test_empty_arrays(text_machine):
    table = ptxrt.rope_table(16, 9)
    assert ptxrt.rope(normal(0, 3, 16), table, np.zeros(0, int)).shape == (0, 3, 16)
    assert ptxrt.rope(normal(2, 0, 16), table, [1, 2]).shape == (2, 0, 16)
    assert ptxrt.rope(normal(0, 16), table, np.zeros(0, int), format="mxfp8").shape == (0, 16)


def test_prepared_and_in_a_graph_with_other_positions(text_machine):
    table, x = ptxrt.to_device(ptxrt.rope_table(64, 40)), ptxrt.to_device(normal(3, 2, 64, dtype=BF16))
    positions, out = ptxrt.to_device(np.array([1, 2, 3], np.int32)), ptxrt.zeros((3, 2, 64), BF16)
    with ptxrt.graph() as graph:
        ptxrt.rope(x, table, positions, out=out)
    prepared = ptxrt.prepare(ptxrt.rope, x, table, positions, format="mxfp4", scale_layout="128x4")
    assert len(prepared.launches) == 1
    for numbers in ([1, 2, 3], [39, 0, 7]):
        positions[...] = np.array(numbers, np.int32)
        graph.launch()
        np.testing.assert_array_equal(out.to_numpy(), ptxrt.rope(x, table, numbers).to_numpy())
        want = ptxrt.rope(x, table, numbers, format="mxfp4", scale_layout="128x4")
        np.testing.assert_array_equal(prepared(x, table, positions).codes.to_numpy(), want.codes.to_numpy())


X, TABLE = normal(6, 64), ptxrt.rope_table(64, 9)


@pytest.mark.parametrize(
    "words, call",
    [
        ("positions go from 0 to 9; the table has 9", lambda: ptxrt.rope(X, TABLE, [0, 1, 2, 3, 4, 9])),
        ("positions go from -1", lambda: ptxrt.rope(X, TABLE, -1)),
        ("positions is float64", lambda: ptxrt.rope(X, TABLE, 1.5)),
        ("first axes", lambda: ptxrt.rope(X, TABLE, [1])),
        ("table is float64", lambda: ptxrt.rope(X, TABLE.astype(np.float64), 1)),
        ("table is .*r even", lambda: ptxrt.rope(X, TABLE[:, :63], 1)),
        ("table is Quant.*ptxrt.dequantize", lambda: ptxrt.rope(X, ptxrt.quantize(TABLE, "mxfp8"), 1)),
        ("rope_table: float32 .10, 100000", lambda: ptxrt.rope_table(10**400, 10)),
        ("rope_table: float32 .100000.*, 64. takes more than", lambda: ptxrt.rope_table(64, 10**400)),
        ("base is 1000.*; pass a positive number that float64", lambda: ptxrt.rope_table(64, 10, base=10**400)),
        (
            "factor of yarn is 0.5; the context grows by it",
            lambda: ptxrt.rope_table(64, 10, yarn=dict(factor=0.5, length=9)),
        ),
        (
            "beta_fast of yarn is 1.0, beta_slow 32.0; beta_fast is at least beta_slow",
            lambda: ptxrt.rope_table(64, 10, yarn=dict(factor=2, length=9, beta_fast=1, beta_slow=32)),
        ),
        (
            "factor of yarn is 1000.*; pass a positive number",
            lambda: ptxrt.rope_table(64, 10, yarn=dict(factor=10**400, length=9)),
        ),
        ("first is 1, the table turns 64", lambda: ptxrt.rope(X, TABLE, 1, first=1)),
        ("first is -2", lambda: ptxrt.rope(X, TABLE[:, :32], 1, first=-2)),
        ("first is True", lambda: ptxrt.rope(X, TABLE[:, :32], 1, first=True)),
        ("style is 'neox'", lambda: ptxrt.rope(X, TABLE, 1, style="neox")),
        ("inverse is 1", lambda: ptxrt.rope(X, TABLE, 1, inverse=1)),
        ("rounding is None", lambda: ptxrt.rope(X, TABLE, 1, rounding=None)),
        ("overlaps x", lambda: ptxrt.rope(X, TABLE, 1, out=X)),
        ("needs global_scale", lambda: ptxrt.rope(X, TABLE, 1, format="nvfp4")),
        ("strides", lambda: ptxrt.rope(ptxrt.to_device(X), TABLE, ptxrt.to_device(np.zeros((6, 2), np.int32))[:, 0])),
    ],
)
def test_wrong_calls(words, call):
    with ptxrt.using("emulator"), pytest.raises(ArgumentError, match=words):
        call()
